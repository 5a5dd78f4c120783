"""How many distinct words a text holds, to about one in a hundred, at memory for one word in 64.

What training a BPE takes is decided by the distinct words, not by the text: a gigabyte of English repeats itself, a
gigabyte of Chinese, whose words run from one mark to the next, does not.
"""

from typing import get_args

import numpy as np

from tercet.tokenizer.pretokenization import Words

_SPACE, _NEWLINE, _DIGIT, _LETTER, _MARK = range(5)
_BLOCK_BYTES = 1 << 15  # eight bytes each, a few times over: what the processor's cache holds
_MAX_WORD_BYTES = 64  # longer ones are counted in parts: a single one that is in the sample would weigh too much
_SAMPLED_BITS = 6
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd: it has an inverse modulo 2**64
_INVERSE = pow(_MULTIPLIER, -1, 1 << 64)


class DistinctWords:
    """Counts by a sample of the words themselves: one that is in the sample is in it wherever it comes up.

    Words are close to the pre-tokenizer's, and more rather than fewer: letters (every byte above 127 is one) with the
    character before them, or marks. Digits and blanks, in words of their own, make few that are distinct. Where words
    are longer than Llama 3's, all marks that do not part them are letters, and so are digits, but not among clauses; of
    clauses and between blanks a word has all the blanks that are before it.
    """

    def __init__(self, words: Words = "llama3") -> None:
        self._kinds = _KINDS[words]
        self._takes_all_blanks = words in ("clauses", "blanks")
        self._sampled: set[int] = set()
        self._sampled_bytes = 0

    @property
    def num_words(self) -> int:
        """Distinct words so far."""
        return len(self._sampled) << _SAMPLED_BITS

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the distinct words so far."""
        return self._sampled_bytes << _SAMPLED_BITS

    def add(self, content: bytes) -> None:
        """Count the words of UTF-8 text; what follows in the next call is another word."""
        for start in range(0, len(content), _BLOCK_BYTES):
            self._add_block(np.frombuffer(content, np.uint8, min(_BLOCK_BYTES, len(content) - start), start))

    def _add_block(self, codes: np.ndarray) -> None:
        starts, ends = _words(self._kinds[codes], self._takes_all_blanks)
        if not len(starts):
            return
        # Polynomial hashes of all words by differences of one running sum, modulo 2**64.
        sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * _POWERS[: len(codes)], out=sums[1:])
        hashes = (sums[ends] - sums[starts]) * _INVERSE_POWERS[starts]
        hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(_MULTIPLIER)
        sampled = np.flatnonzero(hashes >> np.uint64(64 - _SAMPLED_BITS) == 0)
        lengths = (ends - starts)[sampled]
        for word, length in zip(hashes[sampled].tolist(), lengths.tolist(), strict=True):
            if word not in self._sampled:
                self._sampled.add(word)
                self._sampled_bytes += length


def _words(kinds: np.ndarray, takes_all_blanks: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where the words of a block start and end; kinds of its bytes."""
    bounds = np.concatenate(([0], np.flatnonzero(kinds[1:] != kinds[:-1]) + 1, [len(kinds)]))
    starts, ends = bounds[:-1], bounds[1:]
    counted = kinds[starts] >= _LETTER
    previous = np.concatenate(([0], starts[:-1]))[counted]  # where the run before it starts
    starts, ends = starts[counted], ends[counted]
    before = kinds[starts - 1]
    takes = (kinds[starts] == _LETTER) & (starts > 0) & ((before == _SPACE) | (before == _MARK))
    starts = np.where(takes, previous if takes_all_blanks else starts - 1, starts)
    num_parts = -(-(ends - starts) // _MAX_WORD_BYTES)
    if num_parts.max(initial=1) == 1:
        return starts, ends
    word = np.repeat(np.arange(len(starts)), num_parts)
    part = np.arange(len(word)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    part_starts = starts[word] + part * _MAX_WORD_BYTES
    return part_starts, np.minimum(part_starts + _MAX_WORD_BYTES, ends[word])


def _kinds(words: Words) -> np.ndarray:
    kinds = np.full(256, _MARK if words == "llama3" else _LETTER, np.uint8)
    kinds[[ord(c) for c in " \t\x0b\x0c"]] = _SPACE
    kinds[[ord(c) for c in "\r\n"]] = _NEWLINE
    if words in ("llama3", "clauses"):
        kinds[[ord(c) for c in "0123456789"]] = _DIGIT
    if words in ("clauses", "blanks"):
        kinds[[ord(c) for c in "\x0b\x0c"]], kinds[[ord(c) for c in "\r\n"]] = _LETTER, _SPACE
    if words == "clauses":
        kinds[[ord(c) for c in ",."]] = _MARK
    if words == "llama3":
        kinds[[c for c in range(256) if c > 127 or chr(c).isalpha()]] = _LETTER
    if words == "bloom":
        kinds[[ord(c) for c in "(|.,!?)"]] = _MARK
    return kinds


def _powers(base: int) -> np.ndarray:
    """base ** 0, 1, ... modulo 2**64."""
    powers = np.full(_BLOCK_BYTES, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


_KINDS: dict[Words, np.ndarray] = {words: _kinds(words) for words in get_args(Words)}
_POWERS = _powers(_MULTIPLIER)
_INVERSE_POWERS = _powers(_INVERSE)
