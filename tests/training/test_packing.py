import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_tokens import EOS, PAD, NumberedTokens

from tercet.training.documents import DataError
from tercet.training.packing import (
    MAX_PADDING_FRACTION,
    PackedDataset,
    Packing,
    best_fit_rows,
    concatenate,
    document_bounds,
    pack,
)


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


@settings(max_examples=200)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=80), st.integers(1, 32))
def test_concatenation_is_the_stream_of_documents_cut_into_rows(lengths: list[int], sequence_length: int):
    if sum(lengths) < sequence_length:
        with pytest.raises(DataError, match=rf"{sum(lengths)} tokens, fewer than one row of {sequence_length}"):
            concatenate(np.array(lengths), sequence_length)
        return
    packing = concatenate(np.array(lengths), sequence_length)
    stream = [(document, position) for document, length in enumerate(lengths) for position in range(length)]
    laid = [
        (document, position)
        for document, start, length in zip(packing.document, packing.start, packing.length, strict=True)
        for position in range(start, start + length)
    ]
    assert laid == stream
    filled = np.add.reduceat(packing.length, packing.row_offsets[:-1])
    assert (filled[:-1] == sequence_length).all()
    assert 0 < filled[-1] <= sequence_length


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


def test_it_is_deterministic():
    lengths = np.clip(np.random.default_rng(1).lognormal(5.5, 1.0, 200_000), 1, None).astype(np.int64)
    first, second = pack(lengths, 1024), pack(lengths, 1024)
    for name in ("row_offsets", "document", "start", "length"):
        assert np.array_equal(getattr(first, name), getattr(second, name))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=30), st.sampled_from([pack, concatenate]))
def test_rows_hold_documents_that_start_with_end_of_text(lengths: list[int], pack_documents):
    T = 16
    lengths = [T, *lengths]
    tokens = NumberedTokens(lengths)
    packing = pack_documents(tokens.document_lengths, T)
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


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=30), st.sampled_from([pack, concatenate]))
def test_bounds_for_varlen_attention_are_those_of_the_pieces(lengths: list[int], pack_documents):
    T = 16
    lengths = [T, *lengths]
    packing = pack_documents(np.array(lengths), T)
    dataset = PackedDataset(NumberedTokens(lengths), packing, eos_token_id=EOS, pad_token_id=PAD)
    indexes = [packing.num_rows - 1, 0, packing.num_rows // 2]
    bounds = document_bounds(dataset.rows(indexes)["position_ids"])
    expected = []
    for row in indexes:
        pieces = packing.length[packing.row_offsets[row] : packing.row_offsets[row + 1]].tolist()
        expected += pieces + ([T - sum(pieces)] if sum(pieces) < T else [])  # padding is a piece as well
    assert bounds["cu_seq_lens_q"].dtype == bounds["cu_seq_lens_k"].dtype == torch.int32
    assert bounds["cu_seq_lens_q"].tolist() == bounds["cu_seq_lens_k"].tolist() == [0, *np.cumsum(expected).tolist()]
    assert bounds["max_length_q"] == bounds["max_length_k"] == max(expected)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=30), st.sampled_from([pack, concatenate]), st.integers(0, 9))
def test_what_a_document_gives_as_context_is_no_label(lengths: list[int], pack_documents, seed: int):
    """A chat document: only some of its tokens are labels, whatever row they fall into; inputs stay whole."""
    masks = {d: np.random.default_rng([seed, d]).random(n) < 0.5 for d, n in enumerate([16, *lengths]) if d % 3}

    class Chats(NumberedTokens):
        def label_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
            return masks[document][start:stop] if document in masks else None

    packing = pack_documents(np.array([16, *lengths]), 16)
    plain, chats = (
        PackedDataset(kind([16, *lengths]), packing, eos_token_id=EOS, pad_token_id=PAD).rows(range(packing.num_rows))
        for kind in (NumberedTokens, Chats)
    )
    assert torch.equal(plain["input_ids"], chats["input_ids"])
    tokens = NumberedTokens([16, *lengths])
    expected = sorted(
        token
        for d, n in enumerate(tokens.document_lengths)
        for token in tokens.tokens(d, 0, n)[masks.get(d, np.ones(n, bool))].tolist()
    )
    labels = chats["shift_labels"]
    assert sorted(labels[labels != -100].tolist()) == expected
    assert torch.equal(labels[labels != -100], plain["shift_labels"][labels != -100])


def test_a_row_that_is_not_there():
    dataset = PackedDataset(NumberedTokens([8]), pack(np.array([8]), 4), eos_token_id=EOS, pad_token_id=PAD)
    assert len(list(dataset)) == 2  # iteration ends by IndexError
    with pytest.raises(IndexError):
        dataset.row(-1)


def test_the_longest_piece_may_be_the_last_one():
    bounds = document_bounds(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]))
    assert bounds["cu_seq_lens_q"].tolist() == [0, 3, 5, 10]
    assert bounds["max_length_q"] == bounds["max_length_k"] == 5
