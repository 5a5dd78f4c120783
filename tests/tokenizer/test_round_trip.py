"""Every Unicode string comes back as it went in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.tokenizer import encode_documents

any_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200)
# Arbitrary characters rarely meet the pattern's corners; these do at every step.
corner_text = st.text(
    alphabet=st.sampled_from(" \t\n\r\x1c\x85\u00a0\u200b\u2028'\u2019sStT_aB\u0301\u017f09\u0665!<|>中ئ🏽"),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(text=any_text | corner_text)
def test_any_unicode(small_tokenizer, text):
    ids = small_tokenizer(text)["input_ids"]
    assert small_tokenizer.decode(ids) == text
    (raw_ids,) = encode_documents(small_tokenizer, [text])
    assert small_tokenizer.decode(raw_ids) == text
    assert raw_ids == small_tokenizer(text, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "hello world",
        " hello  world ",
        "2023",
        "x != y",
        "it 's , isn 't . we 're !",  # what clean_up_tokenization_spaces would close up
        "\n\n",
        "\r\n\t\r\n",
        "\x00\x01\ufeff\ufffd\U0010ffff",
        "人工智能正在改变世界。語言模型、学習",
        "👩‍👩‍👧‍👦 👍🏽 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
        "def f(x):\n\tif x:\n\t\treturn {'a': [1, 2.50e-3]}\n        # ====\n",
        "مرحبا بالعالم، كَيْفَ حالُك؟ ١٢٣٤",
        "e\u0301 vs \u00e9, ñ vs n\u0303, का हिन्दी, ภาษาไทย",  # nothing is normalized
        "<|endoftext|> and <|im_start|>user",
    ],
)
def test_chosen_strings(small_tokenizer, text):
    ids = small_tokenizer(text)["input_ids"]
    assert small_tokenizer.decode(ids) == text
    assert small_tokenizer.batch_decode([ids]) == [text]


def test_digits_stay_in_short_groups(small_corpus):
    from tercet.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["2023 20231231 " * 500, *small_corpus], vocab_size=2048)
    pieces = [tokenizer.decode([index]) for index in tokenizer("20231231")["input_ids"]]
    assert pieces == ["202", "312", "31"]


def test_no_token_is_added(small_tokenizer):
    ids = small_tokenizer("hello")["input_ids"]
    assert ids == small_tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert not set(ids) & set(small_tokenizer.all_special_ids)
