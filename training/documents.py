"""What every part of the data path shares: a document, and the error that names what is wrong with one."""

from dataclasses import dataclass

from tercet.training.errors import UserError


class DataError(UserError):
    """The user's data cannot be used. The message is one line: what is wrong, where, and the remedy."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text that a model reads from its beginning to its end; attention never leaves it.

    Attributes:
        text: The text, exactly as its source holds it (line ends, byte-order mark and all).
        source: Label under which reports count it: a recipe's path, or "python-docs".
    """

    text: str
    source: str
