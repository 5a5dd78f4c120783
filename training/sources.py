"""Where documents come from: files, folders and globs here, or a dataset of the Hugging Face Hub.

CSV, Parquet and Hub datasets are read by `datasets`, local ones streaming, so that no Arrow copy of the user's files
appears in a cache. Text and JSONL are read by this file, for what `datasets` 5.2 does to them was measured: its text
reader turns every "\\r\\n" and lone "\\r" into "\\n"; its JSON reader turns strings that look like dates into
datetimes, fails on a blank line between rows whose other columns mix types, names no line in its errors, and is 3
times slower.
"""

import glob
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tercet.training.corpus import PYTHON_DOCS, PYTHON_DOCS_DESCRIPTION, PYTHON_DOCS_LICENSE, python_documentation
from tercet.training.documents import DataError, Document
from tercet.training.files import COMPRESSIONS, open_lines, read_text

__all__ = ["DataError", "Document", "Source", "read_documents"]

_TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TABLE_SUFFIXES = (".csv", ".parquet")
_SUFFIXES = _TEXT_SUFFIXES + _JSON_SUFFIXES + _TABLE_SUFFIXES
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Source(BaseModel):
    """One source of documents, as a recipe writes it.

    Attributes:
        path: A file, a folder, a glob, the name of a Hub dataset, or "python-docs" for the corpus that Python carries.
        name: Configuration of a Hub dataset.
        split: Split of a Hub dataset.
        revision: Branch, tag or commit of a Hub dataset.
        text_column: Column or key that holds the text, wherever rows have columns.
        streaming: Read a Hub dataset as it downloads, instead of keeping a copy in the Hugging Face cache.
        license: What the card says of the text's licence, as the Hub spells it.
        description: What the card says of the text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    text_column: str = "text"
    streaming: bool = False
    license: str | None = None
    description: str | None = None

    def license_name(self) -> str | None:
        """The licence that the recipe declares, or that is known of Python's own documentation."""
        return self.license or (PYTHON_DOCS_LICENSE if self.path == PYTHON_DOCS else None)

    def description_text(self) -> str | None:
        """The description that the recipe gives, or that of Python's own documentation."""
        return self.description or (PYTHON_DOCS_DESCRIPTION if self.path == PYTHON_DOCS else None)

    def is_on_hub(self) -> bool:
        """Whether the path names a Hub dataset: it is nothing on this machine."""
        return self.path != PYTHON_DOCS and not _local_paths(self.path)[0]


def read_documents(source: Source) -> Iterator[Document]:
    """Yield the documents of a source, in an order that depends on nothing but its content.

    A text or Markdown file is one document, byte for byte; JSONL, JSON, CSV, Parquet and Hub datasets give one a row.
    Rows whose text is empty or null are left out: they hold nothing to learn.

    Raises:
        DataError: If there is nothing to read, or something that cannot be read: one line with place and remedy.
    """
    if source.path == PYTHON_DOCS:
        yield from python_documentation()
        return
    paths, chosen_by_name = _local_paths(source.path)
    if not paths:
        rows = _hub_rows(source)
        yield from _checked(rows, source, f"Hub dataset {source.path!r}")
        return
    for path in paths:
        empty = True
        for document in _file_documents(path, source):
            empty = False
            yield document
        if empty and chosen_by_name:
            raise DataError(f"{path} is empty: it holds no text. Give a file with text in it.")


def _local_paths(pattern: str) -> tuple[list[Path], bool]:
    """The files that the pattern means, sorted, and whether it named the one file itself; none for a Hub name."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path], True
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) and not _is_hidden(p.relative_to(path)))
        if not found:
            raise DataError(
                f"The folder {path} holds no file that can be read ({', '.join(_SUFFIXES)}; also with "
                f"{', '.join(COMPRESSIONS)}). For text under other names give a glob, such as '{path}/**/*.py'."
            )
        return found, False
    if glob.has_magic(pattern):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise DataError(f"No file matches {pattern!r}. Check the pattern; '**' goes into subfolders.")
        return found, False
    if not _HUB_NAME.fullmatch(pattern) or _kind(path):
        raise DataError(f"{pattern} does not exist. Give a file, a folder, a glob or the name of a Hub dataset.")
    return [], False


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> str:
    """The suffix that says how to read the file, in lower case and under any compression; "" if none is known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _SUFFIXES else ""


def _file_documents(path: Path, source: Source) -> Iterator[Document]:
    kind = _kind(path)
    if kind in _JSON_SUFFIXES:
        yield from _checked(_json_rows(path, whole=kind == ".json"), source, str(path))
    elif kind in _TABLE_SUFFIXES:
        yield from _checked(_table_rows(path, kind), source, str(path))
    elif text := read_text(path):
        yield Document(text, source.path)


