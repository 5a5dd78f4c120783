"""Rows of local files, one at a time: text, JSON, CSV and Parquet, each with the number that a user finds it under.

A row that cannot be read is not raised, which would end the file, but handed out as a `RowError` in the row's place:
whoever reads the rows decides whether it ends the reading or is counted.

Text, JSON and CSV are read by this file and Parquet by pyarrow, for what `datasets` 5.2 does to them was measured: its
text reader turns every "\\r\\n" and lone "\\r" into "\\n"; its JSON reader turns strings that look like dates into
datetimes, fails on a blank line between rows whose other columns mix types, and is 3 times slower; none of them names
the line that is wrong, or can go on behind it.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.training.files import COMPRESSIONS, read_bytes, read_lines, read_text
from tercet.training.skips import RowError

_MAX_FIELD_CHARS = 2**31 - 1
_PARQUET_BATCH_BYTES = 1 << 23
_UTF8_REMEDY = "Convert the file to UTF-8, for instance with iconv -f LATIN1 -t UTF-8."


@dataclass(frozen=True)
class Rows:
    """Rows as they come.

    Attributes:
        where: What holds them: a path, or the name of a Hub dataset.
        unit: What a row is called: "line", "row", "item"; "" where the whole file is one.
        items: (number, row) pairs. A row is a `RowError` or what the data holds, which may be no mapping.
        are_text: Whether rows are texts themselves, without columns.
        is_download: Whether every row read comes over the network.
    """

    where: str
    unit: str
    items: Iterator[tuple[int, Any]]
    are_text: bool = False
    is_download: bool = False

    def place(self, number: int) -> str:
        """Where a row is, in words."""
        return f"{self.where}, {self.unit} {number}" if self.unit else self.where


def text_file(path: Path) -> Rows:
    """The whole file as one string, byte for byte; no row where it is empty."""

    def items() -> Iterator[tuple[int, Any]]:
        try:
            text = read_text(path)
        except RowError as error:
            yield 1, error
        else:
            if text:
                yield 1, text

    return Rows(str(path), "", items(), are_text=True)


def text_lines(path: Path) -> Rows:
    r"""Each line as a string, without what ends it ("\n" or "\r\n"); a blank line is an empty row."""

    def items() -> Iterator[tuple[int, Any]]:
        for number, line in _numbered_lines(path):
            if isinstance(line, RowError):
                yield number, line
                continue
            try:
                yield number, line.removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                yield number, _not_utf8(error)

    return Rows(str(path), "line", items(), are_text=True)


def json_lines(path: Path) -> Rows:
    """Each line's value; blank lines are no rows."""

    def items() -> Iterator[tuple[int, Any]]:
        for number, line in _numbered_lines(path):
            if isinstance(line, RowError):
                yield number, line
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                if line.strip():
                    yield number, _no_json(line, error)
            else:
                yield number, row

    return Rows(str(path), "line", items())


def json_file(path: Path) -> Rows:
    """The items of a file that is one array, or its one object; JSON lines under the name .json are as common."""
    try:
        content = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    except RowError as error:
        return Rows(str(path), "", iter([(1, error)]))
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        if content.lstrip().startswith(b"["):
            return Rows(str(path), "", iter([(1, _not_utf8(error, "file"))]))
        return json_lines(path)
    except (ValueError, RecursionError):
        return json_lines(path)  # an error will have its line's number
    return Rows(str(path), "item", enumerate(value if isinstance(value, list) else [value], start=1))


def csv_file(path: Path, columns: Sequence[str]) -> Rows:
    """Rows of strings under the names of the first row, counted as a spreadsheet does: that row is number 1."""
    return Rows(str(path), "row", _csv_items(path, columns))


