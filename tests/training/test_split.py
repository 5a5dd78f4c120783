import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.training.split import document_digest, is_validation, part_of, split_tail

plain_text = st.text(st.characters(exclude_categories=["Cs"]))


def test_the_fraction_is_met_and_a_larger_one_keeps_what_a_smaller_one_chose():
    texts = [f"document {i}" for i in range(20_000)]
    small = {text for text in texts if is_validation(text, 0.05)}
    large = {text for text in texts if is_validation(text, 0.2)}
    assert 0.04 < len(small) / len(texts) < 0.06
    assert 0.19 < len(large) / len(texts) < 0.21
    assert small < large


def test_the_hash_is_the_same_on_every_machine():
    assert document_digest("terza rima").hex() == "08e41a4f5e754be26769772ce2a79e07"
    assert not any(is_validation(f"{i}", 0.0) for i in range(100))


@given(plain_text, st.floats(0, 0.99))
def test_the_tail_loses_nothing(text: str, fraction: float):
    head, tail = split_tail(text, fraction)
    assert head + tail == text
    assert abs(len(tail) - fraction * len(text)) <= 1


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float):
    with pytest.raises(ValueError, match="validation_fraction"):
        split_tail("text", fraction)


def test_parts_are_even_and_each_has_its_share_of_both_splits():
    texts = [f"document {i}" for i in range(20_000)]
    for num_parts in (2, 3, 16):
        parts = [part_of(document_digest(text), num_parts) for text in texts]
        held_out = [is_validation(text, 0.1) for text in texts]
        for number in range(num_parts):
            mine = [held for held, part in zip(held_out, parts, strict=True) if part == number]
            assert len(mine) == pytest.approx(20_000 / num_parts, rel=0.12)
            assert sum(mine) / len(mine) == pytest.approx(0.1, abs=0.03)
