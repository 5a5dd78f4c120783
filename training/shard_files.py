"""Writing the files of prepared data: a shard's tokens as they come, then the index that makes the shard count."""

import hashlib
import io
import json
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tercet.training.atomic import TEMPORARY_SUFFIX, is_disk_full, make_readable, write_atomically
from tercet.training.documents import DataError
from tercet.training.skips import SkipReport
from tercet.training.token_set import LABELS_SUFFIX, MANIFEST, ShardIndex, SourceReport

_BUFFER_TOKENS = 1 << 18


class ShardWriter:
    """One shard on its way to disk. Memory holds its documents' lengths, not their tokens."""

    def __init__(self, data_dir: Path, name: str, dtype: str) -> None:
        self.name = name
        self.documents_read = self.num_tokens = 0
        self._data_dir, self._dtype = data_dir, np.dtype(dtype)
        self._lengths, self._bytes, self._split, self._source = array("q"), array("q"), array("B"), array("i")
        self._label_bytes = array("q")
        self._counts: dict[str, Counter[str]] = {}
        self._place: dict[str, int] = {}
        self._labels: _LabelRuns | None = None
        self._length = self._num_waiting = 0
        self._waiting: list[np.ndarray] = []
        self._path = data_dir / f"{name}.bin"
        with explained(self._path):
            handle, temporary = tempfile.mkstemp(dir=data_dir, prefix=f".{name}.bin.", suffix=TEMPORARY_SUFFIX)
            self._temporary = Path(temporary)
            self._file = os.fdopen(handle, "wb")

    def add_tokens(self, tokens: np.ndarray, is_label: bool = True) -> None:
        """Go on with the text that is being written."""
        self._waiting.append(tokens)
        self._num_waiting += len(tokens)
        if self._num_waiting >= _BUFFER_TOKENS:
            self._write_waiting()
        if not is_label and self._labels is None:
            self._labels = _LabelRuns(self.num_tokens)
        if self._labels is not None:
            self._labels.add(len(tokens), is_label)
        self._length += len(tokens)
        self.num_tokens += len(tokens)

    def end_text(self, split: int, num_bytes: int, num_label_bytes: int, source: str) -> None:
        """The text is whole: note it as a document of its split."""
        self._lengths.append(self._length)
        self._bytes.append(num_bytes)
        self._label_bytes.append(num_label_bytes)
        self._split.append(split)
        counts = self._counts_of(source)
        self._source.append(self._place[source])
        counts["tokens"] += self._length
        counts["bytes"] += num_bytes
        self._length = 0

    def end_document(self, source: str, count: str) -> None:
        """A document is through, and counts under this name of `SourceReport`."""
        self.documents_read += 1
        self._counts_of(source)[count] += 1

    def finish(self, fingerprint: str, content: str) -> ShardIndex:
        """Put the files in their places, the index last.

        Raises:
            DataError: If the disk is full; the shard does not count then.
        """
        index = ShardIndex(
            name=self.name,
            fingerprint=fingerprint,
            content=content,
            documents_read=self.documents_read,
            lengths=np.frombuffer(self._lengths, dtype=np.int64),
            bytes=np.frombuffer(self._bytes, dtype=np.int64),
            label_bytes=None if self._labels is None else np.frombuffer(self._label_bytes, dtype=np.int64),
            split=np.frombuffer(self._split, dtype=np.uint8),
            source=np.frombuffer(self._source, dtype=np.int32),
            report={source: SourceReport(**counts) for source, counts in self._counts.items()},
            has_labels=self._labels is not None,
        )
        self._write_waiting()
        with explained(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            make_readable(self._temporary)
            os.replace(self._temporary, self._path)
        if self._labels is not None:
            write_file(self._data_dir / f"{self.name}{LABELS_SUFFIX}", self._labels.bitmap().tobytes())
        write_index(self._data_dir, index)
        return index

    def abandon(self) -> None:
        """Take away what is not finished."""
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write_waiting(self) -> None:
        """Hand what has come together to the file: a write for each document would cost more than its tokens."""
        with explained(self._path):
            self._file.write(np.concatenate([np.empty(0, self._dtype), *self._waiting], dtype=self._dtype).data)
        self._waiting, self._num_waiting = [], 0

    def _counts_of(self, source: str) -> Counter[str]:
        if source not in self._counts:
            self._place[source] = len(self._counts)
            self._counts[source] = Counter()
        return self._counts[source]


class _LabelRuns:
    """Which tokens of a shard are labels, in runs of equal ones; all are before the first that is none."""

    def __init__(self, num_before: int) -> None:
        self._lengths, self._is_label = array("q", [num_before]), array("B", [1])

    def add(self, length: int, is_label: bool) -> None:
        if self._is_label[-1] == is_label:
            self._lengths[-1] += length
        else:
            self._lengths.append(length)
            self._is_label.append(is_label)

    def bitmap(self) -> np.ndarray:
        """A bit for each token, the first one highest in its byte, uint8 (ceil(tokens / 8),)."""
        return np.packbits(np.repeat(np.frombuffer(self._is_label, np.uint8), np.frombuffer(self._lengths, np.int64)))


def write_index(data_dir: Path, index: ShardIndex) -> None:
    """Write the .npz of a shard whose other files stand, which makes it count.

    Raises:
        DataError: If the disk is full.
    """
    meta = {
        "fingerprint": index.fingerprint,
        "content": index.content,
        "documents_read": index.documents_read,
        "report": {source: asdict(counts) for source, counts in index.report.items()},
        **({"has_labels": True} if index.has_labels else {}),
    }
    columns: dict[str, Any] = {} if index.label_bytes is None else {"label_bytes": index.label_bytes}
    buffer = io.BytesIO()
    np.savez(
        buffer,
        meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
        lengths=index.lengths,
        bytes=index.bytes,
        split=index.split,
        source=index.source,
        **columns,
    )
    write_file(data_dir / f"{index.name}.npz", buffer.getvalue())


def write_file(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """`write_atomically`, with one line for a full disk.

    Raises:
        DataError: If the disk is full.
    """
    with explained(path):
        write_atomically(path, content)


def settings_fingerprint(settings: dict[str, Any]) -> str:
    """Stands for the settings in a shard's index."""
    return hash_text(json.dumps(settings, sort_keys=True))


def write_manifest(
    data_dir: Path,
    settings: dict[str, Any],
    content: str,
    shards: list[str],
    by_source: dict[str, SourceReport],
    skips: SkipReport,
    **more: Any,
) -> None:
    """Write what makes shards a set, and take away shards that are none of it; nothing to do if it stands there.

    Raises:
        DataError: If the disk is full.
    """
    fingerprint = settings_fingerprint(settings)
    skipped = skips.as_dict()
    manifest = {
        "fingerprint": hash_text(fingerprint + content),
        "settings_fingerprint": fingerprint,
        "content": content,
        "settings": settings,
        "shards": shards,
        "by_source": {source: asdict(counts) for source, counts in sorted(by_source.items())},
        **({"skipped": skipped} if skipped else {}),
        **more,
    }
    text = json.dumps(manifest, indent=2) + "\n"
    path = data_dir / MANIFEST
    if not path.exists() or path.read_text("utf-8") != text:
        remove_shards(data_dir, len(shards))
        write_file(path, text.encode())


def hash_text(text: str) -> str:
    """32 hexadecimal digits that stand for the text."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns a full disk, while `path` is written, into a DataError."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise _disk_full(path) from error
        raise


def _disk_full(path: Path) -> DataError:
    return DataError(
        f"The disk is full: {path} could not be written. Free some space and run the same command again; it goes on "
        f"after the shards that are finished."
    )


def shard_name(number: int) -> str:
    """File name, without suffix, of shard `number`."""
    return f"shard-{number:05d}"


def remove_shards(data_dir: Path, first: int) -> None:
    """Take away the manifest, then the shards from `first` on: what remains is never taken for whole."""
    remove_files([data_dir / MANIFEST])
    remove_files(p for p in data_dir.glob("shard-*.*") if p.stem >= shard_name(first))


def remove_temporary_files(data_dir: Path) -> None:
    """Take away what a killed preparation has left unfinished."""
    remove_files(data_dir.glob(f"*{TEMPORARY_SUFFIX}"))


def remove_files(paths: Iterable[Path]) -> None:
    """Take files away, if they are there."""
    for path in list(paths):
        with suppress(FileNotFoundError):
            path.unlink()
