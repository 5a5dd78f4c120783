"""Streams of local JSONL shards through `datasets`: the set over ranks, and going on from a state."""

import json
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.training.documents import DataError
from tercet.training.errors import UserError
from tercet.training.stream_order import StreamOrder


@pytest.fixture(scope="module")
def make_stream(tmp_path_factory):
    """A streaming dataset of shards of the given numbers of rows; a row's text is unique."""

    def make(name: str, sizes: list[int]) -> datasets.IterableDataset:
        folder: Path = tmp_path_factory.mktemp(name)
        files = []
        for shard, size in enumerate(sizes):
            files.append(str(folder / f"{shard:02d}.jsonl"))
            lines = (json.dumps({"text": f"{name} {shard} {row}"}) + "\n" for row in range(size))
            Path(files[-1]).write_text("".join(lines))
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        assert stream.num_shards == len(sizes)
        return stream

    return make


@pytest.fixture(scope="module")
def many(make_stream) -> datasets.IterableDataset:
    return make_stream("many", [3, 1, 4, 1, 5, 9, 2, 6, 5])


@pytest.fixture(scope="module")
def few(make_stream) -> datasets.IterableDataset:
    return make_stream("few", [7, 4])


def rows_of_epoch(order: StreamOrder, epoch: int) -> list[str]:
    rows = []
    for item in order:
        if item.epoch > epoch:
            return rows
        if item.epoch == epoch:
            rows.append(item.row["text"])
    raise AssertionError("a stream has no end")


def texts(stream: datasets.IterableDataset) -> list[str]:
    return sorted(row["text"] for row in stream)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("which", ["many", "few"])  # more shards than ranks, and fewer: by shards, and by rows
def test_the_union_over_ranks_is_the_set(request, which: str, world_size: int):
    stream = request.getfixturevalue(which)
    if (which, world_size) == ("few", 8):
        world_size = 5  # of 11 rows every rank finds some
    for epoch in (0, 1):
        ranks = [
            rows_of_epoch(StreamOrder({"s": stream}, seed=4, rank=rank, world_size=world_size), epoch)
            for rank in range(world_size)
        ]
        assert all(ranks)
        assert sorted(text for rank in ranks for text in rank) == texts(stream)


def test_shards_come_in_another_order_in_another_epoch_and_by_another_seed(many):
    orders = [
        rows_of_epoch(StreamOrder({"s": many}, seed=seed, rank=0, world_size=1), epoch)
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("which", ["many", "few"])
def test_going_on_repeats_and_skips_nothing(request, which: str, world_size: int):
    """Stopped after any number of rows, within an epoch and over its end, and again soon after."""
    stream = request.getfixturevalue(which)

    def make(rank: int) -> StreamOrder:
        return StreamOrder({"s": stream}, seed=2, rank=rank, world_size=world_size)

    for rank in range(world_size):
        whole = [item.row["text"] for item in islice(make(rank), 40)]
        for stop in (0, 1, 5, 13, 37):
            first = make(rank)
            seen = [item.row["text"] for item in islice(first, stop)]
            for _ in range(2):
                state = json.loads(json.dumps(first.state_dict()))
                first = make(rank)
                first.load_state_dict(state)
                seen += [item.row["text"] for item in islice(first, 1)]
            assert seen == whole[: stop + 2]


class NumberedRows(NamedTuple):
    """Rows of a shard, or those behind some, each a pair of numbers."""

    shard: int
    rows: range

    def skip(self, n: int) -> "NumberedRows":
        return NumberedRows(self.shard, self.rows[n:])

    def __iter__(self):
        return ((self.shard, row) for row in self.rows)


class NumberedShards(NamedTuple):
    """Shards of the given numbers of rows."""

    sizes: list[int]

    @property
    def num_shards(self) -> int:
        return len(self.sizes)

    def shard(self, num_shards: int, index: int) -> NumberedRows:
        assert num_shards == len(self.sizes)
        return NumberedRows(index, range(self.sizes[index]))


LIVES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(0, 5),
    st.lists(LIVES, min_size=8, max_size=8),
)
def test_in_every_epoch_the_ranks_have_every_row_once_whatever_is_interrupted(sizes, world_size, seed, lives):
    """In each life a rank reads some rows behind its state, which are lost with it, having kept those before."""
    if len(sizes) < world_size:
        sizes = [*sizes[:-1], sizes[-1] + world_size]  # enough for each to find a row
    everything = sorted((shard, row) for shard, size in enumerate(sizes) for row in range(size))
    had: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    for rank in range(world_size):

        def rank_from(state, rank=rank) -> StreamOrder:
            shards = {"s": NumberedShards(sizes)}
            order = StreamOrder(shards, seed=seed, rank=rank, world_size=world_size, size=lambda row: 1)
            if state is not None:
                order.load_state_dict(json.loads(json.dumps(state)))
            return order

        state, kept = None, []
        for num_kept, num_lost in lives[rank]:
            order = rank_from(state)
            rows = iter(order)
            kept += islice(rows, num_kept)
            state = order.state_dict()
            for _ in islice(rows, num_lost):
                pass
        for item in rank_from(state):
            if item.epoch > 2:
                break
            kept.append(item)
        for item in kept:
            if item.epoch <= 2:
                had[item.epoch].append(item.row)
    assert all(sorted(rows) == everything for rows in had.values())


