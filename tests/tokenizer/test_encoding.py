"""Encoding documents in bulk: plain text, nothing added, nothing left behind."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tercet.tokenizer import SPECIAL_TOKENS, bytes_per_token, encode_documents
from tercet.tokenizer.encoding import exact_words
from tercet.tokenizer.pretokenization import split_document


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
@pytest.mark.parametrize("around", ["{}", " {} ", "see {}.", "{0}{0}", "x{}\n"])
def test_special_names_are_ordinary_text(small_tokenizer, name, around):
    text = around.format(name)
    (ids,) = encode_documents(small_tokenizer, [text])
    assert not set(ids) & set(small_tokenizer.all_special_ids)
    assert small_tokenizer.decode(ids) == text
    assert small_tokenizer.convert_tokens_to_ids(name) in small_tokenizer(text)["input_ids"]  # still special outside


def test_leaves_the_tokenizer_as_it_was(small_tokenizer):
    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer(["a b c", "a"], padding=True, truncation=True, max_length=2)
    before = tokenizer.backend_tokenizer.to_str()
    (ids,) = encode_documents(tokenizer, ["a longer text than two tokens"])
    assert len(ids) > 2
    with pytest.raises(ValueError, match="text 1 holds a lone surrogate"):
        encode_documents(tokenizer, ["fine", "\udc80"])
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.backend_tokenizer.encode_special_tokens is False


def test_empty_and_order(small_tokenizer):
    texts = ["one", "", "two three", ""]
    assert encode_documents(small_tokenizer, texts) == [small_tokenizer(text)["input_ids"] for text in texts]
    assert encode_documents(small_tokenizer, []) == []


def test_long_document_has_the_ids_of_the_whole(small_tokenizer, small_corpus):
    document = "\n\n".join(small_corpus) + "".join(chr(0x4E00 + index % 997) for index in range(200_000))
    reference = small_tokenizer.backend_tokenizer.encode(document, add_special_tokens=False).ids
    assert encode_documents(small_tokenizer, ["before", document, "after"])[1] == reference


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from(" \t\n\r\x0b\x1c\x85\u00a0\u2028'sT_aB\u030109!(<|.,中。"), max_size=60),
    piece_chars=st.integers(1, 8),
)
def test_pieces_have_the_ids_of_the_whole(tokenizer, words, text, piece_chars):
    encode = tokenizer.backend_tokenizer.encode
    pieces = list(split_document(text, piece_chars, words=words))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in encode(piece).ids] == encode(text).ids


def test_pieces_of_prose_are_short(tokenizer, words, small_corpus):
    """What encodes a document of any length holds a piece of it: an Encoding takes 100 bytes a character."""
    assert exact_words(tokenizer.backend_tokenizer) == words
    text = "\n\n".join(small_corpus)
    pieces = list(split_document(text, 1000, words=words))
    assert max(map(len, pieces)) < 1200
    assert len(pieces) > len(text) / 1200


def test_other_tokenizers_are_not_cut():
    """GPT-2's pattern parts "a\\n\\nb" inside the blank line, but "a\\n\\n" after it: a cut would change ids."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = "a\n\nb " * 20_000
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([text + "\n\n\n\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert encode_documents(tokenizer, [text])[0] == backend.encode(text).ids


def test_bytes_per_token(small_tokenizer):
    text = "é" * 7 + "hello world"
    assert bytes_per_token(small_tokenizer, [text, text]) == len(text.encode()) / len(small_tokenizer.tokenize(text))
    with pytest.raises(ValueError, match="every one of the texts is empty"):
        bytes_per_token(small_tokenizer, ["", ""])


def test_real_text_is_compressed(shared_data):
    from tercet.tokenizer import train_tokenizer

    text = (shared_data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    tokenizer = train_tokenizer([text[: len(text) * 9 // 10]], vocab_size=1024)
    assert bytes_per_token(tokenizer, [text[len(text) * 9 // 10 :]]) > 2.2
