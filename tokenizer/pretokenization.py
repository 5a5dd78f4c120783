"""Where text may be split: into the words that BPE works inside, and into pieces that can be encoded apart."""

import re
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from tokenizers import Regex, pre_tokenizers

# Llama 3's pattern, character for character: llama.cpp (as "llama-bpe"), vLLM and others know it by sight, and none of
# them runs an arbitrary pattern. It suits code (a symbol sticks to the word after it, an indent is one word that leaves
# its last space to the code) and arithmetic (at most three digits in a word).
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# BLOOM's (arXiv:2211.05100) parts words at blanks and at ends of clauses alone, so quotes, brackets, operators and
# digits are merged with the letters beside them; what stands between two words is a word, too. llama.cpp knows it.
BLOOM_PATTERN = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
BLOOM_MARKS = "(|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)"
# Whatever is between blanks, with the blanks before it: the fewest tokens, one for a word with the comma behind it, or
# for a line's indent with the word behind it. Only `tokenizers` runs it.
BLANKS_PATTERN = r"[ \t\r\n]*[^ \t\r\n]+|[ \t\r\n]+"
# The same with numbers apart, in threes from their end, and a comma or period behind a letter, so that `x,` is no other
# token than `x`. A number's first digits look ahead once, the others count from there: were each to look, a million
# digits in a row would take hours.
#
# Where words part can be told from the two bytes on either side, but for numbers. So no merge that was learned joins
# what is parted, and the ids are the same if text is parted at numbers alone: as llama.cpp's "superbpe" does.
CLAUSES_PATTERN = (
    r"(?<=[0-9])[0-9]{3}"
    r"|[0-9]{1,3}?(?=(?:[0-9]{3})*(?![0-9]))"
    r"|(?:(?![0-9])\p{N})+"
    # Behind the first character a mark only where no letter is before it: none of ASCII, none that is no ASCII.
    r"|[ \t\r\n]*[^ \t\r\n\p{N}](?:[^ \t\r\n\p{N},.]+|(?<![^\x00-@\[-\x60{-\x7f])[,.]+)*"
    r"|[ \t\r\n]+"
)

Words = Literal["llama3", "bloom", "clauses", "blanks"]
"""What BPE takes for a word. A longer word makes fewer tokens of a text, and of its parts none that others share."""

BLANKS = r" \t-\r\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space to Python and to the patterns, for use in brackets; not 28 to 31, which are so to Python alone."""

# No match of a pattern goes on across these places, and none looks ahead across them: the ids of the pieces are the ids
# of the whole. Python's \s covers the patterns' \s (compared on every code point), so a doubtful one means no cut.
#
# Llama 3: "newline, then no whitespace", "no whitespace, then space", from a letter or number to a mark (no apostrophe
# among them, which begins a contraction). The marks are for Chinese and others that write no spaces. What is \w but no
# underscore is \p{L} or \p{N}.
# The others: where a word ends.
_MARKS = ",.;:!?)\u3001\u3002\uff0c\uff1b\uff1a\uff01\uff1f\uff09\u300d\u060c\u061b\u061f\u06d4\u0964\u104b\u17d4\u0f0d"
_SAFE_CUTS: dict[Words, re.Pattern[str]] = {
    "llama3": re.compile(rf"(?<=\n)(?=\S)|(?<=\S)(?= )|(?<=[^\W_])(?=[{_MARKS}])"),
    "bloom": re.compile(rf"(?<=[^\s{BLOOM_MARKS}])(?=[{BLANKS}{BLOOM_MARKS}])"),
    **dict.fromkeys(("clauses", "blanks"), re.compile(r"(?<=[^ \t\r\n])(?=[ \t\r\n])")),
}
# Classes of characters of which a run is one word, or nearly so; to Llama 3's pattern an underscore is a mark.
_RUNS: dict[Words, tuple[str, ...]] = {
    "llama3": (r"[^\W\d]", r"[^\w\s]", r"\s"),
    "bloom": (rf"[^\s{BLOOM_MARKS}]", rf"[\s{BLOOM_MARKS}]"),
    **dict.fromkeys(("clauses", "blanks"), (r"[^ \t\r\n]", r"[ \t\r\n]")),
}