def parquet_file(path: Path, columns: Sequence[str]) -> Rows:
    """The named columns of each row; no other is decoded.

    Raises:
        RowError: If the file is compressed once more, which leaves nothing to seek in.
    """
    if path.suffix.lower() in COMPRESSIONS:
        tool = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}[path.suffix.lower()]
        raise RowError(
            "broken_file",
            f"is a Parquet file inside {path.suffix.lower()}, and cannot be read from the middle, as Parquet is",
            f"Decompress it with {tool} -d; Parquet is compressed inside.",
            str(path),
        )
    return Rows(str(path), "row", _parquet_items(path, columns))


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes | RowError]]:
    """The lines from 1 on, and behind the last readable one, if the file is broken there, the error."""
    number = 0
    try:
        for line in read_lines(path):
            number += 1
            yield number, line
    except RowError as error:
        yield number + 1, error


def _not_utf8(error: UnicodeDecodeError, unit: str = "line") -> RowError:
    return RowError("not_utf8", f"is not UTF-8 (byte {error.start} of the {unit})", _UTF8_REMEDY)


def _no_json(line: bytes, error: ValueError | RecursionError) -> RowError:
    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(error)
    if b"\0" in line:
        return RowError("nul", "holds a NUL byte: it is no text", "Give a text file in UTF-8.")
    if isinstance(error, json.JSONDecodeError):
        problem = f"{error.msg} at character {error.pos + 1}"  # its own words count lines within this one line
    else:
        problem = str(error).partition(";")[0]
    return RowError("not_json", f"is not JSON: {problem}", "Mend or remove the line.")


def _csv_items(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(_MAX_FIELD_CHARS)  # of the whole process, and 128 KiB unless told: less than a document
    tainted = False  # whether a line of the row at hand is not UTF-8

    def lines() -> Iterator[str]:
        nonlocal tainted
        for line in read_lines(path):
            try:
                yield line.decode("utf-8") + "\n"
            except UnicodeDecodeError:
                tainted = True
                yield line.decode("utf-8", "surrogateescape") + "\n"

    rows = csv.reader(lines(), strict=True)
    header: list[str] | None = None
    number = 0
    while True:
        tainted = False
        number += 1
        first_line = rows.line_num + 1
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            # An open quote swallows all that follows: say how much.
            lines_read = f"line {first_line}" + (f" to {rows.line_num}" if rows.line_num > first_line else "")
            yield number, RowError("malformed", f"({lines_read}) is not CSV: {error}", "Mend or remove it.")
            continue
        except RowError as error:  # the file ends here, broken
            yield number, error
            return
        if not fields:  # a blank line
            continue
        if header is None:
            header = fields
        elif len(fields) != len(header):
            problem = f"has {len(fields)} fields where the first row has {len(header)}"
            yield number, RowError("malformed", problem, "Mend it; a comma inside a text needs quotes around the text.")
        else:
            row = dict(zip(header, fields, strict=True))
            if tainted and any(_has_surrogate(row.get(column, "")) for column in columns):
                yield number, RowError("not_utf8", "is not UTF-8", _UTF8_REMEDY)
            else:
                yield number, row


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _parquet_items(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            existing = file.schema_arrow.names
            if missing := [column for column in columns if column not in existing]:
                problem = f"has no column {missing[0]!r}; it has {', '.join(map(repr, existing)) or 'none'}"
                setting = "text_column" if missing[0] == columns[0] else "source_column"
                error = RowError("missing_column", problem, f"Set {setting} to what there is.")
                yield from ((i, error) for i in range(1, file.metadata.num_rows + 1))
                return
            for batch in file.iter_batches(_rows_in_a_batch(file.metadata), columns=list(columns)):
                for row in _python_rows(batch):
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        # Metadata that is cut off leaves no row to point at.
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        yield number + 1, RowError("broken_file", f"cannot be read as parquet: {reason}", "Check or replace the file.")


def _rows_in_a_batch(metadata: Any) -> int:
    """As many as keep a batch near 8 MB: rows of 50 MB come one by one."""
    num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(4096, _PARQUET_BATCH_BYTES * max(metadata.num_rows, 1) // max(num_bytes, 1)))


def _python_rows(batch: Any) -> Iterator[Any]:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:  # Parquet checks no string: find out which row's it is
        for i in range(batch.num_rows):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield _not_utf8(error, "text")
    else:
        yield from rows
