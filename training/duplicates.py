"""Exact duplicates in bounded memory: digests in compact tables, and on disk beyond a bound.

What counts as equal is the caller's choice of digest: `split.document_digest` (the same text, character for character)
or `normalized_digest` (the same text but for its white space and the composition of its characters).
"""

import hashlib
import tempfile
import unicodedata
from array import array
from pathlib import Path

import numpy as np

from tercet.training.atomic import is_disk_full
from tercet.training.documents import DataError
from tercet.training.split import DIGEST_BYTES

_NUM_TABLES = 256
_FIRST_SLOTS = 16
_CHUNK_CHARS = 1 << 20


def normalized_digest(text: str) -> bytes:
    """`document_digest` of the text in NFC, every run of white space one space, none at either end.

    Nothing else is levelled: case, punctuation and digits tell texts apart.

    Raises:
        UnicodeEncodeError: If the text holds a lone surrogate, which no UTF-8 can carry.
    """
    text = unicodedata.normalize("NFC", text)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    has_words = parted = False
    # In chunks: the words of a document of 50 MB, all at once, would take ten times its size.
    for start in range(0, len(text), _CHUNK_CHARS):
        chunk = text[start : start + _CHUNK_CHARS]
        words = chunk.split()
        parted = parted or chunk[0].isspace()
        if words:
            digest.update(((" " if has_words and parted else "") + " ".join(words)).encode("utf-8"))
            has_words, parted = True, chunk[-1].isspace()
    return digest.digest()


class DuplicateFilter:
    """Remembers the digests it has seen, and knows one that comes again.

    A digest takes 11 to 16 bytes: 72 bits of it, in open-addressed tables of 64-bit slots that grow by half. Two
    different texts share these bits with a probability of 1e-8 among ten million documents, 1e-4 among a thousand
    million. Past `max_bytes` the tables go, sorted, into an unnamed file, which the operating system keeps in memory as
    far as it has room, and begin anew.
    """

    def __init__(self, *, max_bytes: int = 1 << 30, spill_dir: Path | None = None) -> None:
        """
        Args:
            max_bytes: Of the tables; about 75 million digests by default.
            spill_dir: Where the files go; the system's folder for temporary files if None.
        """
        self._max_bytes = max_bytes
        self._spill_dir = spill_dir
        self._runs: list[_SortedRun] = []
        self._zero_keys: set[int] = set()  # tables whose key 0 was seen: 0 is a free slot there
        self._begin()

    @property
    def nbytes(self) -> int:
        """Bytes of the tables in memory."""
        return self._num_slots * 8

    def is_duplicate(self, digest: bytes) -> bool:
        """Whether this digest was asked about before; remembers it from now on.

        Raises:
            DataError: If the tables must go to disk and it is full.
        """
        key = int.from_bytes(digest[:8], "little")
        number = digest[8]
        if not key:
            is_known = number in self._zero_keys
            self._zero_keys.add(number)
            return is_known
        table = self._tables[number]
        num_slots = len(table)
        slot = key % num_slots
        while held := table[slot]:
            if held == key:
                return True
            slot = slot + 1 if slot + 1 < num_slots else 0
        if any(run.holds(number, key) for run in self._runs):
            return True
        table[slot] = key
        self._counts[number] += 1
        if 4 * self._counts[number] > 3 * num_slots:
            self._grow(number)
        return False

    def _begin(self) -> None:
        self._tables = [array("Q", bytes(8 * _FIRST_SLOTS)) for _ in range(_NUM_TABLES)]
        self._counts = [0] * _NUM_TABLES
        self._num_slots = _NUM_TABLES * _FIRST_SLOTS

    def _grow(self, number: int) -> None:
        old = self._tables[number]
        num_slots = len(old) * 3 // 2
        if 8 * (self._num_slots + num_slots - len(old)) > self._max_bytes:
            self._spill()
            return
        new = array("Q", bytes(8 * num_slots))
        for key in filter(None, old):
            slot = key % num_slots
            while new[slot]:
                slot = slot + 1 if slot + 1 < num_slots else 0
            new[slot] = key
        self._tables[number] = new
        self._num_slots += num_slots - len(old)

    def _spill(self) -> None:
        try:
            self._runs.append(_SortedRun(self._tables, self._counts, self._spill_dir))
        except OSError as error:
            if is_disk_full(error):
                raise DataError(
                    f"The disk is full: the digests of the documents read so far, {self.nbytes:,} bytes, could not be "
                    f"written to {self._spill_dir or tempfile.gettempdir()}. Free some space and run the same command "
                    f"again, or leave duplicates in (data.drop_duplicates=false)."
                ) from error
            raise
        self._begin()


class _SortedRun:
    """The keys of full tables, in an unnamed file that is gone with the process: table after table, each sorted."""

    def __init__(self, tables: "list[array[int]]", counts: list[int], folder: Path | None) -> None:
        self._offsets = np.concatenate([[0], np.cumsum(counts)]).tolist()
        with tempfile.TemporaryFile(dir=folder) as file:
            for table in tables:
                keys = np.frombuffer(table, dtype=np.uint64)
                file.write(np.sort(keys[keys != 0]).tobytes())
            file.flush()
            self._keys = np.asarray(np.memmap(file, dtype=np.uint64, mode="r"))

    def holds(self, number: int, key: int) -> bool:
        keys = self._keys[self._offsets[number] : self._offsets[number + 1]]
        place = int(np.searchsorted(keys, np.uint64(key)))
        return place < len(keys) and int(keys[place]) == key
