import json
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from tercet.training.errors import UserError
from tercet.training.packing import IGNORE_INDEX
from tercet.training.stream_batches import StreamBatches, StreamedTokens
from tercet.training.stream_order import StreamOrder

EOS, B, T = 0, 2, 8
LENGTHS = [[3, 40, 1], [7, 7, 7, 2], [30], [5, 16, 11, 1, 1, 9]]  # tokens of documents by shard, without end-of-text


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> datasets.IterableDataset:
    """Shards of documents in which every token has a number of its own."""
    folder: Path = tmp_path_factory.mktemp("stream")
    files, first = [], 2
    for shard, lengths in enumerate(LENGTHS):
        lines = []
        for length in lengths:
            lines.append(json.dumps({"text": " ".join(map(str, range(first, first + length)))}) + "\n")
            first += length
        files.append(str(folder / f"{shard}.jsonl"))
        Path(files[-1]).write_text("".join(lines))
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


def encode(row: dict) -> list[int]:
    return [int(word) for word in row["text"].split()]


def batches_of(stream, rank: int = 0, world_size: int = 1, encode=encode) -> StreamBatches:
    order = StreamOrder({"s": stream}, seed=1, rank=rank, world_size=world_size)
    return StreamBatches(order, encode, sequence_length=T, per_device_batch_size=B, eos_token_id=EOS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_labels_are_the_documents_of_the_ranks_one_behind_the_other(stream, world_size):
    everything = []
    for rank in range(world_size):
        documents = []
        for item in StreamOrder({"s": stream}, seed=1, rank=rank, world_size=world_size):
            if item.epoch > 0:
                break
            documents.append([*encode(item.row), EOS])
        expected = [token for document in documents for token in document]
        batches = list(islice(batches_of(stream, rank, world_size), len(expected) // (B * T)))
        labels = torch.cat([batch["shift_labels"].flatten() for batch in batches]).tolist()
        assert labels == expected[: len(labels)] and len(expected) - len(labels) < B * T
        inputs = torch.cat([batch["input_ids"].flatten() for batch in batches]).tolist()
        assert inputs == [EOS, *labels[:-1]]  # what is read is the token before, and behind an end of text it is that
        positions = torch.cat([batch["position_ids"] for batch in batches])
        ends = np.flatnonzero(np.array([EOS, *labels[:-1]]) == EOS)
        assert np.flatnonzero(positions.flatten() == 0).tolist() == sorted({*range(0, len(labels), T), *ends.tolist()})
        assert ((positions[:, 1:] - positions[:, :-1] == 1) | (positions[:, 1:] == 0)).all()
        everything += expected
    assert sorted(token for token in everything if token != EOS) == list(range(2, 2 + sum(map(sum, LENGTHS))))


@pytest.mark.parametrize("world_size", [1, 2])
def test_going_on_gives_the_batches_that_would_have_come(stream, world_size):
    """From every batch on, over the end of an epoch, with a document that spans several batches."""
    for rank in range(world_size):
        whole = [batch["shift_labels"] for batch in islice(batches_of(stream, rank, world_size), 25)]
        for stop in range(20):
            first = batches_of(stream, rank, world_size)
            for _ in islice(first, stop):
                pass
            again = batches_of(stream, rank, world_size)
            again.load_state_dict(json.loads(json.dumps(first.state_dict())))
            for expected, batch in zip(whole[stop:], islice(again, 3), strict=False):
                assert torch.equal(batch["shift_labels"], expected)


def test_a_document_that_has_shrunk_is_noticed(stream):
    first = batches_of(stream)
    state = next(state for _, state in ((batch, first.state_dict()) for batch in first) if state["tokens"] > 3)
    shorter = batches_of(stream, encode=lambda row: encode(row)[:1])
    shorter.load_state_dict(state)
    with pytest.raises(UserError, match="document of 2 tokens of which"):
        next(iter(shorter))


def test_a_state_of_another_world_size_is_refused(stream):
    with pytest.raises(UserError, match="world_size 1, this run 2"):
        batches_of(stream, 0, 2).load_state_dict(batches_of(stream).state_dict())


def test_of_a_conversation_the_answers_are_labels_and_its_end_is_none(stream):
    """As in prepared data: the end of text behind a conversation is the template's matter, not the model's."""

    def answers(row: dict) -> StreamedTokens:
        ids = encode(row)
        return StreamedTokens(ids, [token % 2 == 1 for token in ids])

    for plain, batch in islice(zip(batches_of(stream), batches_of(stream, encode=answers), strict=False), 20):
        assert torch.equal(batch["input_ids"], plain["input_ids"])
        labels = plain["shift_labels"]
        assert torch.equal(batch["shift_labels"], torch.where(labels % 2 == 1, labels, IGNORE_INDEX))


def test_the_documents_of_a_batch_are_those_of_its_pieces(stream):
    batches = batches_of(stream)
    for batch in islice(batches, 20):
        labels, positions = batch["shift_labels"].flatten(), batch["position_ids"].flatten()
        pieces = torch.tensor_split(labels, torch.nonzero(positions == 0).flatten()[1:])
        assert len(pieces) == len(batches.documents)
        for piece, document in zip(pieces, batches.documents, strict=True):
            assert set(piece.tolist()) <= {*encode(document.row), EOS}


def test_a_document_that_ends_with_a_batch_has_ended(stream):
    """Fifteen tokens and the end of text fill a batch each time."""
    ended = []
    batches = batches_of(stream, encode=lambda row: list(range(1, 16)))
    batches.on_end = lambda item: ended.append(item.row["text"])
    handed_out = []
    for _ in islice(batches, 30):
        (first, second) = batches.documents
        assert first is second
        handed_out.append(first.row["text"])
    # Of the last one the batches do not know before they are asked for more.
    assert ended == handed_out[:-1]
