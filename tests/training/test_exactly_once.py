"""Every document's tokens, exactly once in an epoch: through interruptions, changes of world size and epoch ends."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_tokens import EOS, PAD, NumberedTokens

from tercet.training.arrangement import Arrangement, arrange
from tercet.training.batches import PackedBatches
from tercet.training.documents import Document
from tercet.training.packing import PackedDataset
from tercet.training.shards import prepare

T, GLOBAL_BATCH_SIZE = 8, 24
WORLD_SIZES = [1, 2, 3, 8]
BATCH_SIZES = {1: [1, 8, 24], 2: [1, 4, 12], 3: [1, 2, 8], 8: [1, 3]}

DOCUMENTS = st.lists(st.integers(1, 3 * T), min_size=3, max_size=25).filter(lambda lengths: sum(lengths) >= T)


@st.composite
def lives(draw) -> list[tuple[int, int, int, int]]:
    """What a run lives through: world size, batch size, steps until it is killed, steps that its checkpoint keeps."""
    life = []
    for _ in range(draw(st.integers(1, 6))):
        world_size = draw(st.sampled_from(WORLD_SIZES))
        steps = draw(st.integers(0, 5))
        life.append((world_size, draw(st.sampled_from(BATCH_SIZES[world_size])), steps, draw(st.integers(0, steps))))
    return life


def one_step(
    dataset: PackedDataset, arrangement: Arrangement, step: int, world_size: int, batch_size: int, seed: int, warmup=()
):
    """A step's rows from all ranks, in the order of samples: each rank's process knows nothing but the step."""
    ranks = [
        PackedBatches(
            dataset, seed=seed, order=arrangement.order, global_batch_size=GLOBAL_BATCH_SIZE,
            per_device_batch_size=batch_size, rank=rank, world_size=world_size, warmup=warmup,
        ).micro_batches(step)
        for rank in range(world_size)
    ]  # fmt: skip
    return torch.stack([torch.stack([batch["shift_labels"] for batch in rank]) for rank in ranks], 1).reshape(-1, T)


def live(dataset, arrangement, life, num_steps: int, seed: int = 0, warmup=()) -> torch.Tensor:
    """Labels of the samples of num_steps steps as a run saw them that lived so and then ran on, (samples, T)."""
    kept: list[torch.Tensor] = []
    for world_size, batch_size, steps, saved in [*life, (1, GLOBAL_BATCH_SIZE, num_steps, num_steps)]:
        seen = [
            one_step(dataset, arrangement, step, world_size, batch_size, seed, warmup)
            for step in range(len(kept), min(len(kept) + steps, num_steps))
        ]
        kept += seen[:saved]  # the others are lost with the process, and come again
    return torch.cat(kept)


def labels_of(rows: torch.Tensor) -> list[int]:
    return sorted(rows[rows != -100].tolist())


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, lives(), st.sampled_from(["best_fit", "concatenate"]), st.integers(0, 3))
def test_each_epoch_holds_every_token_once(lengths, life, packing, seed):
    tokens = NumberedTokens(lengths)
    arrangement = arrange(tokens, T, packing=packing)
    dataset = PackedDataset(tokens, arrangement.packing, eos_token_id=EOS, pad_token_id=PAD)
    num_rows = len(dataset)
    num_epochs = 3
    samples = live(dataset, arrangement, life, math.ceil(num_epochs * num_rows / GLOBAL_BATCH_SIZE), seed)
    for epoch in range(num_epochs):
        assert labels_of(samples[epoch * num_rows : (epoch + 1) * num_rows]) == tokens.everything()


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, lives(), st.lists(st.integers(1, 4), max_size=3), st.integers(0, 3))
def test_batches_that_grow_hold_the_same_samples(lengths, life, lengths_of_stages, seed):
    """A warm-up of the batch size moves the bounds of steps, through any interruptions, and not a sample."""
    tokens = NumberedTokens(lengths)
    arrangement = arrange(tokens, T, packing="best_fit")
    dataset = PackedDataset(tokens, arrangement.packing, eos_token_id=EOS, pad_token_id=PAD)
    # Stages of 24, 48, 72 rows: multiples of every division's rows at once.
    ends = np.cumsum(lengths_of_stages).tolist()
    warmup = [(end, GLOBAL_BATCH_SIZE * (index + 1)) for index, end in enumerate(ends)]
    num_rows = len(dataset)
    num_steps = sum(lengths_of_stages) + math.ceil(2 * num_rows / GLOBAL_BATCH_SIZE)
    grown = live(dataset, arrangement, life, num_steps, seed, warmup)
    even = live(dataset, arrangement, [], math.ceil(len(grown) / GLOBAL_BATCH_SIZE), seed)
    assert torch.equal(grown, even[: len(grown)])
    for epoch in range(2):
        assert labels_of(grown[epoch * num_rows : (epoch + 1) * num_rows]) == tokens.everything()


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, DOCUMENTS, st.integers(1, 5), lives(), st.sampled_from(["best_fit", "concatenate"]))
def test_each_epoch_of_a_weighted_source_holds_every_token_of_it_once(first, second, weight, life, packing):
    tokens = NumberedTokens([*first, *second], [0] * len(first) + [1] * len(second))
    arrangement = arrange(tokens, T, packing=packing, weights={"source-0": weight, "source-1": 2.0})
    dataset = PackedDataset(tokens, arrangement.packing, eos_token_id=EOS, pad_token_id=PAD)
    sizes = np.diff(arrangement.order.row_bounds)
    enough = max(math.ceil(2 * size * (weight + 2) / w) + 2 for size, w in zip(sizes, (weight, 2), strict=True))
    samples = live(dataset, arrangement, life, math.ceil(enough / GLOBAL_BATCH_SIZE))
    sources, _ = arrangement.order.places(np.arange(len(samples)))
    for source, documents in ((0, range(len(first))), (1, range(len(first), len(first) + len(second)))):
        own = samples[torch.from_numpy(sources == source)]
        expected = sorted(t for d in documents for t in tokens.tokens(d, 0, int(tokens.document_lengths[d])).tolist())
        for epoch in range(2):
            assert labels_of(own[epoch * sizes[source] : (epoch + 1) * sizes[source]]) == expected


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_two_resumes_and_an_epoch_boundary(packing):
    """As above, by hand: stopped in the first epoch and again past its end, each time on another number of ranks."""
    tokens = NumberedTokens(np.random.default_rng(2).integers(1, 30, size=60).tolist())
    arrangement = arrange(tokens, T, packing=packing)
    dataset = PackedDataset(tokens, arrangement.packing, eos_token_id=EOS, pad_token_id=PAD)
    num_rows = len(dataset)
    per_epoch = num_rows / GLOBAL_BATCH_SIZE
    assert per_epoch > 3 and not per_epoch.is_integer()
    life = [(8, 3, 2, 2), (3, 4, math.ceil(per_epoch), math.ceil(per_epoch) - 1)]  # the second crosses the end
    samples = live(dataset, arrangement, life, math.ceil(3 * per_epoch))
    untouched = live(dataset, arrangement, [], math.ceil(3 * per_epoch))
    assert torch.equal(samples, untouched)
    for epoch in range(3):
        assert labels_of(samples[epoch * num_rows : (epoch + 1) * num_rows]) == tokens.everything()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_prepared_text_comes_out_whole(small_corpus, small_tokenizer, tmp_path, world_size, packing):
    """From text on disk to the labels of all ranks: the text of every document, and nothing else."""
    texts = [text[:700] for text in small_corpus[:20]]
    data = prepare(
        [Document(text, "topics") for text in texts], small_tokenizer, tmp_path, validation_fraction=0.0,
        split_by="document", drop_duplicates=False, progress=False,
    )  # fmt: skip
    eos, pad = small_tokenizer.eos_token_id, small_tokenizer.pad_token_id
    arrangement = arrange(data.train, T, packing=packing)
    dataset = PackedDataset(data.train, arrangement.packing, eos_token_id=eos, pad_token_id=pad)
    num_rows = len(dataset)
    samples = torch.cat(
        [
            one_step(dataset, arrangement, step, world_size, BATCH_SIZES[world_size][-1], 0)
            for step in range(math.ceil(num_rows / GLOBAL_BATCH_SIZE))
        ]
    )[:num_rows]
    # Rows back in their places, a document is what its pieces hold end to end.
    order = PackedBatches(
        dataset, seed=0, global_batch_size=num_rows, per_device_batch_size=num_rows, rank=0, world_size=1
    ).rows(0)[0]
    by_row = torch.empty_like(samples)
    by_row[torch.from_numpy(order)] = samples
    found: dict[int, list[tuple[int, list[int]]]] = {}
    packed = arrangement.packing
    for row in range(num_rows):
        at = 0
        for piece in range(packed.row_offsets[row], packed.row_offsets[row + 1]):
            length = int(packed.length[piece])
            labels = by_row[row, at : at + length].tolist()
            found.setdefault(int(packed.document[piece]), []).append((int(packed.start[piece]), labels))
            at += length
        assert (by_row[row, at:] == -100).all()
    decoded = []
    for pieces in found.values():
        ids = [token for _, labels in sorted(pieces) for token in labels]
        assert ids.index(eos) == len(ids) - 1
        decoded.append(small_tokenizer.decode(ids[:-1]))
    assert sorted(decoded) == sorted(texts)
