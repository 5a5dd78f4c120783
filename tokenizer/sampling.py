"""A part of a corpus that stands for all of it: chosen by hash, in one pass, in bounded memory.

The pieces with the smallest hashes are kept, as many as the budget holds. Which those are is a function of the set of
documents alone: not of their order, nor of how many there will be. A text that comes again has the hash that it had, so
a corpus that grows changes the sample as little as it must.
"""

import hashlib
import os
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, cast

import numpy as np

from tercet.tokenizer.pretokenization import Words, split_document

MIN_SAMPLE_BYTES = 1 << 14
"""Smallest budget: below it a piece of one long document would be most of the sample."""

_MAX_PIECE_CHARS = 1 << 16
_PIECES_IN_BUDGET = 64  # at least: a corpus of one document is sampled from end to end
_READ_AT_ONCE = 1 << 12
_PERSON = b"tercet sample"  # another hash than the one that holds documents out for validation


@dataclass(frozen=True)
class SampleCounts:
    """How much was seen and how much of it is kept; a long document counts once for each of its pieces."""

    seen_pieces: int
    seen_bytes: int
    kept_pieces: int
    kept_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether everything that was seen is kept."""
        return self.kept_pieces == self.seen_pieces


class TextSampler:
    """Takes documents in any order, and gives the sample back in the order of the hashes.

    Long documents are cut where their tokens part anyway, and every piece has a hash of its own, so that one document
    of many gigabytes is sampled evenly too. Texts lie in a temporary file of at most twice the budget; memory holds 20
    bytes for a piece, of at most twice `max_pieces`, however long the corpus.
    """

    def __init__(self, max_bytes: int, max_pieces: int, words: Words = "llama3") -> None:
        """
        Args:
            max_bytes: UTF-8 bytes that the sample may hold.
            max_pieces: Documents that it may hold; a long one counts once for each of its pieces.
            words: Those that long documents are cut between.

        Raises:
            ValueError: If there would be no sample to speak of.
        """
        if max_bytes < MIN_SAMPLE_BYTES:
            raise ValueError(f"max_bytes={max_bytes} is too small for a sample; give at least {MIN_SAMPLE_BYTES}")
        if max_pieces < 1:
            raise ValueError(f"max_documents={max_pieces} leaves nothing; give at least 1")
        self.max_bytes = max_bytes
        self.max_pieces = max_pieces
        self.words: Words = words
        self.piece_chars = min(_MAX_PIECE_CHARS, max_bytes // _PIECES_IN_BUDGET)
        self._seen_pieces = self._seen_bytes = self._held_bytes = self._end = 0
        self._threshold = 1 << 64  # what hashes to this or more is out for good
        self._keys, self._offsets, self._sizes = array("Q"), array("Q"), array("I")
        self._file = _temporary_file()

    def __enter__(self) -> "TextSampler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):  # of what it cannot write any more, nothing is wanted
            self._file.close()

    def add(self, text: str) -> None:
        """Take a document; an empty one counts for nothing.

        Raises:
            UnicodeEncodeError: If the text holds a lone surrogate.
            OSError: If the folder of temporary files is full; names it.
        """
        if not text:
            return
        is_short = len(text) <= self.piece_chars
        for piece in (text,) if is_short else self._cut(text):
            content = piece.encode("utf-8")
            self._seen_pieces += 1
            self._seen_bytes += len(content)
            key = int.from_bytes(hashlib.blake2b(content, digest_size=8, person=_PERSON).digest(), "big")
            if key < self._threshold:
                self._keys.append(key)
                self._offsets.append(self._end)
                self._end += len(content)
                self._sizes.append(len(content))
                self._write(content)
                self._held_bytes += len(content)
        # At twice the budget, so that all the trims together read and write a few times the budget, no more.
        if self._held_bytes > 2 * self.max_bytes or len(self._keys) > 2 * self.max_pieces:
            self._trim()

    def _write(self, content: bytes) -> None:
        try:
            self._file.write(content)
        except OSError as error:
            raise _of_temporary_folder(error) from error

    def _cut(self, text: str) -> Iterator[str]:
        return split_document(text, self.piece_chars, 2 * self.piece_chars, self.words)

    def counts(self) -> SampleCounts:
        """What the sample holds of what was added so far."""
        self._trim()
        return SampleCounts(self._seen_pieces, self._seen_bytes, len(self._keys), self._held_bytes)

    def pieces(self) -> Iterator[str]:
        """The sample, in the order of the hashes: the beginning of it is a sample too."""
        return (content.decode("utf-8") for content in self.contents())

    def contents(self) -> Iterator[bytes]:
        """The same in UTF-8."""
        self._trim()
        self._file.flush()
        handle = self._file.fileno()
        offsets, sizes = np.array(self._offsets, np.int64), np.array(self._sizes, np.int64)
        order = np.argsort(np.array(self._keys, np.uint64), kind="stable")
        for start in range(0, len(order), _READ_AT_ONCE):  # as lists, numbers are read sooner but take more memory
            some = order[start : start + _READ_AT_ONCE]
            for offset, size in zip(offsets[some].tolist(), sizes[some].tolist(), strict=True):
                yield _read(handle, offset, size)

    def _trim(self) -> None:
        """Keep the smallest hashes: as many, from the first, as the budget holds.

        Whatever has come before, what is kept now is what would be kept of all texts so far: a text that a budget had
        no room for is greater than all that were kept, so the threshold turns away only what more text would push out
        again. Equal hashes are equal texts, of which any is as good as another.
        """
        keys, sizes = np.array(self._keys, np.uint64), np.array(self._sizes, np.int64)
        order = np.argsort(keys, kind="stable")
        num_kept = int(np.searchsorted(np.cumsum(sizes[order]), self.max_bytes, side="right"))
        num_kept = min(num_kept, self.max_pieces)
        if num_kept == len(keys):
            return
        self._threshold = int(keys[order[num_kept]])
        kept = np.sort(order[:num_kept])
        offsets = np.array(self._offsets, np.int64)[kept]
        self._compact(offsets, sizes[kept])
        self._keys = array("Q", keys[kept].tobytes())
        self._sizes = array("I", sizes[kept].astype(np.uint32).tobytes())
        ends = np.cumsum(sizes[kept])
        self._offsets = array("Q", (ends - sizes[kept]).astype(np.uint64).tobytes())
        self._held_bytes = self._end = int(ends[-1]) if num_kept else 0

    def _compact(self, offsets: np.ndarray, sizes: np.ndarray) -> None:
        """Copy what is kept, in the order in which it lies, into a file that holds nothing else."""
        compacted = _temporary_file()
        try:
            self._file.flush()
            handle = self._file.fileno()
            for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
                compacted.write(_read(handle, offset, size))
        except BaseException as error:
            with suppress(OSError):
                compacted.close()
            if isinstance(error, OSError):
                raise _of_temporary_folder(error) from error
            raise
        self._file.close()
        self._file = compacted


def _of_temporary_folder(error: OSError) -> OSError:
    """The error of a file without a name; the user, who did not choose its folder, is to learn which that is."""
    return OSError(error.errno, error.strerror, tempfile.gettempdir())


def _temporary_file() -> BinaryIO:
    return cast(BinaryIO, tempfile.TemporaryFile(prefix="tercet-sample-"))


def _read(handle: int, offset: int, size: int) -> bytes:
    # Not through the file object, whose buffer is read again for every jump; nor mapped, which would count as memory.
    content = os.pread(handle, size, offset)
    assert len(content) == size
    return content
