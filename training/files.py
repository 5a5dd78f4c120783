"""Local files to text, exactly: no change of line ends, compression by suffix, one clear line for what is not text."""

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from tercet.training.documents import DataError

COMPRESSIONS = (".gz", ".xz", ".zst")


def read_text(path: Path) -> str:
    """The whole file as UTF-8 text; encoding it again gives the file's bytes.

    Raises:
        DataError: If the file cannot be opened or decompressed, holds NUL bytes, or is not UTF-8.
    """
    with _open_bytes(path) as stream:
        content = stream.read()
    if (offset := content.find(b"\0")) >= 0:
        raise DataError(
            f"{path} holds a NUL byte (at byte {offset}): it is a binary file, or text that is not UTF-8. Give a text "
            f"file, or convert it, for instance with iconv -f UTF-16 -t UTF-8."
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {content[error.start]:#04x} at byte {error.start}). Convert it, for instance "
            f"with iconv -f LATIN1 -t UTF-8."
        ) from error


def open_lines(path: Path) -> Iterator[bytes]:
    """The file's lines, ended by b"\\n" alone, without a byte-order mark; memory holds one line at a time.

    Raises:
        DataError: If the file cannot be opened or decompressed, or a line holds a NUL byte.
    """
    with _open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            if b"\0" in line:
                raise DataError(f"{path}, line {number} holds a NUL byte: it is no text. Give a text file in UTF-8.")
            yield line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


@contextmanager
def _open_bytes(path: Path) -> Iterator[BinaryIO]:
    suffix = path.suffix.lower()
    try:
        with _opened(path, suffix) as stream:
            yield stream
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path} is a broken {suffix} file: {error}. Copy or compress it again.") from error
    except OSError as error:
        if suffix == ".zst" and error.errno is None:  # pyarrow's word for a broken stream
            raise DataError(f"{path} is a broken .zst file: {error}. Copy or compress it again.") from error
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _opened(path: Path, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    if suffix == ".zst":
        import pyarrow  # comes with datasets; Python itself reads zstd only from 3.14 on

        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))
    return path.open("rb")
