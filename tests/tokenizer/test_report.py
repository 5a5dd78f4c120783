"""What the report says of a tokenizer is what can be counted by hand."""

import json

import pytest

from tercet.tokenizer import ReportText, bytes_per_token, make_report, train_tokenizer
from tercet.tokenizer.report import longest_tokens, readable

ENGLISH = ["the cat sat on the mat, the cat sat", "the mat"]
CODE = ["def f(x):\n    return x\n"]


@pytest.fixture
def text():
    with ReportText() as text:
        for document in ENGLISH:
            text.add(document, "english")
        text.add(CODE[0], "code")
        text.add("", "nothing")
        yield text


def test_figures_of_each_source(text, small_tokenizer):
    other = train_tokenizer(ENGLISH * 3, 262)
    report = make_report({"ours": small_tokenizer, "other": other}, text, held_out=True)
    assert list(report.sources) == ["english", "code"]
    for source, documents in (("english", ENGLISH), ("code", CODE)):
        figures = report.sources[source]
        assert figures.num_documents == len(documents)
        assert figures.num_bytes == len("".join(documents))
        assert figures.bytes_per_token("ours") == pytest.approx(bytes_per_token(small_tokenizer, documents))
        assert figures.bytes_per_token("other") == pytest.approx(bytes_per_token(other, documents))
    assert report.sources["english"].num_words == 12  # nine words and a comma, then two
    num_tokens = sum(len(small_tokenizer.tokenize(document)) for document in ENGLISH)
    assert report.sources["english"].fertility("ours") == num_tokens / 12
    assert report.total.num_bytes == len("".join(ENGLISH + CODE))
    assert report.tokenizers == {"ours": 1024, "other": 262}
    content = json.loads(json.dumps(report.to_dict()))
    assert content["sources"]["code"]["bytes_per_token"]["other"] == pytest.approx(bytes_per_token(other, CODE), 1e-3)


def test_tokens_that_never_come_up(text):
    tokenizer = train_tokenizer(["the cat zebra zebra zebra the cat"], 270)
    report = make_report({"ours": tokenizer}, text, held_out=False)
    unused = {tokenizer.decode([index]) for index in report.unused_tokens}
    assert " zebra" in unused
    assert not unused & {"the", " cat", "x", "(", "<|endoftext|>"}


def test_longest_tokens_are_readable():
    tokenizer = train_tokenizer(["international" * 2 + " 人工智能" * 9 + "\n" + " " * 40] * 5, 285)
    longest = longest_tokens(tokenizer, 5)
    assert len(longest[0].encode()) >= len(longest[-1].encode()) > 1
    assert all("\ufffd" not in token for token in longest_tokens(tokenizer, 400))
    assert readable(" the\n") == "␣the\\n"
    assert readable(" " * 12 + "x") == "␣{12}x"
    assert readable("\x00é中") == "\\x00é中"


def test_no_text_is_an_error(small_tokenizer):
    with ReportText() as text:
        text.add("", "nothing")
        with pytest.raises(ValueError, match="every document is empty"):
            make_report({"ours": small_tokenizer}, text, held_out=True)


def test_very_many_sources_share_one_line(small_tokenizer):
    with ReportText() as text:
        for number in range(200):
            text.add(f"text {number}", f"source {number}")
        report = make_report({"ours": small_tokenizer}, text, held_out=True)
    assert len(report.sources) == 65
    assert report.sources["(others)"].num_documents == 200 - 64
