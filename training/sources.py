"""Where documents come from: files, folders and globs here, or a dataset of the Hugging Face Hub.

Rows of local files come from `rows.py`, those of the Hub from `hub_sources.py`; `row_reader.py` makes documents of
them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tercet.training.corpus import PYTHON_DOCS, python_documentation
from tercet.training.documents import DataError, Document
from tercet.training.hub_sources import HubDataset, hub_rows
from tercet.training.row_reader import RowReader
from tercet.training.rows import Rows, csv_file, json_file, json_lines, parquet_file, text_file, text_lines
from tercet.training.skips import SkipReport
from tercet.training.source import JSON_SUFFIXES, Source, file_kind, local_paths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataError", "Document", "SkipReport", "Source", "read_documents"]

_ARCHIVE_SUFFIXES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2")


def read_documents(
    source: Source,
    *,
    skips: SkipReport | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    source_column: str | None = None,
) -> Iterator[Document]:
    """Yield the documents of a source, in an order that depends on nothing but its content.

    A text or Markdown file is one document, byte for byte, or one for each line; JSONL, JSON, CSV, Parquet and Hub
    datasets give one a row. Memory holds a row at a time. Rows whose text is empty or null are left out, and so are
    those outside the limits of length; with `on_bad_row: skip` also those that cannot be used, and what lies behind
    the break of a broken file.

    Args:
        skips: Counts what is left out in this reading.
        tokenizer: Its chat template writes conversations; None takes the one of every tokenizer that Tercet trains.
        source_column: Column that names where a row comes from, which its document then carries as its source. A row
            with nothing there, and text without columns, has the source's own label.

    Raises:
        DataError: If there is nothing to read, or something that cannot be read: one line with place and remedy.
    """
    reader = RowReader(source, skips, tokenizer, source_column)
    columns = source.columns() if source_column in (None, *source.columns()) else (*source.columns(), source_column)
    found = False
    for rows in _all_rows(source, columns):
        for document in reader.documents(rows):
            found = True
            yield document
    if not found:
        raise DataError(_nothing_found(source, reader.counted))


def _nothing_found(source: Source, counted: SkipReport) -> str:
    if counted.count() == counted.count(reason="empty"):
        return f"{source.path} is empty: it holds no text. Give a file with text in it."
    first = next((line.strip() for line in counted.lines() if line.startswith(" ")), "")
    example = f" (first: {first})" if first else ""
    return (
        f"{source.path} holds no document that can be used: {counted.summary(source.label)}{example}. Check the data "
        f"and the source's settings."
    )


def stored_bytes(source: Source) -> int | None:
    """Bytes of a source's files as they lie on the disk; None for a Hub dataset, whose size only reading it tells.

    Raises:
        DataError: If there is no such file.
    """
    if source.path == PYTHON_DOCS:
        return sum(len(document.text.encode()) for document in python_documentation())
    return sum(path.stat().st_size for path in local_paths(source.path)) or None


def _all_rows(source: Source, columns: tuple[str, ...]) -> Iterator[Rows]:
    """The rows of each file of a source, or of its dataset."""
    if source.path == PYTHON_DOCS:
        yield python_docs_rows()
    elif paths := local_paths(source.path):
        for path in paths:
            yield file_rows(path, source, columns)
    else:
        dataset = HubDataset(
            source.path, source.name, source.split, source.revision, source.streaming, label=source.label
        )
        yield Rows(f"Hub dataset {source.label!r}", "row", hub_rows(dataset, columns), is_download=source.streaming)


def python_docs_rows() -> Rows:
    """Python's own documentation."""
    texts = (document.text for document in python_documentation())
    return Rows(PYTHON_DOCS, "document", enumerate(texts, start=1), are_text=True)


def file_rows(path: Path, source: Source, columns: tuple[str, ...]) -> Rows:
    """The rows of a local file, by its suffix.

    Raises:
        DataError: If nothing reads such a file, or not with the source's settings.
    """
    kind = file_kind(path)
    if kind == ".json":
        return json_file(path)
    if kind in JSON_SUFFIXES:
        return json_lines(path)
    if kind == ".csv":
        return csv_file(path, columns)
    if kind == ".parquet":
        return parquet_file(path, columns)
    if any(suffix.lower() in _ARCHIVE_SUFFIXES for suffix in path.suffixes):
        raise DataError(f"{path} is an archive. Unpack it, and give the files in it or their folder.")
    if source.messages_column is not None or source.text_template is not None:
        setting = "text_template" if source.messages_column is None else "messages_column"
        raise DataError(
            f"{path} is read as plain text, which has no columns. Remove {setting}, or give a file of rows."
        )
    return text_lines(path) if source.documents == "lines" else text_file(path)
