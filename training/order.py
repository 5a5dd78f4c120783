"""The order of rows as a pure function: which row is sample i of epoch e needs no list, no state and no replay.

A permutation of range(size) is computed point by point: a Feistel network permutes the next power of four, and a value
outside the range is sent through it again until it falls inside (cycle walking, Black and Rogaway 2002). At most four
times the range is walked, so a point costs a few rounds of integer arithmetic whatever the size.
"""

import hashlib

import numpy as np

_ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def permuted(index: int, size: int, key: bytes) -> int:
    """Where a permutation of range(size) sends `index`.

    Args:
        index: Between 0 and size - 1.
        size: At least 1.
        key: Chooses the permutation; see `epoch_key`.

    Raises:
        ValueError: If index is not in range(size).
    """
    return int(permuted_array(np.array([index]), size, key)[0])


def permuted_array(indexes: np.ndarray, size: int, key: bytes) -> np.ndarray:
    """`permuted` of each index, int64 of the same shape as `indexes`."""
    values = np.asarray(indexes, dtype=np.int64)
    if values.size and not (values.min() >= 0 and values.max() < size):
        raise ValueError(f"index must be in range({size}), not {values.min()} or {values.max()}.")
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    round_keys = np.frombuffer(hashlib.blake2b(key, digest_size=8 * _ROUNDS).digest(), dtype="<u8")
    result = _feistel(values.ravel().astype(np.uint64), half_bits, round_keys)
    while len(outside := np.flatnonzero(result >= size)):
        result[outside] = _feistel(result[outside], half_bits, round_keys)
    return result.astype(np.int64).reshape(values.shape)


def _feistel(values: np.ndarray, half_bits: int, round_keys: np.ndarray) -> np.ndarray:
    """A bijection of range(4 ** half_bits): a round xors one half with a hash of the other, and xor undoes itself."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in round_keys:
        mixed = (right ^ key) * _MULTIPLIER  # array arithmetic wraps modulo 2**64 as it should
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _MULTIPLIER
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << shift) | right


def epoch_key(seed: int, epoch: int) -> bytes:
    """The key of an epoch's permutation, the same on every machine."""
    return f"tercet order {seed} {epoch}".encode()


def sample_row(seed: int, epoch: int, index: int, num_rows: int) -> int:
    """The row that is sample `index` of `epoch`; over an epoch's num_rows samples every row comes once."""
    return permuted(index, num_rows, epoch_key(seed, epoch))


def sample_rows(seed: int, samples: np.ndarray, num_rows: int) -> np.ndarray:
    """Rows of samples counted through all epochs: sample n is `sample_row(seed, n // num_rows, n % num_rows)`."""
    epochs, indexes = np.divmod(np.asarray(samples, dtype=np.int64), num_rows)
    rows = np.empty_like(indexes)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        rows[chosen] = permuted_array(indexes[chosen], num_rows, epoch_key(seed, epoch))
    return rows
