"""Training within a budget: the same tokenizer for the same documents, and no more memory than was asked for."""

import random
import re
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from tercet.tokenizer import SPECIAL_TOKENS, encode_documents, train_tokenizer
from tercet.tokenizer.pretokenization import _MARKS, LLAMA3_PATTERN, cut_long_words, split_document


def file_of(tokenizer) -> str:
    return tokenizer.backend_tokenizer.to_str()


def test_within_the_budget_it_is_what_tokenizers_makes_of_all_the_text(small_corpus, small_tokenizer):
    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1024, min_frequency=2, max_token_length=33, special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(small_corpus, trainer)
    assert backend.get_vocab() == small_tokenizer.get_vocab()


@pytest.mark.parametrize(
    "budget", [{}, {"max_bytes": 100_000}, {"max_documents": 20}, {"max_trainer_bytes": 3_000_000}]
)
def test_the_order_of_the_documents_does_not_matter(small_corpus, budget):
    counts = []
    made = set()
    for seed in range(2):
        texts = list(small_corpus)
        random.Random(seed).shuffle(texts)
        made.add(file_of(train_tokenizer(iter(texts), 600, on_text_used=counts.append, **budget)))
    assert len(made) == 1
    assert counts[0] == counts[1]
    assert counts[0].is_whole == (not budget)
    assert counts[0].kept_bytes <= budget.get("max_bytes", counts[0].seen_bytes)
    assert counts[0].kept_pieces <= budget.get("max_documents", counts[0].seen_pieces)


def test_text_whose_words_are_all_new_ends_early():
    """Chinese without marks has no word twice: the trainer takes some 100 bytes for each byte of it."""
    generator = random.Random(0)
    texts = ["".join(chr(0x4E00 + generator.randrange(900)) for _ in range(2000)) for _ in range(500)]
    counts = []
    train_tokenizer(texts, 400, max_trainer_bytes=70_000_000, on_text_used=counts.append)
    assert 300_000 < counts[0].kept_bytes < 700_000 < counts[0].seen_bytes


@pytest.mark.parametrize(
    "run", ["a", "\u4e2d", "=", "_-", "\x1c=", " ", "\u3000 ", "\n", " =", "\u0300", "=\u2550", "a\u00e9", "\x1f"]
)
def test_no_word_of_the_trainer_is_much_longer_than_the_bound(run):
    text = f"before it, {run * 500}\n\nand behind it"
    parts = cut_long_words(text, 64)
    assert "".join(parts) == text
    words = [
        word
        for part in parts
        for word, _ in pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated").pre_tokenize_str(part)
    ]
    assert "".join(words) == text
    assert max(map(len, words)) <= 1 + 64 + 64, "the trainer would scan it again and again"


@settings(max_examples=300, deadline=None)
@example([" ", "\x1c", "_" * 16])  # a separator is a mark to the pattern, whatever stands before it
@given(st.lists(st.builds(str.__mul__, st.sampled_from([*"a1_=. \n\u4e2d\u3000\x1c", "\u00b2"]), st.integers(1, 25))))
def test_text_without_a_long_run_is_handed_on_as_it_is(runs):
    text = "".join(runs)
    parts = cut_long_words(text, 16)
    assert "".join(parts) == text
    longest = max(
        (len(word) for word, _ in pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated").pre_tokenize_str(text)),
        default=0,
    )
    if longest > 33:
        assert len(parts) > 1
    runs_of_a_kind = re.findall(r"[^\W\d_]+|(?:[^\w\s]|[_\x1c])+|[^\S\x1c]+", text)
    if max(map(len, runs_of_a_kind), default=0) <= 16:
        assert parts in ([text], [])


def test_more_than_the_budget_supports_says_so(small_corpus):
    with pytest.raises(ValueError, match="give more text or a larger budget, or vocab_size="):
        train_tokenizer(small_corpus, 20_000, max_bytes=50_000)


_PEAK = """
import random, sys
from pathlib import Path
from tercet.tokenizer import train_tokenizer

def texts(megabytes):
    generator = random.Random(0)
    alphabet = [chr(0x4E00 + index) for index in range(2000)]
    for _ in range(megabytes * 100):
        yield "".join(generator.choices(alphabet, k=3300))

train_tokenizer(texts(1), 300)
Path("/proc/self/clear_refs").write_text("5")
train_tokenizer(texts(int(sys.argv[1])), 600, max_bytes=8_000_000, max_trainer_bytes=100_000_000)
lines = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks of memory are read from /proc")
def test_memory_does_not_grow_with_the_corpus():
    peaks = []
    for megabytes in (6, 24):
        command = [sys.executable, "-c", _PEAK, str(megabytes)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] < peaks[0] + 40_000_000, peaks
    assert peaks[1] < 600_000_000, peaks  # Python and the libraries take most of it


def test_every_kind_of_letter_ends_before_a_mark():
    """The pieces of a document are cut there: were one of these not the end of a word, ids would change."""
    letters = [chr(code) for code in range(0x110000) if chr(code).isalnum()]
    splitter = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    for text in (",".join([*letters, ""]), "".join(f"a{mark}1{mark}" for mark in _MARKS)):
        bounds = {start for _, (start, _) in splitter.pre_tokenize_str(text)}
        assert bounds >= set(range(1, len(text), 2)), text[:40]


@pytest.mark.parametrize("unit", ["人工智能正在改变世界\uff0c語言模型、学習。", "a", "中"])
def test_a_line_without_blanks_is_encoded_in_pieces(small_tokenizer, unit):
    text = unit * (700_000 // len(unit))
    (ids,) = encode_documents(small_tokenizer, [text])
    assert small_tokenizer.decode(ids) == text
    pieces = list(split_document(text, 1 << 16, 1 << 18))
    assert max(map(len, pieces)) <= 1 << 18
    if len(unit) > 1:  # it has marks: pieces are short, and their ids are those of the whole
        assert max(map(len, pieces)) < (1 << 16) + 100
        whole = small_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == whole
