"""Chunks whose ids, kept or made anew, are those that the tokenizer gives the whole text."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers

from tercet.tokenizer import SPECIAL_TOKENS
from tercet.tokenizer.chunking import _MARKS, Chunking, chunking_of
from tercet.tokenizer.pretokenization import BLANKS, BLOOM_MARKS, BLOOM_PATTERN, word_splitter
from tercet.training import encode_worker
from tercet.training.encode_worker import Encoder

ODD = (
    " \t\n\r\x00\x0b\x0c\x1c\x1f\x85\u00a0\u2028\u3000"
    "\u2003\u202f\u2026\u060c\u06d4\u0964'\u2019\u201c\u2014_-=(){};.,:!?<|>#\"sStTrdDlLvVeE09\u0663\u00b2\u00bd"
    "\u00e9\u00df\u0130\u017f\u0301\u093f\u0939\u200d\u4e2d\u6587\u3002\uff0c\u300c\u0e01\u0e31\ud55c\U0001d7d8\U0001f600"
    "\U0001e4f0\U00011f04\U00031350"  # a digit, a letter and a Han character of Unicode 15, which Python 3.11 lacks
)
PARTS = [*SPECIAL_TOKENS, "don't", "'SO", " ''s", "  ", "\n\n", "\r\n", " \n ", "\t\t", "12345", "x1", "((", "====",
         ").\n", ". . ", "\n the", "the", " the", "a" * 60, "\u4e2d" * 70,
         " \u0939\u093f\u0928\u094d\u0926\u0940,"]  # fmt: skip
TEXTS = st.lists(
    st.one_of(st.sampled_from(PARTS), st.text(st.sampled_from(ODD), max_size=6), st.text(max_size=4)), max_size=20
).map("".join)


@pytest.fixture(scope="session")
def chunking(tokenizer) -> Chunking:
    found = chunking_of(tokenizer.backend_tokenizer)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def encoders(tokenizer, chunking) -> tuple[Encoder, Encoder]:
    """With chunks and without; the first keeps what it met in earlier examples."""
    state = tokenizer.backend_tokenizer.to_str()
    return Encoder(state, "uint16", tuple(chunking)), Encoder(state, "uint16", None)


@pytest.fixture(scope="session")
def split(words):
    """Where the words of a text begin and end to the tokenizer itself."""
    splitter = word_splitter(words)
    return lambda text: [span for _, span in splitter.pre_tokenize_str(text)]


def spans_of_chunks(chunks: list[str], split) -> list[tuple[int, int]]:
    spans, start = [], 0
    for chunk in chunks:
        spans += [(start + first, start + last) for first, last in split(chunk)]
        start += len(chunk)
    return spans


@settings(max_examples=1000, deadline=None)
@given(text=TEXTS)
def test_the_words_of_the_chunks_are_the_words_of_the_text(chunking, split, text: str):
    chunks = re.findall(chunking.pattern, text)
    assert "".join(chunks) == text
    assert spans_of_chunks(chunks, split) == split(text)
    assert all(len(split(chunk)) == 1 for chunk in chunks if re.fullmatch(chunking.word, chunk))


@pytest.mark.parametrize(
    "codes", [range(0x3400), pytest.param(range(0x3400, 0x110000), marks=pytest.mark.slow)], ids=["first", "others"]
)
def test_beside_every_code_point(chunking, split, codes):
    """Where Python and the pattern do not agree on what a character is, no chunk ends."""
    chars = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    for start in range(0, len(chars), 4096):
        text = "".join(f"a{char}b {char}{char} " for char in chars[start : start + 4096])
        chunks = re.findall(chunking.pattern, text)
        assert spans_of_chunks(chunks, split) == split(text)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXTS.filter(bool), min_size=1, max_size=4), size=st.sampled_from([1, 5, 1 << 18]))
def test_ids_are_those_of_the_tokenizer_cold_warm_and_while_chunks_go(encoders, texts, size: int):
    kept, plain = encoders
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_worker, "_GENERATION_CHUNKS", size)
        expected = plain.text_ids(texts)
        assert kept.text_ids(texts) == expected
        assert kept.text_ids(texts[::-1]) == expected[::-1]


def test_a_template_piece_has_special_tokens_and_the_text_beside_it_none(encoders, small_tokenizer):
    name = SPECIAL_TOKENS[0]
    for encoder in encoders:
        ids, counts = encode_worker.encode_pieces(encoder, [name, name, "a" + name], [False, True, False])
        special = np.isin(ids, small_tokenizer.all_special_ids)
        first, second, _ = np.split(special, np.cumsum(counts)[:-1])
        assert second.tolist() == [True]
        assert special.sum() == 1
        assert len(first) > 1


def test_memory_is_bounded_and_words_in_use_stay(tokenizer, chunking, monkeypatch):
    monkeypatch.setattr(encode_worker, "_GENERATION_CHUNKS", 100)
    encoder = Encoder(tokenizer.backend_tokenizer.to_str(), "uint16", tuple(chunking))
    kept = encoder._chunk_ids
    assert kept is not None
    made = []
    make = kept._make
    monkeypatch.setattr(kept, "_make", lambda chunk: made.append(chunk) or make(chunk))
    for number in range(1000):
        encoder.text_ids([f"often qx{number}y " + "z" * 200])
        assert len(kept) + len(kept._old) <= 200
    assert made.count("often") == 1
    assert not any(len(chunk) > 100 for chunk in (*kept, *kept._old))


def test_no_mark_is_a_letter_number_or_blank_to_the_pattern():
    """Were one of these part of a word, chunks would end inside words."""
    marks = [chr(code) for code in range(0x10000) if re.match(f"[{_MARKS}]", chr(code))]
    assert len(marks) > 500
    splitter = pre_tokenizers.Split(Regex(r"[^\s\p{L}\p{N}]"), behavior="isolated")
    assert [word for word, _ in splitter.pre_tokenize_str("".join(marks))] == marks
    both = pre_tokenizers.Split(Regex(r"[\s\p{L}\p{N}]+"), behavior="removed")
    assert "".join(word for word, _ in both.pre_tokenize_str("".join(marks))) == "".join(marks)


def test_letters_behind_a_prefix_are_one_word(chunking, split):
    letters = [chr(code) for code in range(0x110000) if chr(code).isalpha()]
    for start in range(0, len(letters), 1000):
        text = "".join(letters[start : start + 1000])
        assert split(text) == [(0, 1000 if start + 1000 <= len(letters) else len(letters) - start)]
    for prefix in chunking.prefixes:
        for text in ("so", "twas", "\u4e2d"):
            assert split(prefix + text) == [(0, 1 + len(text))]


def test_blanks_and_what_parts_words_are_so_to_the_patterns():
    """Were one of them part of a word, chunks would end inside words."""
    chars = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    everything = "".join(chars)
    for pattern, ours in ((r"\S", BLANKS), (BLOOM_PATTERN.replace(" ?", ""), BLANKS + BLOOM_MARKS)):
        parted = pre_tokenizers.Split(Regex(pattern), behavior="removed").pre_tokenize_str(everything)
        between = "".join(word for word, _ in parted)
        assert set(re.findall(f"[{ours}]", everything)) <= set(between)
        # Nor is one of theirs a letter to Python.
        assert not re.findall(rf"[^\s{ours}]", between)


def test_other_tokenizers_have_no_chunks(small_tokenizer):
    from copy import deepcopy

    backend = deepcopy(small_tokenizer.backend_tokenizer)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert chunking_of(backend) is None
    backend = deepcopy(small_tokenizer.backend_tokenizer)
    assert isinstance(backend.model, models.BPE)
    backend.model.dropout = 0.1
    assert chunking_of(backend) is None
