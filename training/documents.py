"""What every part of the data path shares: a document, and the error that names what is wrong with one."""

from dataclasses import dataclass

from tercet.training.errors import UserError


class DataError(UserError):
    """The user's data cannot be used. The message is one line: what is wrong, where, and the remedy."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a document that is encoded in one way and learned from, or not, as a whole.

    Attributes:
        text: Its text; the segments of a document, end to end, are the document's text.
        is_template: A special token that the chat template wrote. In any other segment the names of special tokens
            are plain text, so that no message can open or end another.
        is_label: Whether its tokens are labels, which is true of what the model itself is to write.
    """

    text: str
    is_template: bool
    is_label: bool


@dataclass(frozen=True, slots=True)
class Document:
    """One text that a model reads from its beginning to its end; attention never leaves it.

    Attributes:
        text: The text, exactly as its source holds it (line ends, byte-order mark and all).
        source: Label under which reports count it: a recipe's path, or "python-docs".
        segments: The text in parts, where it is a conversation; None is one part, all plain text and all labels.
    """

    text: str
    source: str
    segments: tuple[Segment, ...] | None = None

    def plain_texts(self) -> tuple[str, ...]:
        """What a tokenizer should learn from: everything but the special tokens of a chat template."""
        if self.segments is None:
            return (self.text,)
        return tuple(segment.text for segment in self.segments if not segment.is_template)
