"""Where documents come from: files, folders and globs here, or a dataset of the Hugging Face Hub.

Rows of local files come from `rows.py`, those of the Hub from `hub_sources.py`. What a row becomes is up to the
source's settings: a column's text, a template over several, or a conversation. A row that becomes nothing is an error
or a counted skip.
"""

import glob
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tercet.training.chat_messages import ChatFormat, render_messages, tercet_chat_format
from tercet.training.corpus import PYTHON_DOCS, PYTHON_DOCS_DESCRIPTION, PYTHON_DOCS_LICENSE, python_documentation
from tercet.training.documents import DataError, Document, Segment
from tercet.training.files import COMPRESSIONS
from tercet.training.hub_sources import HubDataset, hub_rows, is_hub_name
from tercet.training.rows import Rows, csv_file, json_file, json_lines, parquet_file, text_file, text_lines
from tercet.training.skips import ALWAYS_SKIPPED, Reason, RowError, SkipReport
from tercet.training.templates import TextTemplate, column_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataError", "Document", "SkipReport", "Source", "read_documents"]

_TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TABLE_SUFFIXES = (".csv", ".parquet")
_SUFFIXES = _TEXT_SUFFIXES + _JSON_SUFFIXES + _TABLE_SUFFIXES
_ARCHIVE_SUFFIXES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2")
_ROWS_LOOKED_AT = 1_000_000
_TEXT_COLUMN = "text"

_Content = tuple[str, tuple[Segment, ...] | None]


class Source(BaseModel):
    """One source of documents, as a recipe writes it.

    Attributes:
        path: A file, a folder, a glob, the name of a Hub dataset, or "python-docs" for the corpus that Python carries.
        name: Configuration of a Hub dataset.
        split: Split of a Hub dataset.
        revision: Branch, tag or commit of a Hub dataset.
        text_column: Column or key that holds the text, wherever rows have columns.
        text_template: The text from several columns, such as "# {title}\\n\\n{body}"; a null counts as empty.
        messages_column: Column that holds a conversation, [{role, content}, ...], to be written by the tokenizer's chat
            template; only what the assistant writes is learned.
        documents: Whether a text file is one document or each of its lines is.
        weight: The source's part in a mixture, by tokens, beside the weights of the others.
        min_chars: Shorter documents are left out; None takes the recipe's.
        max_chars: Longer documents are left out; None takes the recipe's.
        on_bad_row: Whether a row that cannot be used ends the reading or is counted; None takes the recipe's.
        streaming: Read a Hub dataset as it downloads, instead of keeping a copy in the Hugging Face cache.
        license: What the card says of the text's licence, as the Hub spells it.
        description: What the card says of the text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    text_column: str = _TEXT_COLUMN
    text_template: str | None = None
    messages_column: str | None = None
    documents: Literal["file", "lines"] = "file"
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    min_chars: Annotated[int, Field(ge=0)] | None = None
    max_chars: Annotated[int, Field(ge=1)] | None = None
    on_bad_row: Literal["error", "skip"] | None = None
    streaming: bool = False
    license: str | None = None
    description: str | None = None

    @field_validator("text_template")
    @classmethod
    def _template_can_be_read(cls, value: str | None) -> str | None:
        if value is not None:
            TextTemplate.parse(value)
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        given = [name for name in ("text_template", "messages_column") if getattr(self, name) is not None]
        if self.text_column != _TEXT_COLUMN:
            given.append("text_column")
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both say what a document is; give one of them")
        if self.min_chars is not None and self.max_chars is not None and self.min_chars > self.max_chars:
            raise ValueError(f"min_chars ({self.min_chars}) is more than max_chars ({self.max_chars})")
        return self

    @property
    def label(self) -> str:
        """Under which documents and reports name this source: its path, and what else chooses among a Hub dataset's."""
        name = f":{self.name}" if self.name is not None else ""
        split = f"[{self.split}]" if self.split != "train" else ""
        return f"{self.path}{name}{split}"

    def columns(self) -> tuple[str, ...]:
        """The columns that a row is asked for."""
        if self.text_template is not None:
            return TextTemplate.parse(self.text_template).columns
        return (self.messages_column or self.text_column,)

    def license_name(self) -> str | None:
        """The licence that the recipe declares, or that is known of Python's own documentation."""
        return self.license or (PYTHON_DOCS_LICENSE if self.path == PYTHON_DOCS else None)

    def description_text(self) -> str | None:
        """The description that the recipe gives, or that of Python's own documentation."""
        return self.description or (PYTHON_DOCS_DESCRIPTION if self.path == PYTHON_DOCS else None)

    def is_on_hub(self) -> bool:
        """Whether the path names a Hub dataset: it is nothing on this machine."""
        return self.path != PYTHON_DOCS and not _local_paths(self.path)


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
    reader = _Reader(source, skips, tokenizer, source_column)
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
    return sum(path.stat().st_size for path in _local_paths(source.path)) or None