def words_of(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Words | None:
    """Which of the words a pre-tokenizer makes; None if others."""
    state = pre_tokenizer.__getstate__()
    return next((words for words in get_args(Words) if word_splitter(words).__getstate__() == state), None)


def word_splitter(words: Words = "llama3") -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of a Tercet tokenizer: words by a pattern, then their bytes.

    Raises:
        ValueError: Words of another name.
    """
    patterns: dict[Words, str] = {
        "llama3": LLAMA3_PATTERN, "bloom": BLOOM_PATTERN, "clauses": CLAUSES_PATTERN, "blanks": BLANKS_PATTERN,
    }  # fmt: skip
    if words not in patterns:
        raise ValueError(f"words={words!r} is not known: choose one of {', '.join(patterns)}")
    return pre_tokenizers.Sequence([_split(patterns[words]), _to_bytes()])


def may_hold_long_run(content: bytes, max_run_chars: int, words: Words = "llama3") -> bool:
    """Whether `cut_long_words` may find one; on the bytes a gigabyte is searched in a second or two."""
    # At half the length, as a word may be half marks and half line ends.
    some = b"x" * (max_run_chars // 2)
    return any(some in content.translate(table) for table in _MAY_BE_RUNS[words])


def cut_long_words(text: str, max_run_chars: int, words: Words = "llama3") -> list[str]:
    """Parts of a text in which no run of letters, marks or blanks is longer; for counting pairs only.

    Where a word is more than letters or marks, it is no run of any of its characters that is longer.

    A run of Chinese without punctuation or a ruler of `====` is one word, and the trainer scans a whole word again for
    every merge inside it: 200,000 Chinese characters took 114 s, and 2,000,000 in words of 256 take 6 s. Cut here, for
    a second `Split` in the pre-tokenizer looks at every word and doubles the time that counting takes.

    Args:
        text: Any text.
        max_run_chars: Longest run. A word is at most one character, a run, and a run of blanks.

    Returns:
        The text in order, with nothing lost: as it is, or cut before, inside and behind its long runs.
    """
    if not may_hold_long_run(text.encode("utf-8"), max_run_chars, words):
        return [text]
    parts, end = [], 0
    long_runs = "|".join(f"{kind}{{{max_run_chars + 1},}}" for kind in _RUNS[words])
    for run in re.finditer(long_runs, text.translate(_AS_MARKS)):
        parts.append(text[end : run.start()])
        end = run.end()
        parts += [text[at : min(at + max_run_chars, end)] for at in range(run.start(), end, max_run_chars)]
    return [part for part in (*parts, text[end:]) if part]


def _byte_table(is_one: Callable[[int], bool]) -> bytes:
    return bytes(ord("x") if is_one(code) else ord(" ") for code in range(256))


# Python calls ASCII's separators 28 to 31 blanks, the pattern marks: they may be either. So may be parts of characters.
_AS_MARKS = {ord("_"): "-", **dict.fromkeys(range(28, 32), "-")}
_NOT_BLANK = _byte_table(lambda code: not chr(code).isspace() or code in range(28, 32) or code > 127)
_BLANK = _byte_table(lambda code: chr(code).isspace() or code > 127)
_GAP = _byte_table(lambda code: chr(code).isspace() or chr(code) in BLOOM_MARKS or code > 127)
_MAY_BE_RUNS: dict[Words, tuple[bytes, bytes]] = {
    "llama3": (_NOT_BLANK, _BLANK),
    "bloom": (_NOT_BLANK, _GAP),
    **dict.fromkeys(
        ("clauses", "blanks"),
        (_byte_table(lambda code: code not in b" \t\r\n"), _byte_table(lambda code: code in b" \t\r\n")),
    ),
}


def split_document(
    text: str, piece_chars: int, max_piece_chars: int | None = None, words: Words = "llama3"
) -> Iterator[str]:
    """Cut a long text into pieces whose tokens, end to end, are the tokens of the whole.

    Args:
        text: Any text.
        piece_chars: Shortest piece but the last, in characters. A piece is longer where no safe place to cut comes up.
        max_piece_chars: Longest piece. Where none of its characters but the first `piece_chars` is a safe place, the
            text is cut here all the same, and the tokens on both sides of the cut may be others.
        words: Those of the tokenizer.
    """
    safe_cut = _SAFE_CUTS[words]
    start = 0
    while len(text) - start > piece_chars:
        end = len(text) if max_piece_chars is None else min(start + max_piece_chars, len(text))
        # The pattern sees one character behind `end`, and must: a cut there is as good as any.
        cut = safe_cut.search(text, start + piece_chars, end + 1)
        if cut is None and end == len(text):
            break
        end = end if cut is None else cut.start()
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _to_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
