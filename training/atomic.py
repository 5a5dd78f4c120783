"""Files that are there whole or not at all."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write beside `path`, sync, rename. On any failure (a full disk, Ctrl-C) `path` stays as it was.

    Args:
        path: Its folder must be there.
        content: The bytes, or a function that writes them to the open file.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        make_readable(Path(temporary))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


TEMPORARY_SUFFIX = ".writing"
"""Ends the names of files that are not finished; one that is left over, after a kill, may be removed."""


def temporary_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the same file system, to write in before `place_files`."""
    return tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY_PREFIX)


TEMPORARY_PREFIX = ".writing-"
"""Begins the names of such folders; one that is left over, after a kill, may be removed."""


def place_files(source: Path, folder: Path, *, last: str) -> None:
    """Move files and folders into `folder` by renaming, replacing those of the same names; `last` appears last."""
    for path in sorted(source.iterdir(), key=lambda path: (path.name == last, path.name)):
        if path.is_dir():
            shutil.rmtree(folder / path.name, ignore_errors=True)
        os.replace(path, folder / path.name)


def system_errors(error: BaseException | None) -> set[int]:
    """Numbers of the system's errors behind an error, such as `errno.ENOSPC`; safetensors says them in words only."""
    numbers = set()
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            numbers.add(error.errno)
        numbers |= {int(number) for number in _IN_WORDS.findall(str(error))}
        if "No space left on device" in str(error):
            numbers.add(errno.ENOSPC)
        error = error.__cause__ or error.__context__
    return numbers


# "Error while serializing: I/O error: Disk quota exceeded (os error 122)"
_IN_WORDS = re.compile(r"\(os error (\d+)\)")


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk, or a used-up quota, is behind an error."""
    return not system_errors(error).isdisjoint((errno.ENOSPC, errno.EDQUOT))


def make_readable(path: Path) -> None:
    """Give a file, or all files below a folder, the permissions that a new file of the user's has.

    mkstemp and safetensors make private files; a checkpoint is as readable as everything else.
    """
    umask = os.umask(0)
    os.umask(umask)
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            os.chmod(file, 0o666 & ~umask)
