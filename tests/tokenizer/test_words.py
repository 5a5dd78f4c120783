"""What BPE takes for a word: the four ways to part text, and what each costs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from tercet.tokenizer import encode_documents, train_tokenizer
from tercet.tokenizer.pretokenization import Words, cut_long_words, word_splitter

TEXT = 'He said: "No, never." x->y=3; 2024 was\n\n  new'
PARTS: dict[Words, str] = {
    "llama3": 'He| said|:| "|No|,| never|."| x|->|y|=|3|;| |202|4| was|\n\n| | new',
    "bloom": 'He| said:| "No|,| never|.|"| x->y=3;| 2024| was|\n\n | new',
    "blanks": 'He| said:| "No,| never."| x->y=3;| 2024| was|\n\n  new',
    "clauses": 'He| said:| "No|,| never|."| x->y=|3|;| |2|024| was|\n\n  new',
}
NASTY = ["", " ", "\n\n\n", "a" * 700, "don't  stop\t\u00a0now", "中文\uff0c没有空格。", "\u0000\ufffd\U0001f600", TEXT]


def test_where_text_is_parted(words: Words):
    parts = [TEXT[start:end] for _, (start, end) in word_splitter(words).pre_tokenize_str(TEXT)]
    assert parts == PARTS[words].split("|")


def test_text_comes_back(tokenizer):
    for text in NASTY:
        (ids,) = encode_documents(tokenizer, [text])
        assert tokenizer.decode(ids) == text


def test_documents_of_any_length_have_the_ids_of_the_whole(tokenizer, small_corpus):
    """Long ones are cut before they are encoded, where the pattern allows it."""
    text = "\n\n".join(small_corpus)[:300_000] + ' (quoted) "words"\n \nend'
    assert encode_documents(tokenizer, [text])[0] == tokenizer.backend_tokenizer.encode(text).ids


@pytest.fixture(scope="module")
def parted_or_not(small_corpus) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer of clauses, and with its merges another that parts text at numbers alone, as llama.cpp does."""
    odd = ["\u00e9t\u00e9, \u4e2d\u6587\u3002 \u4e2d, \u00bd,\u00a9, f(x,y).z\n\t  \u00e9.b 12\u00bd345\t,\n"] * 40
    words = train_tokenizer([*small_corpus, *odd], 4096, words="clauses").backend_tokenizer
    unparted = Tokenizer.from_str(words.to_str())
    numbers = [pre_tokenizers.Split(Regex(p), "isolated") for p in (r"\p{N}+", "(?=([0-9]{3})+(?![0-9]))")]
    unparted.pre_tokenizer = pre_tokenizers.Sequence([*numbers, pre_tokenizers.ByteLevel(False, use_regex=False)])
    assert len(json.loads(words.to_str())["model"]["merges"]) > 3000
    return words, unparted


@settings(max_examples=2000, deadline=None)
@given(
    st.text(
        st.sampled_from(" \n\t,.;()aeofxz0123\u00e9\u00a9\u00bd\u0663\u4e2d\u3002\u3000\x0b\U0001f600"), max_size=40
    )
)
def test_clauses_need_not_be_parted_but_at_numbers(parted_or_not, text: str):
    words, unparted = parted_or_not
    assert words.encode(text).ids == unparted.encode(text).ids


def test_a_number_is_read_in_threes_from_its_end_however_long():
    digits = "7" * 1_000_001
    parts = word_splitter("clauses").pre_tokenize_str(digits)
    assert [end - start for _, (start, end) in parts] == [2] + [3] * 333_333


def test_longer_words_make_fewer_tokens(small_corpus):
    learned, other = small_corpus[::2], small_corpus[1::2]
    num_tokens = {
        words: sum(map(len, encode_documents(train_tokenizer(learned, 4096, words=words), other))) for words in PARTS
    }
    assert num_tokens["llama3"] > num_tokens["bloom"] > num_tokens["clauses"] > num_tokens["blanks"]


def test_long_words_of_any_kind_are_cut_for_counting():
    link = "https://example.org/?" + "a1-" * 400
    for words in ("bloom", "clauses", "blanks"):
        parts = cut_long_words(f"see {link} there", 256, words)
        assert "".join(parts) == f"see {link} there"
        assert max(len(word) for part in parts for word in part.split()) == 256


def test_what_stands_between_words_is_cut_for_counting():
    leaders = "Contents" + " ." * 1000 + " 1"
    assert max(len(word) for word, _ in word_splitter("bloom").pre_tokenize_str(leaders)) > 1900
    parts = cut_long_words(leaders, 256, "bloom")
    assert "".join(parts) == leaders
    assert max(len(word) for part in parts for word, _ in word_splitter("bloom").pre_tokenize_str(part)) <= 257


def test_words_of_another_name_are_refused(small_corpus):
    with pytest.raises(ValueError, match="words='gpt2' is not known: choose one of llama3, bloom, clauses, blanks"):
        train_tokenizer(small_corpus, 1024, words="gpt2")  # pyright: ignore[reportArgumentType]
