"""Local files to text, exactly: no change of line ends, compression by suffix, one clear line for what is not text."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self, cast

from tercet.training.documents import DataError
from tercet.training.skips import RowError

COMPRESSIONS = (".gz", ".xz", ".zst")

_CHUNK_BYTES = 1 << 18
# A read of pyarrow's that meets a break loses what it has. zstd's blocks are 128 KiB of text, and so end with a read.
_ZST_BYTES = 1 << 12


def read_text(path: Path) -> str:
    """The whole file as UTF-8 text; encoding it again gives the file's bytes.

    Raises:
        RowError: If the file cannot be decompressed, holds NUL bytes, or is not UTF-8.
        DataError: If it cannot be opened.
    """
    content = read_bytes(path)
    if (offset := content.find(b"\0")) >= 0:
        raise RowError(
            "nul",
            f"holds a NUL byte (at byte {offset}): it is a binary file, or text that is not UTF-8",
            "Give a text file, or convert it, for instance with iconv -f UTF-16 -t UTF-8.",
            str(path),
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            "not_utf8",
            f"is not UTF-8 (byte {content[error.start]:#04x} at byte {error.start})",
            "Convert it, for instance with iconv -f LATIN1 -t UTF-8.",
            str(path),
        ) from error


def read_bytes(path: Path) -> bytes:
    """The whole file, decompressed.

    Raises:
        RowError: If it cannot be decompressed to its end.
        DataError: If it cannot be opened.
    """
    with _open_bytes(path) as stream:
        return stream.read()


def read_lines(path: Path) -> Iterator[bytes]:
    r"""The file's lines without the b"\n" that ends them, nor a byte-order mark; memory holds a chunk and a line.

    Of a file that is cut short the whole lines before the break come first, and then the error.

    Raises:
        RowError: If the file cannot be decompressed to its end.
        DataError: If it cannot be opened.
    """
    with _open_bytes(path) as stream:
        begun: list[bytes] = []  # parts of a line longer than a chunk: joined once, as adding them up is quadratic
        at_start = True
        # read1 hands out what was decompressed before it runs into a break; read would lose it.
        while chunk := stream.read1(_CHUNK_BYTES):  # pyright: ignore[reportAttributeAccessIssue]
            lines = chunk.split(b"\n")
            begun.append(lines[0])
            if len(lines) == 1:
                continue
            first = b"".join(begun)
            yield first.removeprefix(b"\xef\xbb\xbf") if at_start else first
            at_start = False
            yield from lines[1:-1]
            begun = [lines[-1]]
        last = b"".join(begun)
        if last := last.removeprefix(b"\xef\xbb\xbf") if at_start else last:
            yield last


@contextmanager
def _open_bytes(path: Path) -> Iterator[BinaryIO]:
    suffix = path.suffix.lower()
    try:
        with _opened(path, suffix) as stream:
            yield stream
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise _broken(path, suffix, error) from error
    except OSError as error:
        if suffix == ".zst" and error.errno is None:  # pyarrow's word for a broken stream
            raise _broken(path, suffix, error) from error
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _broken(path: Path, suffix: str, error: Exception) -> RowError:
    reason = str(error).rstrip(".")
    problem = f"cannot be read, as the {suffix} file is broken or cut short: {reason}"
    return RowError("broken_file", problem, "Copy or compress it again.", str(path))


def _opened(path: Path, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    if suffix == ".zst":
        return cast(BinaryIO, _ZstStream(path))
    return path.open("rb")


class _ZstStream:
    """A .zst file by pyarrow, whose `read1` gives what comes before a break, as those of gzip and lzma do."""

    def __init__(self, path: Path) -> None:
        import pyarrow  # comes with datasets; Python itself reads zstd only from 3.14 on

        self._stream = pyarrow.input_stream(str(path), compression="zstd")
        self._error: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self) -> bytes:
        return self._stream.read()

    def read1(self, size: int) -> bytes:
        if self._error is not None:
            raise self._error
        parts: list[bytes] = []
        for _ in range(0, size, _ZST_BYTES):
            try:
                part = self._stream.read(_ZST_BYTES)
            except OSError as error:
                if not parts:
                    raise
                self._error = error  # for the next call, behind what was read before
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts)
