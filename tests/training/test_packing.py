import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.training.documents import DataError
from tercet.training.packing import MAX_PADDING_FRACTION, PackedDataset, Packing, best_fit_rows, pack

EOS, PAD = 0, 1


class NumberedTokens:
    """A token set whose every token has a number of its own, but for the end-of-text tokens."""

    def __init__(self, lengths: list[int]) -> None:
        self.document_lengths = np.array(lengths, dtype=np.int64)
        self.first = 2 + np.cumsum(self.document_lengths) - self.document_lengths

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.document_lengths[document]
        tokens = self.first[document] + np.arange(start, stop)
        return np.where(np.arange(start, stop) == self.document_lengths[document] - 1, EOS, tokens)


def covered(packing: Packing, lengths: list[int]) -> list[np.ndarray]:
    counts = [np.zeros(length, dtype=int) for length in lengths]
    for document, start, length in zip(packing.document, packing.start, packing.length, strict=True):
        assert length > 0
        counts[document][start : start + length] += 1
    return counts


@settings(max_examples=200)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=80), st.integers(1, 32))
def test_every_token_stands_in_one_row_and_padding_is_small(lengths: list[int], sequence_length: int):
    if sum(lengths) < sequence_length:
        with pytest.raises(DataError, match=rf"{sum(lengths)} tokens, fewer than one row of {sequence_length}"):
            pack(np.array(lengths), sequence_length)
        return
    packing = pack(np.array(lengths), sequence_length)
    assert all((count == 1).all() for count in covered(packing, lengths))
    filled = np.add.reduceat(packing.length, packing.row_offsets[:-1])
    assert filled.max() <= sequence_length
    assert packing.num_tokens == sum(lengths)
    padding = packing.num_rows * sequence_length - packing.num_tokens
    assert padding <= MAX_PADDING_FRACTION * packing.num_rows * sequence_length or padding < sequence_length
    assert packing.padding_fraction == pytest.approx(padding / (packing.num_rows * sequence_length))


@settings(max_examples=100)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
def test_best_fit_is_what_the_plain_algorithm_gives(lengths: list[int], sequence_length: int):
    used: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, u in enumerate(used) if u + length <= sequence_length]
        if fitting:
            used[max(fitting, key=lambda i: used[i])] += length
        else:
            used.append(length)
    rows = best_fit_rows(np.array(lengths), sequence_length)
    assert sorted(np.bincount(rows, weights=lengths).astype(int).tolist()) == sorted(used)


def test_short_documents_stay_whole_where_padding_allows():
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 100, size=5000)
    packing = pack(lengths, 256)
    assert len(packing.document) == len(lengths)
    assert packing.padding_fraction < MAX_PADDING_FRACTION


def test_documents_that_fit_badly_are_cut_only_as_far_as_needed():
    lengths = np.full(1000, 60)  # one to a row of 100 leaves 40 % empty
    packing = pack(lengths, 100)
    assert packing.padding_fraction <= MAX_PADDING_FRACTION
    assert len(packing.document) < 1500


def test_it_is_deterministic_and_fast():
    lengths = np.clip(np.random.default_rng(1).lognormal(5.5, 1.0, 200_000), 1, None).astype(np.int64)
    start = time.perf_counter()
    first = pack(lengths, 1024)
    assert time.perf_counter() - start < 5
    second = pack(lengths, 1024)
    for name in ("row_offsets", "document", "start", "length"):
        assert np.array_equal(getattr(first, name), getattr(second, name))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=30))
def test_rows_hold_documents_that_start_with_end_of_text(lengths: list[int]):
    T = 16
    lengths = [T, *lengths]
    tokens = NumberedTokens(lengths)
    packing = pack(tokens.document_lengths, T)
    dataset = PackedDataset(tokens, packing, eos_token_id=EOS, pad_token_id=PAD)
    labels: list[int] = []
    for i in range(len(dataset)):
        row = dataset.row(i)
        assert {(t.dtype, t.shape) for t in row.values()} == {(torch.int64, (T,))}
        inputs, shifted, positions = (row[k].numpy() for k in ("input_ids", "shift_labels", "position_ids"))
        real = shifted != -100
        labels += shifted[real].tolist()
        assert (inputs[~real] == PAD).all()
        assert positions[0] == 0
        assert ((np.diff(positions) == 1) | (positions[1:] == 0)).all()
        if not real.all():  # padding is one segment of its own, at the end
            assert positions[real.sum()] == 0
            assert not real[real.sum() :].any()
        piece_starts = np.flatnonzero((positions == 0) & real)
        bounds = slice(packing.row_offsets[i], packing.row_offsets[i + 1])
        assert len(piece_starts) == len(packing.document[bounds])
        for at, document, start, length in zip(
            piece_starts, packing.document[bounds], packing.start[bounds], packing.length[bounds], strict=True
        ):
            whole = tokens.tokens(document, 0, lengths[document])
            shifted_whole = np.concatenate([[EOS], whole[:-1]])
            assert inputs[at : at + length].tolist() == shifted_whole[start : start + length].tolist()
            assert shifted[at : at + length].tolist() == whole[start : start + length].tolist()
    everything = np.concatenate([tokens.tokens(d, 0, n) for d, n in enumerate(lengths)])
    assert sorted(labels) == sorted(everything.tolist())


def test_a_row_that_is_not_there():
    dataset = PackedDataset(NumberedTokens([8]), pack(np.array([8]), 4), eos_token_id=EOS, pad_token_id=PAD)
    assert len(list(dataset)) == 2  # iteration ends by IndexError
    with pytest.raises(IndexError):
        dataset.row(-1)
