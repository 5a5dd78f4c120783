"""Documents of sources too large to prepare, read from their shards as they come: an order with a weaker guarantee.

Prepared data has its order as a function; here it has a state, a small dict for each rank. What holds:

- In an epoch of a source the ranks together read every row of it once, and no row twice.
- A rank that goes on from its state at the same world size reads what it would have read: no row is lost or repeated.

What does not: an epoch's shards come in a permuted order, but the rows of a shard stay as they lie in it; going on with
another world size is refused; opening a shard again reads past the rows before the offset; ranks that hold unequal
shards pass into the next epoch at different times; what changes at its origin while it is read changes the order
unnoticed.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

from tercet.training.documents import DataError
from tercet.training.errors import UserError
from tercet.training.order import permuted

Row = Any
"""What a shard holds: of a streaming dataset a dict of its columns."""


class Shards(Protocol):
    """What is read: a streaming dataset of `datasets`, or anything else with shards whose rows come in one order."""

    @property
    def num_shards(self) -> int:
        """How many there are."""
        ...

    def shard(self, num_shards: int, index: int) -> Any:
        """One of them: its rows, and `skip(n)`, those behind n."""
        ...


@dataclass(frozen=True)
class Position:
    """How far this rank has read a source.

    Attributes:
        epoch: Epochs of the source before this one.
        shard: Shards of this epoch that this rank is done with.
        offset: Rows of the shard after them that it has passed, its own or another rank's.
        consumed: Size of all rows it has taken from the source.
    """

    epoch: int = 0
    shard: int = 0
    offset: int = 0
    consumed: int = 0


class StreamedRow(NamedTuple):
    """A row as it was read."""

    source: str
    epoch: int
    row: Row


def text_bytes(row: Row) -> int:
    """UTF-8 bytes of a row's text: what weights weigh unless told otherwise."""
    return len(str(row.get("text", "")).encode("utf-8", "surrogatepass"))


def shard_order(seed: int, epoch: int, name: str, num_shards: int) -> list[int]:
    """The shards of a source in the order in which an epoch has them, before they are divided among the ranks."""
    key = f"tercet stream {seed} {epoch} of {name}".encode("utf-8", "surrogateescape")
    return [permuted(index, num_shards, key) for index in range(num_shards)]


class StreamOrder:
    """One rank's rows of streaming datasets, without end; iterating goes on from where the state says.

    A source whose shards are as many as the ranks or more is divided by shards, each read by one rank only; one of
    fewer shards by rows, each rank reading all of it and keeping every world_size-th row. With several sources the next
    row is of the one that is furthest behind its weight, counted by `size` on this rank.
    """

    def __init__(
        self,
        sources: Mapping[str, Shards],
        *,
        seed: int,
        rank: int,
        world_size: int,
        weights: Mapping[str, float] | None = None,
        size: Callable[[Row], int] = text_bytes,
    ) -> None:
        """
        Args:
            sources: Streaming datasets by name, not shuffled and not split by rank: both are done here.
            seed: Of the order of shards.
            weights: Shares of the sources; None means equal ones.
            size: What weights weigh, such as the number of a row's tokens.

        Raises:
            ValueError: A rank outside of world_size, no source, or weights that are not one above 0 for each source.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in range(world_size), not {rank} with world_size {world_size}.")
        if not sources:
            raise ValueError("sources is empty: give at least one streaming dataset.")
        self.weights = dict(weights) if weights is not None else dict.fromkeys(sources, 1.0)
        if set(self.weights) != set(sources) or not all(weight > 0 for weight in self.weights.values()):
            raise ValueError(f"weights must be above 0, one for each of {sorted(sources)}, not {self.weights}.")
        self.sources, self.seed, self.rank, self.world_size, self.size = dict(sources), seed, rank, world_size, size
        self._positions = dict.fromkeys(self.sources, Position())

    def __iter__(self) -> Iterator[StreamedRow]:
        """Rows from where the state stands; the state has advanced past a row when it is handed out.

        Raises:
            DataError: A source that gives this rank no row in a whole epoch.
        """
        readers = {name: self._read(name) for name in self.sources}
        while True:
            name = min(self.sources, key=lambda name: self._positions[name].consumed / self.weights[name])
            position, row = next(readers[name])
            self._positions[name] = position
            yield StreamedRow(name, position.epoch, row)

    def positions(self) -> dict[str, Position]:
        """How far each source has been read."""
        return dict(self._positions)

    def state_dict(self, positions: Mapping[str, Position] | None = None) -> dict[str, Any]:
        """What `load_state_dict` of this rank goes on from: plain numbers, for JSON. Every rank keeps its own.

        Args:
            positions: Of an earlier moment; None is now.
        """
        places = self._positions if positions is None else positions
        return {**self._identity(), "positions": {name: asdict(place) for name, place in places.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last row that was read before `state_dict`; for iterators made from now on.

        Raises:
            UserError: The state of another rank, world size, seed, or of other sources, weights or numbers of shards.
        """
        for name, ours in self._identity().items():
            if (theirs := state.get(name)) != ours:
                raise UserError(
                    f"the state of the stream has {name} {json.dumps(theirs)}, this run {json.dumps(ours)}: a stream "
                    "goes on only as it began. Prepare the data to be free of this, or start anew"
                )
        self._positions = {name: Position(**place) for name, place in state["positions"].items()}

    def _identity(self) -> dict[str, Any]:
        shards = {name: dataset.num_shards for name, dataset in self.sources.items()}
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "seed": self.seed,
            "weights": self.weights,
            "num_shards": shards,
        }

    def _read(self, name: str) -> Iterator[tuple[Position, Row]]:
        """This rank's rows of one source through all epochs, each with the position behind it."""
        place, found = self._positions[name], True
        while True:
            shards = self._shards(name, place.epoch)
            while place.shard < len(shards):
                for row, is_ours in self._shard_rows(name, shards[place.shard], place.offset):
                    place = replace(place, offset=place.offset + 1)
                    if is_ours:
                        found = True
                        # An empty row counts, too, or a source of nothing else would be the next one for ever.
                        place = replace(place, consumed=place.consumed + max(self.size(row), 1))
                        yield place, row
                place = replace(place, shard=place.shard + 1, offset=0)
            if not found:
                raise DataError(
                    f"source {name} gives rank {self.rank} of {self.world_size} no row in a whole epoch. Use fewer "
                    "processes, or a source with more rows."
                )
            place, found = replace(place, epoch=place.epoch + 1, shard=0), False

    def _by_shards(self, name: str) -> bool:
        return self.sources[name].num_shards >= self.world_size

    def _shards(self, name: str, epoch: int) -> list[int]:
        """The shards that this rank reads in an epoch, in their order; permuted among all ranks alike."""
        order = shard_order(self.seed, epoch, name, self.sources[name].num_shards)
        return order[self.rank :: self.world_size] if self._by_shards(name) else order

    def _shard_rows(self, name: str, shard: int, offset: int) -> Iterator[tuple[Row, bool]]:
        """Rows of a shard behind the offset, and whether they are this rank's to keep."""
        dataset = self.sources[name]
        part = dataset.shard(num_shards=dataset.num_shards, index=shard)
        rows = part.skip(offset) if offset else part
        for index, row in enumerate(rows, start=offset):
            # Shards of unequal length would give the first ranks more rows, were each to begin with rank 0.
            yield row, self._by_shards(name) or (index + shard) % self.world_size == self.rank