def _json_rows(path: Path, *, whole: bool) -> Iterator[tuple[str, Any]]:
    """(place, row) for each line, or for each item of a .json file that is one array or one object."""
    if whole and (text := read_text(path)).strip():
        try:
            value = json.loads(text.removeprefix("\ufeff"))
        except json.JSONDecodeError:
            pass  # JSON lines under the name .json are as common as JSON; an error will have its line's number
        else:
            rows = value if isinstance(value, list) else [value]
            yield from ((f"{path}, item {i}", row) for i, row in enumerate(rows, start=1))
            return
    for number, line in enumerate(open_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            yield place, json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place} is not UTF-8 (byte {error.start} of the line). Convert the file to UTF-8, for instance with "
                f"iconv -f LATIN1 -t UTF-8."
            ) from error
        except ValueError as error:
            raise DataError(f"{place} is not JSON: {_json_problem(error)}. Mend or remove the line.") from error


def _json_problem(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"  # its own words count lines within this one line
    return str(error)


def _table_rows(path: Path, kind: str) -> Iterator[tuple[str, Any]]:
    import datasets

    if path.suffix.lower() == ".zst":
        raise DataError(f"{path}: {kind[1:]} cannot be read through zstd. Decompress it first, with zstd -d.")
    # They log what they also raise, and a user should read one line, not two.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    files = {"train": [str(path)]}
    place = f"{path}, row"
    try:
        if kind == ".parquet":
            rows: Any = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        else:
            rows = _csv_rows(files)
        # Rows are counted as a spreadsheet would: the header is row 1.
        first = 2 if kind == ".csv" else 1
        yield from ((f"{place} {i}", row) for i, row in enumerate(rows, start=first))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}). Convert it, for instance with iconv.") from error
    except (ValueError, OSError, EOFError, ImportError) as error:
        if isinstance(error, DataError):
            raise
        if type(error).__name__ == "EmptyDataError":  # pandas': a file of no bytes, which the caller names
            return
        raise DataError(
            f"{path} cannot be read as {kind[1:]}: {_first_line(error)} Check or replace the file."
        ) from error


def _csv_rows(files: dict[str, list[str]]) -> Iterable[dict[str, Any]]:
    """Rows of strings: left to itself pandas reads the text "NA" as missing and "007" as 7."""
    import datasets

    options: dict[str, Any] = {"data_files": files, "split": "train", "streaming": True, "keep_default_na": False}
    header = next(iter(datasets.load_dataset("csv", nrows=1, **options)), None)
    if header is None:
        return ()
    features = datasets.Features({column: datasets.Value("string") for column in header})
    return datasets.load_dataset("csv", features=features, **options)


def _hub_rows(source: Source) -> Iterator[tuple[str, Any]]:
    import datasets

    place = f"Hub dataset {source.path!r}, row"
    try:
        rows = datasets.load_dataset(
            source.path, source.name, split=source.split, revision=source.revision, streaming=source.streaming
        )
        if (columns := rows.column_names) and source.text_column in columns:
            rows = rows.select_columns([source.text_column])  # nothing else needs to be downloaded or decoded
        yield from ((f"{place} {i}", row) for i, row in enumerate(rows, start=1))
    except (ValueError, OSError, ImportError) as error:
        raise DataError(
            f"{source.path!r} is no file or folder here, and reading it as a Hub dataset failed: {_first_line(error)} "
            f"Check the name, its configuration ({source.name}), split ({source.split}) and the network."
        ) from error


def _checked(rows: Iterator[tuple[str, Any]], source: Source, where: str) -> Iterator[Document]:
    """The texts of the rows; every row must have the column, and a string or null in it."""
    column = source.text_column
    for place, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{place} holds a {type(row).__name__}, not an object with the key {column!r}.")
        if column not in row:
            raise DataError(
                f"{place} has no column {column!r}; it has {', '.join(map(repr, row)) or 'none'}. "
                f"Set text_column to the one that holds the text of {where}."
            )
        text = row[column]
        if text is None or text == "":
            continue
        if not isinstance(text, str):
            raise DataError(
                f"{place}: column {column!r} holds a {type(text).__name__}, not text. Set text_column to another."
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character "
                f"{error.start}), which UTF-8 cannot carry. Mend or remove the row."
            ) from error
        yield Document(text, source.path)


def _first_line(error: BaseException) -> str:
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line if line.endswith(".") else line + "."
