r"""A document's text from several columns of a row: `text_template: "# {title}\n\n{body}"`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Self

from tercet.training.skips import RowError


@dataclass(frozen=True)
class TextTemplate:
    """Literal text and the columns between, as `{column}`; `{{` and `}}` are braces.

    What stands between braces is the name of a column, letter by letter: nothing is evaluated, and a dot or a bracket
    in it is part of the name.

    Attributes:
        parts: (text before, name of the column) in order; the last one's name is None if text ends the template.
        columns: The names, each once, in the order of their first use.
    """

    parts: tuple[tuple[str, str | None], ...]
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, template: str) -> Self:
        """Read a template.

        Raises:
            ValueError: If a brace has no partner, or holds no name, or a name is followed by a format or conversion.
        """
        parts: list[tuple[str, str | None]] = []
        try:
            parsed = list(Formatter().parse(template))
        except ValueError as error:
            raise ValueError(f"{str(error)[0].lower()}{str(error)[1:]}; a brace of the text is written twice") from None
        for literal, name, spec, conversion in parsed:
            if spec or conversion:
                raise ValueError(f"{{{name}}} has a format after its name; write the column's name alone")
            if name is not None and not name.strip():
                raise ValueError("empty braces name no column; write {column}, and a brace of the text twice")
            parts.append((literal, name))
        columns = tuple(dict.fromkeys(name for _, name in parts if name is not None))
        if not columns:
            raise ValueError("it names no column; write one in braces, as in {text}")
        return cls(tuple(parts), columns)

    def fill(self, row: Mapping[str, Any]) -> str:
        """The text of a row; a null counts as empty, and "" is returned where every named column is empty.

        Raises:
            RowError: If a column is missing, or holds something other than a string, a number, a truth value or null.
        """
        values = {column: _as_text(row, column) for column in self.columns}
        if not any(values.values()):
            return ""
        return "".join(literal + ("" if name is None else values[name]) for literal, name in self.parts)


def column_value(row: Mapping[str, Any], column: str, setting: str) -> Any:
    """What a row has in a column.

    Raises:
        RowError: If it has no such column; names those that it has, and the setting that chooses.
    """
    try:
        return row[column]
    except KeyError:
        existing = ", ".join(map(repr, row)) or "none"
        raise RowError(
            "missing_column",
            f"has no column {column!r}; it has {existing}",
            f"Set {setting} to what there is.",
        ) from None


def _as_text(row: Mapping[str, Any], column: str) -> str:
    value = column_value(row, column, "text_template")
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise RowError(
        "wrong_type",
        f"holds a {type(value).__name__} in column {column!r}, not text",
        "Leave that column out of text_template.",
    )
