import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.training.documents import DataError, Document
from tercet.training.mixture import epochs_by_source, mixture_lines, tokens_by_source
from tercet.training.shards import prepare

TOKENS = {"web": 1_000_000, "books": 100_000}


def test_weights_are_shares_of_the_tokens_a_run_reads():
    epochs = epochs_by_source(TOKENS, {"web": 3, "books": 1}, 2_000_000)
    assert epochs == {"web": pytest.approx(1.5), "books": pytest.approx(5.0)}


def test_without_weights_every_token_is_read_equally_often():
    assert epochs_by_source(TOKENS, None, 2_200_000) == {"web": 2.0, "books": 2.0}


@given(
    tokens=st.lists(st.integers(1, 10**12), min_size=1, max_size=6),
    data=st.data(),
    total=st.integers(0, 10**13),
)
def test_what_the_sources_give_adds_up_to_the_run(tokens: list[int], data: st.DataObject, total: int):
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(tokens), max_size=len(tokens)))
    names = [str(i) for i in range(len(tokens))]
    for given_weights in (None, dict(zip(names, weights, strict=True))):
        epochs = epochs_by_source(dict(zip(names, tokens, strict=True)), given_weights, total)
        read = [epochs[name] * size for name, size in zip(names, tokens, strict=True)]
        assert sum(read) == pytest.approx(total)
        if given_weights and total:
            assert np.allclose(np.divide(read, total), np.divide(weights, sum(weights)))


def test_a_source_repeated_too_often_is_warned_about_and_no_other():
    lines = mixture_lines(TOKENS, {"web": 3, "books": 1}, 2_000_000)
    assert [" ".join(line.split()) for line in lines[:2]] == [
        "web 1,000,000 tokens 75.0% of the run 1.50 epochs",
        "books 100,000 tokens 25.0% of the run 5.00 epochs",
    ]
    (warning,) = lines[2:]
    assert warning.startswith("Warning: books is read 5.0 times over")
    assert "arXiv:2305.16264" in warning
    assert len(mixture_lines(TOKENS, {"web": 3, "books": 1}, 1_600_000)) == 2


@pytest.mark.parametrize(
    ("tokens", "weights", "message"),
    [
        ({"web": 0}, None, "holds no token"),
        ({"web": 5, "books": 0}, {"web": 1, "books": 1}, "books has a weight in the mixture, but no token"),
        ({"web": 5}, {"web": 1, "books": 1}, "books has a weight in the mixture, but no token"),
        ({"web": 5, "books": 5}, {"web": 1}, "holds books, which the mixture gives no weight"),
    ],
)
def test_a_mixture_that_cannot_be_read(tokens: dict[str, int], weights: dict[str, float] | None, message: str):
    with pytest.raises(DataError, match=message):
        epochs_by_source(tokens, weights, 100)


def test_tokens_are_counted_by_source(tmp_path, small_tokenizer, small_corpus):
    documents = [Document(text, "even" if i % 2 == 0 else "odd") for i, text in enumerate(small_corpus[:30])]
    train = prepare(
        documents, small_tokenizer, tmp_path, validation_fraction=0.2, split_by="document", drop_duplicates=True,
        progress=False,
    ).train  # fmt: skip
    counted = tokens_by_source(train)
    assert set(counted) == {"even", "odd"}
    assert sum(counted.values()) == train.num_tokens
    is_even = train.document_sources == train.sources.index("even")
    assert counted["even"] == train.document_lengths[is_even].sum()
