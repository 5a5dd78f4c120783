from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_tokens import EOS, PAD, NumberedTokens

from tercet.training.batches import PackedBatches, evaluation_windows
from tercet.training.documents import DataError
from tercet.training.packing import PackedDataset, pack

T = 16
DIVISIONS = [(1, 1), (1, 24), (2, 3), (3, 4), (4, 2), (8, 1), (8, 3)]  # world_size, per_device_batch_size


@pytest.fixture(scope="module")
def dataset() -> PackedDataset:
    lengths = np.random.default_rng(0).integers(1, 60, size=40).tolist()
    tokens = NumberedTokens(lengths)
    return PackedDataset(tokens, pack(tokens.document_lengths, T), eos_token_id=EOS, pad_token_id=PAD)


def all_ranks(dataset: PackedDataset, world_size: int, batch_size: int, *, seed: int = 5) -> list[PackedBatches]:
    settings = {"seed": seed, "global_batch_size": 24, "per_device_batch_size": batch_size, "world_size": world_size}
    return [PackedBatches(dataset, rank=rank, **settings) for rank in range(world_size)]


@pytest.mark.parametrize(("world_size", "batch_size"), DIVISIONS)
def test_the_union_over_ranks_is_the_same_set(dataset: PackedDataset, world_size: int, batch_size: int):
    (alone,) = all_ranks(dataset, 1, 24)
    for step in (0, 1, 7, 1000):
        expected = {tuple(row) for row in alone.micro_batches(step)[0]["input_ids"].tolist()}
        ranks = [batches.micro_batches(step) for batches in all_ranks(dataset, world_size, batch_size)]
        assert all(len(micro) == 24 // (world_size * batch_size) for micro in ranks)
        rows = [row for micro in ranks for batch in micro for row in batch["input_ids"].tolist()]
        assert len(rows) == 24
        assert {tuple(row) for row in rows} == expected


@pytest.mark.parametrize(("world_size", "batch_size"), DIVISIONS)
def test_every_stored_token_is_a_label_once_in_an_epoch(dataset: PackedDataset, world_size: int, batch_size: int):
    num_rows = len(dataset)
    ranks = all_ranks(dataset, world_size, batch_size)
    # As many epochs as steps of 24 rows end together with.
    epochs = 24 // int(np.gcd(24, num_rows))
    counts: dict[int, int] = {}
    for step in range(epochs * num_rows // 24):
        for batches in ranks:
            for batch in batches.micro_batches(step):
                for label in batch["shift_labels"].flatten().tolist():
                    counts[label] = counts.get(label, 0) + 1
    tokens = dataset.token_set
    expected = np.concatenate([tokens.tokens(d, 0, n) for d, n in enumerate(tokens.document_lengths)])
    counts.pop(-100, None)
    assert counts.pop(EOS) == epochs * len(tokens.document_lengths)
    assert counts == dict.fromkeys(expected[expected != EOS].tolist(), epochs)


def test_an_epoch_boundary_inside_a_step_repeats_and_skips_nothing(dataset: PackedDataset):
    (batches,) = all_ranks(dataset, 1, 24)
    num_rows = len(dataset)
    stream = np.concatenate([batches.rows(step).ravel() for step in range(3 * num_rows // 24 + 1)])
    orders = [stream[e * num_rows : (e + 1) * num_rows] for e in range(3)]
    assert all(np.array_equal(np.sort(order), np.arange(num_rows)) for order in orders)
    assert not any(np.array_equal(a, b) for a, b in pairwise(orders))


@settings(max_examples=10, deadline=None)
@given(start=st.integers(0, 50), ahead=st.integers(0, 4))
def test_going_on_from_any_step_gives_the_same_batches(dataset: PackedDataset, start: int, ahead: int):
    batches = all_ranks(dataset, 2, 4)[1]
    resumed = list(all_ranks(dataset, 2, 4)[1].steps(start, start + 5, ahead=ahead))
    assert len(resumed) == 5
    for step, micro in enumerate(resumed, start=start):
        for batch, expected in zip(micro, batches.micro_batches(step), strict=True):
            assert all(torch.equal(batch[name], expected[name]) for name in expected)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_workers_of_a_data_loader_change_nothing(dataset: PackedDataset, num_workers: int):
    (batches,) = all_ranks(dataset, 1, 8)
    rows = [micro.tolist() for step in range(3) for micro in batches.rows(step)]
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=rows, num_workers=num_workers, multiprocessing_context="fork" if num_workers else None
    )
    expected = [batch for step in range(3) for batch in batches.micro_batches(step)]
    for batch, ours in zip(loader, expected, strict=True):
        assert all(torch.equal(batch[name], ours[name]) for name in ours)


def test_bounds_of_documents_come_where_asked_for(dataset: PackedDataset):
    settings = {"seed": 5, "global_batch_size": 24, "per_device_batch_size": 12, "rank": 0, "world_size": 1}
    plain = PackedBatches(dataset, **settings).micro_batches(3)
    bounded = PackedBatches(dataset, **settings, with_document_bounds=True).micro_batches(3)
    for one, other in zip(plain, bounded, strict=True):
        assert other.keys() - one.keys() == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert other["cu_seq_lens_q"].tolist() == [*np.flatnonzero(one["position_ids"].flatten() == 0), 12 * T]


def test_a_row_in_pieces_is_the_row_and_each_is_of_the_document_it_names(dataset: PackedDataset):
    batches, tokens = all_ranks(dataset, 2, 4)[1], dataset.token_set
    assert isinstance(tokens, NumberedTokens)
    in_one_row = []
    for step in range(3):
        for row, pieces in zip(batches.rows(step).ravel().tolist(), batches.pieces(step), strict=True):
            for name, values in dataset.rows([row]).items():
                together = torch.cat([piece.batch[name] for piece in pieces], dim=1)
                assert torch.equal(together, values[:, : together.shape[1]])
            assert (dataset.rows([row])["shift_labels"][:, together.shape[1] :] == -100).all(), (
                "what is over is padding"
            )
            for piece in pieces:
                document = int(piece.document.split()[1])
                first, length = int(tokens.first[document]), int(tokens.document_lengths[document])
                labels = piece.batch["shift_labels"]
                assert all(first <= label < first + length for label in labels[labels > PAD].tolist())
                assert piece.start_ids[0] == tokens.tokens(document, 0, 1)[0]
            in_one_row.append(len(pieces))
    assert max(in_one_row) > 2


def test_an_abandoned_iteration_and_an_error_end_the_thread(dataset: PackedDataset, monkeypatch):
    (batches,) = all_ranks(dataset, 1, 24)
    steps = batches.steps(0, 10**9)
    next(steps)
    steps.close()

    def fail(_):
        raise OSError("gone")

    monkeypatch.setattr(batches, "micro_batches", fail)
    with pytest.raises(OSError, match="gone"):
        next(batches.steps(0, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_batch_size": 5}, r"global_batch_size \(24\) must be a multiple of per_device_batch_size \(5\)"),
        ({"world_size": 5}, r"times world_size \(5\)"),
        ({"rank": 1}, r"rank must be in range\(world_size\), not 1"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
    ],
)
def test_a_division_that_does_not_come_out_is_refused(dataset: PackedDataset, changes: dict, message: str):
    fields = {"seed": 0, "global_batch_size": 24, "per_device_batch_size": 4, "rank": 0, "world_size": 1}
    with pytest.raises(ValueError, match=message):
        PackedBatches(dataset, **{**fields, **changes})


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=20), st.integers(1, T), st.integers(1, 5))
def test_evaluation_scores_every_token_once_with_its_context(lengths: list[int], stride: int, batch_size: int):
    tokens = NumberedTokens(lengths)
    windows = evaluation_windows(tokens, T, stride, batch_size, eos_token_id=EOS, pad_token_id=PAD)
    everything = np.concatenate([tokens.tokens(d, 0, n) for d, n in enumerate(lengths)])
    place = {int(tokens.first[d]) + i: i for d, n in enumerate(lengths) for i in range(n)}
    scored: list[int] = []
    batches = list(windows)
    assert len(batches) == len(windows)
    for batch in batches:
        assert batch["input_ids"].shape[0] <= batch_size
        inputs, labels, positions = (batch[k].numpy() for k in ("input_ids", "shift_labels", "position_ids"))
        for row, at in np.argwhere(labels != -100):
            label, position = int(labels[row, at]), int(positions[row, at])
            scored.append(label)
            if label == EOS:
                continue
            assert inputs[row, at] == (label - 1 if place[label] else EOS)
            # Seen by the label: the inputs of its segment up to here.
            assert position >= min(place[label], T - stride)
    assert sorted(scored) == sorted(everything.tolist())


def test_evaluation_scores_of_a_conversation_what_training_learns():
    """Each label once; what the user says is context, there as here."""

    class Chats(NumberedTokens):
        def label_mask(self, document: int, start: int, stop: int) -> np.ndarray:
            return np.arange(start, stop) % 2 == 0

    tokens = Chats([5, 40])
    windows = evaluation_windows(tokens, T, 8, 2, eos_token_id=EOS, pad_token_id=PAD)
    labels = [label for batch in windows for label in batch["shift_labels"].flatten().tolist() if label != -100]
    learned = [
        int(token)
        for document, length in enumerate([5, 40])
        for token in tokens.tokens(document, 0, length)[tokens.label_mask(document, 0, length)]
    ]
    assert sorted(labels) == sorted(learned) and len(learned) == 23


def test_evaluation_refuses_what_it_cannot_do():
    tokens = NumberedTokens([5])
    with pytest.raises(ValueError, match="stride must be from 1 to sequence_length"):
        evaluation_windows(tokens, 4, 5, 1, eos_token_id=EOS, pad_token_id=PAD)
    with pytest.raises(DataError, match="validation split holds no token"):
        evaluation_windows(NumberedTokens([]), 4, 2, 1, eos_token_id=EOS, pad_token_id=PAD)
