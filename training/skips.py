"""What a source holds that cannot be learned from: an error, or a counted skip with its place; never silence."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from tercet.training.documents import DataError

Reason = Literal[
    "empty",
    "too_short",
    "too_long",
    "no_label",
    "not_json",
    "not_utf8",
    "nul",
    "surrogate",
    "missing_column",
    "wrong_type",
    "chat",
    "malformed",
    "broken_file",
]

_WORDS: dict[str, str] = {
    "empty": "empty",
    "too_short": "shorter than min_chars",
    "too_long": "longer than max_chars",
    "no_label": "conversations without an answer",
    "not_json": "not JSON",
    "not_utf8": "not UTF-8",
    "nul": "with a NUL character",
    "surrogate": "with a lone surrogate",
    "missing_column": "without the column",
    "wrong_type": "of another type than text",
    "chat": "conversations that the chat template refuses",
    "malformed": "malformed rows",
    "broken_file": "files broken or cut short",
}

ALWAYS_SKIPPED = frozenset({"empty", "too_short", "too_long", "no_label"})
"""Nothing is wrong with these: they hold nothing to learn, or the recipe excludes them. Counted, never an error."""

_EXAMPLES = 3


class RowError(DataError):
    """One row, or one file, that gives no document. Raised by what reads a row, which does not know its place.

    Attributes:
        reason: Under which a report counts it.
        problem: What is wrong, beginning with a verb: "is not JSON: ...".
        remedy: What to do about it, as a sentence.
    """

    def __init__(self, reason: Reason, problem: str, remedy: str, place: str = "") -> None:
        super().__init__(f"{place} {problem}. {remedy}".strip())
        self.reason: Reason = reason
        self.problem = problem
        self.remedy = remedy


class SkipReport:
    """Rows that gave no document in one reading of the sources, by source and reason, the first few with their place.

    A report belongs to one reading: whoever reads the sources twice takes two.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._examples: dict[str, dict[str, list[str]]] = {}

    def add(self, source: str, reason: Reason, place: str, count: int = 1) -> None:
        """Count one more row (or `count` of them) of a source; `place` says where it is and what is wrong."""
        counts = self._counts.setdefault(source, {})
        counts[reason] = counts.get(reason, 0) + count
        examples = self._examples.setdefault(source, {}).setdefault(reason, [])
        if place and len(examples) < _EXAMPLES:
            examples.append(place)

    def count(self, source: str | None = None, reason: Reason | None = None) -> int:
        """Rows left out: all, or those of one source, or for one reason."""
        return sum(
            number
            for name, counts in self._counts.items()
            for why, number in counts.items()
            if source in (None, name) and reason in (None, why)
        )

    def update(self, other: "SkipReport") -> None:
        """Add what another report counted, such as that of another part of the same data."""
        for source, counts in other._counts.items():
            for reason, number in counts.items():
                examples = other._examples[source][reason]
                self.add(source, reason, examples[0] if examples else "", number)  # pyright: ignore[reportArgumentType]
                for place in examples[1:]:
                    self.add(source, reason, place, 0)  # pyright: ignore[reportArgumentType]

    def as_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """For a manifest: {source: {reason: {"count": rows, "examples": [place, ...]}}}."""
        return {
            source: {
                reason: {"count": counts[reason], "examples": list(self._examples[source][reason])}
                for reason in sorted(counts)
            }
            for source, counts in sorted(self._counts.items())
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Self:
        """The report that `as_dict` wrote."""
        report = cls()
        for source, reasons in fields.items():
            report._counts[source] = {reason: int(entry["count"]) for reason, entry in reasons.items()}
            report._examples[source] = {reason: list(entry["examples"]) for reason, entry in reasons.items()}
        return report

    def summary(self, source: str) -> str:
        """One source's counts in words: "3 not JSON, 1 empty"; "" if nothing was left out."""
        counts = self._counts.get(source, {})
        return ", ".join(f"{number:,} {_WORDS.get(why, why)}" for why, number in sorted(counts.items()))

    def lines(self) -> list[str]:
        """What a user should read: a line for each source and reason, and one for each example."""
        shown = []
        for source, counts in sorted(self._counts.items()):
            for reason, number in sorted(counts.items()):
                shown.append(f"{source}: {number:,} left out, {_WORDS.get(reason, reason)}")
                # The places of what is merely empty or excluded help nobody.
                if reason not in ALWAYS_SKIPPED:
                    shown += [f"    {place}" for place in self._examples[source][reason]]
        return shown
