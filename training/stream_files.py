"""The files that a stream is read from: what they were when a run began, and which of them has changed since.

A file whose size and times are what they were is the same; the time of change (ctime) is one that no program sets.
Where a time is another, as on a machine to which the text was copied, the content decides, by a hash that was taken
when the run began. Of more than `MAX_HASHED_BYTES` in a source none is taken, which would keep a run waiting: then size
and time of writing decide.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tercet.training.documents import DataError

MAX_HASHED_BYTES = 4 << 30


class StreamFile(NamedTuple):
    """A file as it was seen.

    Attributes:
        path: As the source names it.
        size: In bytes.
        mtime_ns: When it was written.
        ctime_ns: When anything of it changed here; another in every copy.
        sha256: Of its content, hexadecimal; None where only the time tells.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str | None

    def identity(self) -> str:
        """What is equal of two files that are taken for the same."""
        return f"{self.size} {self.sha256 or self.mtime_ns}"


def look_at(paths: Sequence[Path], begun: Sequence[StreamFile] = ()) -> tuple[StreamFile, ...]:
    """The files as they are.

    Args:
        begun: As they were; the hash of one with this size and these times is not taken anew.

    Raises:
        DataError: A file that cannot be read.
    """
    known = {file[:4]: file for file in begun}
    states = [_state(path) for path in paths]
    takes_hashes = sum(state[1] for state in states) <= MAX_HASHED_BYTES
    return tuple(
        known.get(state) or StreamFile(*state, _sha256(state[0]) if takes_hashes else None) for state in states
    )


def identity_of(files: Sequence[StreamFile]) -> str:
    """Stands for the files and what is in them, hexadecimal."""
    together = hashlib.blake2b(digest_size=16)
    for file in files:
        together.update(f"{file.path}\0{file.identity()}\0".encode("utf-8", "surrogateescape"))
    return together.hexdigest()


def change_between(begun: Sequence[StreamFile], now: Sequence[StreamFile]) -> str:
    """The first file that is not what it was, in words: "a.jsonl has another content"; "" if there is none."""
    before, after = ({file.path: file for file in files} for files in (begun, now))
    for path in sorted({*before, *after}):
        if path not in after:
            return f"{path} is gone"
        if path not in before:
            return f"{path} is new"
        was, found = before[path], after[path]
        if was.size != found.size:
            return f"{path} has {found.size:,} bytes and not {was.size:,}"
        if was.identity() != found.identity():
            if found.sha256 is not None:
                return f"{path} has another content"
            return f"{path} was written at another time (cp -p and rsync -t keep the time of a file they copy)"
    return ""


def files_from_json(recorded: Mapping[str, Sequence[Sequence]]) -> dict[str, tuple[StreamFile, ...]]:
    """The files of each source, which JSON keeps as lists.

    Raises:
        TypeError: It is something else.
    """
    return {label: tuple(StreamFile(*file) for file in files) for label, files in recorded.items()}


def _state(path: Path) -> tuple[str, int, int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return str(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _sha256(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