def test_sources_take_turns_by_their_weights_and_go_on_so(many, few):
    def make() -> StreamOrder:
        return StreamOrder(
            {"many": many, "few": few}, seed=0, rank=0, world_size=1, weights={"many": 3, "few": 1}, size=lambda row: 1
        )

    whole = [(item.source, item.epoch, item.row["text"]) for item in islice(make(), 100)]
    for length in range(1, 101):
        assert abs(sum(source == "few" for source, _, _ in whole[:length]) - length / 4) <= 1
    assert {epoch for source, epoch, _ in whole if source == "many"} == {0, 1, 2}
    first = make()
    for _ in islice(first, 61):
        pass
    again = make()
    again.load_state_dict(first.state_dict())
    assert [(item.source, item.epoch, item.row["text"]) for item in islice(again, 39)] == whole[61:]


def test_weights_weigh_bytes_unless_told_otherwise(make_stream):
    short, long = make_stream("s", [40]), make_stream("l" * 80, [40])
    order = StreamOrder({"short": short, "long": long}, seed=0, rank=0, world_size=1)
    drawn = list(islice(order, 400))
    sizes = {name: sum(len(i.row["text"]) for i in drawn if i.source == name) for name in ("short", "long")}
    assert sizes["short"] / sizes["long"] == pytest.approx(1, abs=0.05)
    assert sum(item.source == "short" for item in drawn) > 350


def test_a_state_of_something_else_is_refused(many, few):
    def make(sources=None, **changes) -> StreamOrder:
        return StreamOrder(sources or {"s": many}, **{"seed": 0, "rank": 0, "world_size": 2, **changes})

    state = make().state_dict()
    for other, named in (
        (make(world_size=3), "world_size 2, this run 3"),
        (make(rank=1), "rank 0, this run 1"),
        (make(seed=9), "seed 0, this run 9"),
        (make({"s": few}), "num_shards"),
        (make({"t": many}), "weights"),
    ):
        with pytest.raises(UserError, match=named):
            other.load_state_dict(state)


def test_a_rank_that_finds_nothing_says_so(make_stream):
    tiny = make_stream("tiny", [2])
    with pytest.raises(DataError, match="source s gives rank 2 of 3 no row in a whole epoch"):
        next(iter(StreamOrder({"s": tiny}, seed=0, rank=2, world_size=3)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "rank must be in range"),
        ({"weights": {"s": 0}}, "weights must be above 0"),
        ({"weights": {"t": 1}}, "one for each of"),
        ({"sources": {}}, "at least one streaming dataset"),
    ],
)
def test_arguments_without_meaning_are_refused(many, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        StreamOrder(**{"sources": {"s": many}, "seed": 0, "rank": 0, "world_size": 2, **changes})


class Shards:
    """Shards in memory, with as much of a streaming dataset as an order asks of one; notes which are opened."""

    def __init__(self, *shards: list[dict]) -> None:
        self.shards, self.opened = shards, []

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> "Rows":
        assert num_shards == self.num_shards
        self.opened.append(index)
        return Rows(self.shards[index])


class Rows(list):
    def skip(self, n: int) -> "Rows":
        return Rows(self[n:])


def test_of_as_many_shards_as_ranks_each_rank_opens_its_own_alone():
    opened = []
    for rank in range(3):
        source = Shards(*([{"text": f"{shard} {row}"} for row in range(4)] for shard in range(3)))
        list(islice(StreamOrder({"s": source}, seed=1, rank=rank, world_size=3), 4))
        opened.append(source.opened)
    assert sorted(opened) == [[0], [1], [2]]


def test_a_source_of_empty_rows_does_not_hold_up_the_others():
    sources = {"empty": Shards([{"text": ""}] * 2), "full": Shards([{"text": "x"}] * 2)}
    names = [row.source for row in islice(StreamOrder(sources, seed=1, rank=0, world_size=1), 8)]
    assert names.count("empty") == names.count("full") == 4