class _Reader:
    """Rows to documents, by a source's settings."""

    def __init__(
        self,
        source: Source,
        skips: SkipReport | None,
        tokenizer: "PreTrainedTokenizerBase | None",
        source_column: str | None,
    ) -> None:
        self.source = source
        self.label = source.label
        self.source_column = source_column
        self.counted = SkipReport()  # of this source in this reading, whatever `skips` holds of others
        self.skips = skips
        self.content_of_row = _content_reader(source, tokenizer)

    def documents(self, rows: Rows) -> Iterator[Document]:
        """The documents of a file or dataset; what gives none is counted, or raised together with its number."""
        is_empty = True
        for number, row in rows.items:
            is_empty = False
            try:
                text, segments = self.content(row, rows)
                label = self.label_of(row, rows)
            except RowError as error:
                if error.reason not in ALWAYS_SKIPPED and self.source.on_bad_row != "skip":
                    raise self.with_count(error, number, rows) from error
                self.count(error.reason, f"{rows.place(number)} {error.problem}")
            else:
                yield Document(text, label, segments)
        if is_empty:
            self.count("empty", rows.where)

    def count(self, reason: Reason, place: str) -> None:
        """Note a row that gives no document."""
        self.counted.add(self.label, reason, place)
        if self.skips is not None:
            self.skips.add(self.label, reason, place)

    def content(self, row: Any, rows: Rows) -> _Content:
        """Text and segments of a row that gives a document.

        Raises:
            RowError: If it gives none.
        """
        if isinstance(row, RowError):
            raise row
        text, segments = (row, None) if rows.are_text else self.content_of_row(row)
        if not text:
            raise RowError("empty", "is empty", "Nothing needs to be done.")
        _check_characters(text)
        if self.source.min_chars is not None and len(text) < self.source.min_chars:
            raise RowError("too_short", f"has {len(text)} characters", "Lower min_chars to keep it.")
        if self.source.max_chars is not None and len(text) > self.source.max_chars:
            raise RowError("too_long", f"has {len(text)} characters", "Raise max_chars to keep it.")
        return text, segments

    def label_of(self, row: Any, rows: Rows) -> str:
        """What a row's document counts under.

        Raises:
            RowError: If there is no such column, or what it holds is no name.
        """
        column = self.source_column
        if column is None or rows.are_text:
            return self.label
        name = column_value(_columns(row, column), column, "source_column")
        if name is not None and not isinstance(name, (str, int)):
            problem = f"holds a {type(name).__name__} in column {column!r}, not a name"
            raise RowError("wrong_type", problem, "Set source_column to a column of strings.")
        return self.label if name is None or name == "" else str(name)

    def with_count(self, error: RowError, number: int, rows: Rows) -> DataError:
        """The error of a row with its place, and with how many such rows there are where looking on costs little."""
        message = str(RowError(error.reason, error.problem, error.remedy, rows.place(number)))
        skip = "on_bad_row: skip leaves such out and counts them."
        if not rows.unit or rows.is_download:
            return DataError(f"{message} Or: {skip}")
        bad, last = 1, number
        for at, row in itertools.islice(rows.items, _ROWS_LOOKED_AT):
            last = at
            try:
                self.content(row, rows)
                self.label_of(row, rows)
            except RowError as other:
                bad += other.reason not in ALWAYS_SKIPPED
        first = "the first " if next(rows.items, None) is not None else ""
        return DataError(f"{message} Of {first}{last:,} {rows.unit}s, {bad:,} cannot be used; {skip}")


