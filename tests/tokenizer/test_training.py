"""What training a tokenizer promises: its size, its special tokens, its determinism, its errors."""

import subprocess
import sys
import time

import pytest

from tercet.tokenizer import (
    END_OF_TEXT,
    MESSAGE_END,
    MESSAGE_START,
    MIN_VOCAB_SIZE,
    PADDING,
    encode_documents,
    train_tokenizer,
)


def test_special_tokens_come_first(small_tokenizer):
    specials = [END_OF_TEXT, PADDING, MESSAGE_START, MESSAGE_END]
    assert small_tokenizer.convert_tokens_to_ids(specials) == [0, 1, 2, 3]
    assert small_tokenizer.all_special_ids == [0, 1, 2, 3]
    assert small_tokenizer.bos_token_id == small_tokenizer.eos_token_id == 0
    assert small_tokenizer.pad_token_id == 1


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 777])
def test_vocabulary_has_the_size_asked_for(small_corpus, vocab_size):
    tokenizer = train_tokenizer(small_corpus, vocab_size)
    assert len(tokenizer) == tokenizer.vocab_size == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))


def test_every_byte_has_a_token():
    tokenizer = train_tokenizer(["ab"], MIN_VOCAB_SIZE)
    assert len(encode_documents(tokenizer, ["中"])[0]) == 3
    every_character_of_two_bytes = "".join(map(chr, range(0x800)))
    (ids,) = encode_documents(tokenizer, [every_character_of_two_bytes])
    assert len(ids) == 128 + 2 * (0x800 - 128)


def test_pads_on_the_left(small_tokenizer):
    short, long = small_tokenizer(["a", "a longer line of text"], padding=True)["input_ids"]
    assert short[0] == small_tokenizer.pad_token_id
    assert short[-1] == small_tokenizer("a")["input_ids"][-1]
    assert len(short) == len(long)


_TRAIN_AND_HASH = """
import hashlib
from pydoc_data import topics
from tercet.tokenizer import train_tokenizer
tokenizer = train_tokenizer([text for _, text in sorted(topics.topics.items())], vocab_size=1024)
print(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())
"""


def test_same_texts_same_file_in_any_process(small_tokenizer):
    """Neither hash seeds nor the number of threads move an id."""
    import hashlib
    import os

    here = hashlib.sha256(small_tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    for threads in ("1", "3"):
        there = subprocess.run(
            [sys.executable, "-c", _TRAIN_AND_HASH],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.strip() == here


def test_special_names_in_the_corpus_are_counted_as_text(small_corpus):
    plain = train_tokenizer([*small_corpus, "<|endoftext|>" * 500], vocab_size=1024)
    assert plain.convert_tokens_to_ids("end") is not None
    assert plain.tokenize("endoftext") == ["endoftext"]


def test_one_huge_document_takes_seconds(small_corpus):
    """Per merge, the trainer scans a word again: one unbroken word of this length took minutes."""
    syllables = "".join(chr(0x4E00 + (index * index) % 997) for index in range(300_000))
    prose = "\n\n".join(small_corpus)
    start = time.perf_counter()
    tokenizer = train_tokenizer([prose * 4 + syllables + "=" * 300_000], vocab_size=2048)
    assert time.perf_counter() - start < 30
    assert len(tokenizer) == 2048
    assert max(len(token) for token in tokenizer.get_vocab()) == 32


def test_reads_a_generator_once(small_corpus, small_tokenizer):
    tokenizer = train_tokenizer(iter(small_corpus), vocab_size=1024)
    assert tokenizer.get_vocab() == small_tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("texts", "vocab_size", "says"),
    [
        (["ab"], 259, "vocab_size=259 is too small.*need 260"),
        ([], 300, "corpus is empty"),
        (["", ""], 300, "corpus is empty"),
        (["fine", "b\ud83dd"], 300, r"text 1 holds a lone surrogate \(U\+D83D\) at character 1"),
        (["hello hello hello"], 5000, "vocab_size=5000 is larger than the corpus supports"),
    ],
)
def test_bad_input_gets_one_clear_line(texts, vocab_size, says):
    with pytest.raises(ValueError, match=says) as error:
        train_tokenizer(texts, vocab_size)
    assert "\n" not in str(error.value)


def test_the_vocabulary_advised_is_one_that_works():
    texts = ["hello hello hello world world"]
    with pytest.raises(ValueError, match="or vocab_size=") as error:
        train_tokenizer(texts, 5000)
    advised = int(str(error.value).rsplit("=", 1)[1])
    assert len(train_tokenizer(texts, advised)) == advised > MIN_VOCAB_SIZE


def test_no_list_of_documents_is_a_type_error():
    with pytest.raises(TypeError, match=r"pass a list of documents: \[text\]"):
        train_tokenizer("one string", 300)
    with pytest.raises(TypeError, match="text 0 is of type bytes"):
        train_tokenizer([b"bytes"], 300)  # pyright: ignore[reportArgumentType]
