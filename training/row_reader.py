"""Rows to documents, by a source's settings: a column's text, a template over several, or a conversation.

A row that becomes nothing is an error or a counted skip.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tercet.training.chat_messages import ChatFormat, render_messages, tercet_chat_format
from tercet.training.counts import counted
from tercet.training.documents import DataError, Document, Segment
from tercet.training.rows import Rows
from tercet.training.skips import ALWAYS_SKIPPED, Reason, RowError, SkipReport
from tercet.training.source import Source
from tercet.training.templates import TextTemplate, column_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_LOOKED_AT = 1_000_000

_Content = tuple[str, tuple[Segment, ...] | None]


class RowReader:
    """Rows to documents, by a source's settings."""

    def __init__(
        self,
        source: Source,
        skips: SkipReport | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        source_column: str | None = None,
    ) -> None:
        """
        Args:
            skips: Counts what gives no document.
            tokenizer: Its chat template writes conversations; None takes the one of every tokenizer that Tercet trains.
            source_column: Column that names where a row comes from, which its document then carries as its source.
        """
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
            if (document := self.document(number, row, rows)) is not None:
                yield document
        if is_empty:
            self.count("empty", rows.where)

    def document(self, number: int, row: Any, rows: Rows) -> Document | None:
        """The document of a row; None if it gives none, which is then counted.

        Raises:
            DataError: A row that cannot be used, where the source does not skip such.
        """
        try:
            text, segments = self.content(row, rows)
            return Document(text, self.label_of(row, rows), segments)
        except RowError as error:
            if error.reason not in ALWAYS_SKIPPED and self.source.on_bad_row != "skip":
                raise self.with_count(error, number, rows) from error
            self.count(error.reason, f"{rows.place(number)} {error.problem}")
            return None

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
        if not rows.unit or rows.is_download or (error.reason == "broken_file" and number == 1):
            return DataError(f"{message} Or: {skip}")
        if error.reason == "broken_file":  # how many rows there would be behind the break, nobody knows
            before = counted(number - 1, rows.unit)
            return DataError(f"{message} Or: on_bad_row: skip keeps the {before} before it and counts the file.")
        bad, last = 1, number
        for at, row in itertools.islice(rows.items, _ROWS_LOOKED_AT):
            last = at
            try:
                self.content(row, rows)
                self.label_of(row, rows)
            except RowError as other:
                bad += other.reason not in ALWAYS_SKIPPED
        first = "the first " if next(rows.items, None) is not None else ""
        return DataError(f"{message} Of {first}{counted(last, rows.unit)}, {bad:,} cannot be used; {skip}")


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