def _content_reader(source: Source, tokenizer: "PreTrainedTokenizerBase | None") -> Callable[[Any], _Content]:
    """What makes the text of a row with columns."""
    if source.messages_column is not None:
        column = source.messages_column
        chat = tercet_chat_format() if tokenizer is None else ChatFormat.of_tokenizer(tokenizer)

        def conversation(row: Any) -> _Content:
            segments = render_messages(column_value(_columns(row, column), column, "messages_column"), chat)
            return "".join(segment.text for segment in segments), segments

        return conversation
    if source.text_template is not None:
        template = TextTemplate.parse(source.text_template)
        return lambda row: (template.fill(_columns(row, template.columns[0])), None)
    return lambda row: (_column_text(row, source.text_column), None)


def _column_text(row: Any, column: str) -> str:
    text = column_value(_columns(row, column), column, "text_column")
    if text is not None and not isinstance(text, str):
        problem = f"holds a {type(text).__name__} in column {column!r}, not text"
        raise RowError("wrong_type", problem, "Set text_column to another.")
    return text or ""


def _columns(row: Any, column: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        problem = f"holds a {type(row).__name__}, not an object with the key {column!r}"
        raise RowError("wrong_type", problem, "Mend or remove it.")
    return row


def _check_characters(text: str) -> None:
    if text.isascii():  # known without looking at the text
        if "\0" not in text:
            return
    else:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise RowError(
                "surrogate",
                f"has a lone surrogate in its text ({code}), which UTF-8 cannot carry",
                "Mend or remove the row.",
            ) from error
    if (at := text.find("\0")) >= 0:
        raise RowError("nul", f"has a NUL character in its text (at character {at})", "Mend or remove the row.")


def _all_rows(source: Source, columns: tuple[str, ...]) -> Iterator[Rows]:
    """The rows of each file of a source, or of its dataset."""
    if source.path == PYTHON_DOCS:
        texts = (document.text for document in python_documentation())
        yield Rows(PYTHON_DOCS, "document", enumerate(texts, start=1), are_text=True)
    elif paths := _local_paths(source.path):
        for path in paths:
            yield _file_rows(path, source, columns)
    else:
        dataset = HubDataset(
            source.path, source.name, source.split, source.revision, source.streaming, label=source.label
        )
        yield Rows(f"Hub dataset {source.label!r}", "row", hub_rows(dataset, columns), is_download=source.streaming)


def _local_paths(pattern: str) -> list[Path]:
    """The files that the pattern means, sorted; none for a Hub name."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) and not _is_hidden(p.relative_to(path)))
        if not found:
            raise DataError(
                f"The folder {path} holds no file that can be read ({', '.join(_SUFFIXES)}; also with "
                f"{', '.join(COMPRESSIONS)}). For text under other names give a glob, such as '{path}/**/*.py'."
            )
        return found
    if glob.has_magic(pattern):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise DataError(f"No file matches {pattern!r}. Check the pattern; '**' goes into subfolders.")
        return found
    if not is_hub_name(pattern) or _kind(path):
        raise DataError(f"{pattern} does not exist. Give a file, a folder, a glob or the name of a Hub dataset.")
    return []


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> str:
    """The suffix that says how to read the file, in lower case and under any compression; "" if none is known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _SUFFIXES else ""


def _file_rows(path: Path, source: Source, columns: tuple[str, ...]) -> Rows:
    kind = _kind(path)
    if kind == ".json":
        return json_file(path)
    if kind in _JSON_SUFFIXES:
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
