"""Documents cut into what is encoded at once, such that the tokens end to end are those of the whole document."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tercet.tokenizer.encoding import text_pieces
from tercet.tokenizer.pretokenization import Words
from tercet.training.documents import Segment


class Piece(NamedTuple):
    """Text to encode by itself.

    Attributes:
        text: Not empty, without lone surrogates.
        is_template: Special tokens' names in it are those tokens.
        is_label: Of no concern to an encoder; comes back with the ids.
    """

    text: str
    is_template: bool = False
    is_label: bool = True


def cut_into_pieces(text: str, segments: Sequence[Segment] | None, words: Words | None) -> Iterator[Piece]:
    """The pieces of a document's text, or of a part of it, in order; none of an empty one.

    Args:
        segments: The text in parts, where it is a conversation. None is one part, all plain text and all labels.
        words: Of the tokenizer; None leaves text whole.
    """
    for segment in segments or (Segment(text, is_template=False, is_label=True),):
        if segment.text:
            # What a template wrote is a special token's name, which is too short to be cut.
            for piece in text_pieces(segment.text, words):
                yield Piece(piece, segment.is_template, segment.is_label)
