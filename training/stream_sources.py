"""The recipe's sources as shards whose rows are read as they come: a file here, or a shard of a Hub dataset.

Rows are those that `tercet data prepare` would read, with the same numbers. A dataset of the Hub is held to the commit
that it had when the run began, so that a run goes on in the same rows whatever is pushed meanwhile.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

from tercet.training.corpus import PYTHON_DOCS
from tercet.training.documents import DataError
from tercet.training.hub_sources import HubDataset, load_split, only_columns, reading_failed, tried_again
from tercet.training.rows import Rows
from tercet.training.source import Source, local_paths
from tercet.training.sources import file_rows, python_docs_rows
from tercet.training.stream_files import StreamFile, identity_of, look_at


class SourceRow(NamedTuple):
    """A row as it was read.

    Attributes:
        source: Label of its source.
        number: Under which a user finds it, in the file or in the shard.
        row: What it holds; an error where it cannot be read.
        rows: Of what kind it is and where; none of them is in it.
    """

    source: str
    number: int
    row: Any
    rows: Rows

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return self.rows.place(self.number)


@dataclass(frozen=True)
class Origin:
    """What a source was when a run began: if any of it changes, the run's order would.

    Attributes:
        source: What the recipe says of where it lies: path, configuration, split and revision.
        num_shards: Files, or the shards of a Hub dataset.
        commit: Of a Hub dataset; None for files.
        files: Stands for the names and contents of files (`stream_files`); None for a Hub dataset.
    """

    source: tuple[str | None, ...]
    num_shards: int
    commit: str | None = None
    files: str | None = None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """What `asdict` made, read back from JSON."""
        return cls(**{**fields, "source": tuple(fields["source"])})


class SourceShards(Protocol):
    """A source by its shards; in turn what `StreamOrder` reads."""

    origin: Origin
    files: tuple[StreamFile, ...]

    @property
    def num_shards(self) -> int:
        """How many there are."""
        ...

    def shard(self, num_shards: int, index: int) -> "ShardRows":
        """One of them; `num_shards` is all of them."""
        ...


class ShardRows(Protocol):
    """The rows of a shard, from the first or behind some."""

    def skip(self, n: int, /) -> "ShardRows":
        """Those behind n more."""
        ...

    def __iter__(self) -> Iterator[SourceRow]:
        """One at a time, as they are read."""
        ...


def open_source(source: Source, begun: Origin | None = None, begun_files: Sequence[StreamFile] = ()) -> SourceShards:
    """Find a source's shards; none is opened yet.

    Args:
        begun: What it was when the run began, if it has; a Hub dataset is opened at that commit.
        begun_files: Its files as they were then.

    Raises:
        DataError: There is no such source, or the Hub does not give it.
    """
    if source.path == PYTHON_DOCS or not source.is_on_hub():
        return _Files(source, begun_files)
    place = _place(source)
    return _HubShards(source, begun.commit if begun is not None and begun.source == place else None)


def _place(source: Source) -> tuple[str | None, ...]:
    return (source.path, source.name, source.split, source.revision)


class _Files:
    """Local files, each a shard."""

    def __init__(self, source: Source, begun: Sequence[StreamFile]) -> None:
        self._source = source
        self._paths = local_paths(source.path) if source.path != PYTHON_DOCS else []
        self.files = look_at(self._paths, begun)
        self.origin = Origin(_place(source), max(len(self._paths), 1), files=identity_of(self.files))

    @property
    def num_shards(self) -> int:
        return self.origin.num_shards

    def shard(self, num_shards: int, index: int) -> "_FileRows":
        assert num_shards == self.num_shards, "a shard is a file"
        return _FileRows(self._source, index, self._paths)


@dataclass(frozen=True)
class _FileRows:
    source: Source
    index: int
    paths: list[Any]
    offset: int = 0

    def skip(self, n: int, /) -> "_FileRows":
        return replace(self, offset=self.offset + n)

    def __iter__(self) -> Iterator[SourceRow]:
        if self.paths:
            rows = file_rows(self.paths[self.index], self.source, self.source.columns())
        else:
            rows = python_docs_rows()
        # Documents keep their place long after; the open file is not to live as long, nor to be looked on in.
        of_file = replace(rows, items=iter(()), is_download=True)
        for number, row in itertools.islice(rows.items, self.offset, None):
            yield SourceRow(self.source.label, number, row, of_file)


class _HubShards:
    """A split of a Hub dataset at one commit."""

    def __init__(self, source: Source, commit: str | None) -> None:
        self._source, self.files = source, ()
        asked = HubDataset(source.path, source.name, source.split, source.revision, streaming=True, label=source.label)
        try:
            if commit is None:
                load_split(asked)  # whose errors say more than those of the next line
                commit = tried_again(asked, lambda: _commit_of(asked))
            self._dataset = replace(asked, revision=commit)
            self._rows = only_columns(load_split(self._dataset), source.columns())
            num_shards = self._rows.num_shards
        except Exception as error:
            raise DataError(reading_failed(asked, error)) from error
        self.origin = Origin(_place(source), num_shards, commit=commit)

    @property
    def num_shards(self) -> int:
        return self.origin.num_shards

    def shard(self, num_shards: int, index: int) -> "_HubRows":
        where = f"Hub dataset {self._source.label!r}, shard {index}"
        return _HubRows(self._source.label, self._dataset, where, self._rows.shard(num_shards, index))


@dataclass(frozen=True)
class _HubRows:
    label: str
    dataset: HubDataset
    where: str
    shard: Any
    offset: int = 0

    def skip(self, n: int, /) -> "_HubRows":
        return replace(self, offset=self.offset + n)

    def __iter__(self) -> Iterator[SourceRow]:
        rows = Rows(self.where, "row", iter(()), is_download=True)
        items = iter(self.shard.skip(self.offset) if self.offset else self.shard)
        for number in itertools.count(self.offset + 1):
            try:
                row = next(items, _END)
            except Exception as error:
                raise DataError(reading_failed(self.dataset, error)) from error
            if row is _END:
                return
            yield SourceRow(self.label, number, row, rows)


_END = object()


def _commit_of(dataset: HubDataset) -> str:
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(dataset.path, revision=dataset.revision).sha
    assert commit is not None
    return commit


def origins_as_json(sources: Mapping[str, SourceShards]) -> dict[str, Any]:
    """What each source was, under its label, for JSON."""
    return {label: asdict(source.origin) for label, source in sources.items()}
