"""Text in chunks that come again and again, so that their ids can be kept: the words of most text are few.

No word of the tokenizer goes on across the border of two chunks, and none looks ahead across it: the ids of the chunks,
end to end, are the ids of the whole. A chunk is a word or, where that cannot be told for sure, several.
"""

from typing import NamedTuple

from tokenizers import Tokenizer

from tercet.tokenizer.encoding import exact_words
from tercet.tokenizer.pretokenization import BLANKS, BLOOM_MARKS, Words


class Chunking(NamedTuple):
    """How to cut text for one tokenizer; plain strings, which a process that imports no Tercet can be given.

    Attributes:
        pattern: For Python's `re`; its matches, one after the other, are the text.
        prefixes: Characters that make one word with the letters behind them.
        word: For `re`; a chunk that is a match as a whole is one word for sure. So is one of letters alone.
    """

    pattern: str
    prefixes: str
    word: str


# Neither letter, number nor white space to Python and to the pattern, whatever their Unicode versions: ASCII, Latin-1,
# Arabic, Devanagari, Tibetan, Myanmar and Khmer marks, general punctuation, arrows to dingbats, CJK and full width.
_MARKS = (
    r"!-/:-@\[-`{-~\xa1-\xa9\xab\xac\xae-\xb1\xb4\xb6-\xb8\xbb\xbf\xd7\xf7"
    r"\u060c\u061b\u061f\u06d4\u0964\u0f0d\u104b\u17d4"
    r"\u2010-\u2027\u2030-\u205e\u2190-\u23ff\u2500-\u2775\u2794-\u27bf"
    r"\u3001-\u3003\u3008-\u3011\u3014-\u301f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
_ENDS_WORD = rf"(?=[ \t\r\n{_MARKS}]|\Z)"  # behind a letter or number

# `[^\W_]` is within \p{L} and \p{N}, \S within the pattern's; what is on neither side for sure is left to the last two
# alternatives, which end only before a space behind no white space, or behind a line end before no white space.
_LLAMA3_CHUNK = "|".join(
    (
        # Letters with the blank or the one mark before them. (A contraction, 's, is several words at times.)
        rf"[ \t]?[^\W\d_]++{_ENDS_WORD}",
        rf"[{_MARKS}][^\W\d_]++{_ENDS_WORD}",
        # Marks that the letters behind them do not join: a space or a mark stands before the last. Line ends join them.
        rf"(?: [{_MARKS}]++|[{_MARKS}]{{2,}}+)(?:[\r\n]++|(?=[^\W_]|[ \t]|\Z))",
        rf"[{_MARKS}](?:[\r\n]++|(?=[0-9 \t]|\Z))",
        # A number has three digits at most, counted from its start, and joins no blank.
        rf"[0-9]{{1,3}}+(?=[0-9A-Za-z \t\r\n{_MARKS}]|\Z)",
        rf" (?=[0-9])|\t(?=[0-9{_MARKS}])",
        # White space up to its last line end, or to its last blank, which may join what is behind it.
        r"[ \t\r\n]++(?:(?<=[\r\n])(?=\S)|\Z)",
        r"[ \t\r\n]+(?=[ \t]\S)",
        # Letters and digits in one.
        rf"[ \t{_MARKS}]?[^\W_]++{_ENDS_WORD}",
        r"\s?\S++(?= |\Z)",
        r"(?s:.+?)(?:(?<=\S)(?= )|(?<=\n)(?=\S)|\Z)",
    )
)
# No apostrophe: 'so is 's and o.
_PREFIXES = ' \t!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\u00ab\u201c\u3001\u3002\u300c\uff08\uff0c'
_LLAMA3_WORD = rf"[0-9]{{1,3}}| ?[{_MARKS}]+[\r\n]*"

_BLOOM_GAP = rf"[{BLANKS}{BLOOM_MARKS}]"  # of what stands between BLOOM's words
_BLOOM_LETTER = rf"[^\s{BLOOM_MARKS}]"
_BLOOM_CHUNK = "|".join(
    (
        rf" ?{_BLOOM_LETTER}++(?={_BLOOM_GAP}|\Z)",
        # The last blank of a gap belongs to the word behind it.
        rf"{_BLOOM_GAP}+(?:(?= {_BLOOM_LETTER})|(?<! )(?={_BLOOM_LETTER})|\Z)",
        rf"(?s:.+?)(?:(?<={_BLOOM_LETTER})(?={_BLOOM_GAP})|\Z)",
    )
)
# Both ends of a number part words, whatever is beside them; so does a mark behind a letter, or what may be one.
_CLAUSES_CHUNK = "|".join(
    (
        r"[0-9]++",
        r"[ \t\r\n]*+[^ \t\r\n0-9](?:[^ \t\r\n0-9,.]++|(?<![A-Za-z\x80-\U0010ffff])[,.]++)*+",
        r"[ \t\r\n]++",
    )
)
_CLAUSES_PREFIXES = "".join(chr(code) for code in (*b" \t\r\n", *range(33, 127)) if not chr(code).isdigit())
_CLAUSES_WORD = rf"[0-9]{{1,3}}|[ \t\r\n]*[A-Za-z\xc0-\u024f\u4e00-\u9fff{_MARKS}]*"  # no letter here is a number

_CHUNKINGS: dict[Words, Chunking] = {
    "llama3": Chunking(_LLAMA3_CHUNK, _PREFIXES, _LLAMA3_WORD),
    "bloom": Chunking(_BLOOM_CHUNK, " ", rf" ?{_BLOOM_LETTER}+|{_BLOOM_GAP}+"),
    "clauses": Chunking(_CLAUSES_CHUNK, _CLAUSES_PREFIXES, _CLAUSES_WORD),
    "blanks": Chunking(r"[ \t\r\n]*+[^ \t\r\n]++|[ \t\r\n]++", _CLAUSES_PREFIXES, r"(?s:.+)"),  # each a word
}


def chunking_of(backend: Tokenizer) -> Chunking | None:
    """How to cut text for this tokenizer with the same ids; None if they may depend on more than the chunk."""
    words = exact_words(backend)
    is_random = bool(getattr(backend.model, "dropout", None))
    return None if words is None or is_random else _CHUNKINGS[words]
