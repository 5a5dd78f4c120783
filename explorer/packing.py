"""Arrays as text for the page: small integers with scales, deflated, in base64.

The page's `arrays.js` reads what this file writes. Every number is little-endian; numbers of 16 bits are written as all
their low bytes, then all their high bytes, which deflates better.
"""

import base64
import zlib
from dataclasses import dataclass

import numpy as np

TAIL_STEPS = 1024  # of one in a logit: what the logits of the improbable tokens are rounded to


@dataclass(frozen=True)
class PackedArray:
    """One array of the page.

    Attributes:
        kind: "fraction" (integer / its maximum), "scaled" (float32 scale of each row, then the rows), "float32",
            "unsigned" (integers as they are) or "descending" (float32 start of each row, then steps down).
        bits: Of each integer; 32 for float32.
        data: Base64 of the deflated bytes.
    """

    kind: str
    shape: tuple[int, ...]
    bits: int
    data: str


def _integers(values: np.ndarray, bits: int) -> bytes:
    if bits == 8:
        return values.astype("<u1" if values.dtype.kind == "u" else "<i1").tobytes()
    wide = values.astype("<u2" if values.dtype.kind == "u" else "<i2")
    return wide.view("u1").reshape(-1, 2).T.tobytes()


def _text(*parts: bytes) -> str:
    return base64.b64encode(zlib.compress(b"".join(parts), 6)).decode("ascii")


def pack_fractions(values: np.ndarray, bits: int) -> PackedArray:
    """Values in [0, 1] whose rows keep their sums: rounded are the running sums, so that no error adds up.

    Args:
        values: (..., n).
        bits: 8 or 16 for each; the error of an entry is below 1 / (2 ** bits - 1).
    """
    maximum = 2**bits - 1
    sums = np.clip(values, 0, 1).cumsum(-1, dtype=np.float64)
    whole = np.diff(np.round(sums * maximum), axis=-1, prepend=0.0).clip(0, maximum)
    return PackedArray("fraction", values.shape, bits, _text(_integers(whole.astype(np.uint32), bits)))


def pack_scaled(values: np.ndarray, bits: int) -> PackedArray:
    """Signed values, each row by its own largest.

    Args:
        values: (..., n), finite.
        bits: 8 or 16 for each; the error is at most half of the row's largest / (2 ** (bits - 1) - 1).
    """
    maximum = 2 ** (bits - 1) - 1
    scales = np.abs(values).max(-1, keepdims=True).astype(np.float32) / maximum
    rows = np.round(values / np.where(scales > 0, scales, 1)).clip(-maximum, maximum).astype(np.int32)
    return PackedArray("scaled", values.shape, bits, _text(scales.astype("<f4").tobytes(), _integers(rows, bits)))


def pack_float32(values: np.ndarray) -> PackedArray:
    """Values as they are."""
    return PackedArray("float32", values.shape, 32, _text(values.astype("<f4").tobytes()))


def pack_unsigned(values: np.ndarray) -> PackedArray:
    """Counts and indices below 2 ** 16; larger ones would not fit and are refused.

    Raises:
        ValueError: If one is negative or above 65,535.
    """
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise ValueError(f"values from {values.min()} to {values.max()} are not all in 0 to 65535")
    return PackedArray("unsigned", values.shape, 16, _text(_integers(values.astype(np.uint32), 16)))


def pack_descending(values: np.ndarray) -> PackedArray:
    """Sorted values by their steps down, in units of 1 / TAIL_STEPS: tens of thousands of logits in some kilobytes.

    Args:
        values: (rows, n), each row descending. Rounded to the nearest unit below its first, so that errors do not
            add up; a step over 64 (a vocabulary's unused ids at -inf) is cut to 64, where no temperature sees it.
    """
    starts = values[:, :1].astype(np.float32)
    depth = np.round((starts.astype(np.float64) - np.maximum(values, -1e4)) * TAIL_STEPS)
    steps = np.diff(depth, axis=-1, prepend=0.0).clip(0, 65535).astype(np.uint32)
    return PackedArray("descending", values.shape, 16, _text(starts.astype("<f4").tobytes(), _integers(steps, 16)))
