"""Where text may be split: into the words that BPE works inside, and into pieces that can be encoded apart."""

import re
from collections.abc import Iterator

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

# No match of the pattern goes on across "newline, then no whitespace", nor across "no whitespace, then space", and none
# looks ahead across them: the ids of the pieces are the ids of the whole. Python's \s covers the pattern's \s (compared
# on every code point), so a doubtful character only means no cut here.
_SAFE_CUT = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?= )")


def word_splitter() -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of every Tercet tokenizer: words by the pattern, then their bytes."""
    return pre_tokenizers.Sequence([_split(LLAMA3_PATTERN), _to_bytes()])


def bounded_word_splitter(max_word_chars: int) -> pre_tokenizers.PreTokenizer:
    """The same with long words cut, for counting pairs only.

    A run of Chinese without punctuation or a ruler of `====` is one word, and the trainer scans a whole word again for
    every merge inside it: 200,000 Chinese characters took 114 s, and 2,000,000 in words of 256 take 6 s.
    """
    return pre_tokenizers.Sequence([_split(LLAMA3_PATTERN), _split(rf"(?m:.{{1,{max_word_chars}}})"), _to_bytes()])


def split_document(text: str, piece_chars: int) -> Iterator[str]:
    """Cut a long text into pieces whose tokens, end to end, are the tokens of the whole.

    Args:
        text: Any text.
        piece_chars: Shortest piece but the last, in characters. A piece is longer where no safe place to cut comes up.
    """
    start = 0
    while len(text) - start > piece_chars:
        cut = _SAFE_CUT.search(text, start + piece_chars)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _to_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
