"""What a run on a stream makes before its first step: a sample for the tokenizer and to hold out, and where it began.

The sample is prepared into the run's `data` folder like any text: its documents that the hash holds out validate, the
others taught the tokenizer. `stream.json` beside it says what each source was, so that a run goes on in the same rows.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tercet.training.atomic import write_atomically
from tercet.training.checkpoints import list_checkpoints
from tercet.training.counts import counted, megabytes
from tercet.training.documents import DataError, Document
from tercet.training.preparation import Say, make_tokenizer
from tercet.training.recipe import Recipe
from tercet.training.row_reader import RowReader
from tercet.training.run_folder import DATA_NAME
from tercet.training.shard_files import hash_text
from tercet.training.shards import prepare, tokenizer_hash
from tercet.training.skips import SkipReport
from tercet.training.source import Source
from tercet.training.split import is_validation
from tercet.training.stream_files import StreamFile, change_between, files_from_json
from tercet.training.stream_order import shard_order
from tercet.training.stream_sources import Origin, SourceShards, open_source, origins_as_json
from tercet.training.token_set import PreparedData
from tercet.training.untouched_files import reading_facts

STREAM_NAME = "stream.json"

_FORMAT = 2
_FILES = "files"
# A source's first shard may be all of one kind; of so many each gives its part.
_MAX_SHARDS_SAMPLED = 16


@dataclass(frozen=True)
class Stream:
    """The text of a run that does not prepare it.

    Attributes:
        sources: Under their labels.
        sample: The first documents, prepared. Its fingerprint is the stream's.
    """

    sources: dict[str, SourceShards]
    sample: PreparedData


def begin_stream(recipe: Recipe, folder: Path, say: Say) -> tuple[PreTrainedTokenizerFast, Stream]:
    """The run's tokenizer and stream; what an earlier call left is taken up.

    Raises:
        DataError: A source that is not there or cannot be read, a file that has changed since the run's checkpoint, or
            a sample of which nothing or all is held out.
    """
    sources = _open_sources(recipe, folder)
    if list_checkpoints(folder):
        _check_files(folder, sources)
    num_shards = sum(source.num_shards for source in sources.values())
    say(
        f"Stream     {counted(len(sources), 'source')}, {counted(num_shards, 'shard')}, read while training: shards in "
        "permuted order, rows as they lie in them, no duplicate dropped; to be gone on with by as many processes"
    )
    sample = _Sample(recipe, sources)
    tokenizer = make_tokenizer(recipe, folder, say, texts=sample.training_texts())
    made_of = _made_of(recipe, sources, tokenizer)
    data = _standing_sample(folder, made_of)
    if data is None:
        data = prepare(
            sample.documents(tokenizer),
            tokenizer,
            folder / DATA_NAME,
            validation_fraction=recipe.data.validation_fraction,
            split_by="document",
            drop_duplicates=False,
            skips=sample.skips,
        )
    _write_record(folder, {**made_of, "sample": data.fingerprint, _FILES: _files_of(sources)})
    say(
        f"Sample     {data.report.documents:,} documents, {megabytes(data.report.bytes)}, read first: "
        f"{data.validation.num_documents:,} of them, {data.validation.num_tokens:,} tokens, validate"
    )
    for line in data.skips.lines():
        say(f"           {line}")
    return tokenizer, _stream(sources, data, made_of)


def open_stream(recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Stream:
    """The stream that the main process has begun; the other processes call this.

    Raises:
        DataError: A source that cannot be read, or that has changed since the main process looked.
    """
    sources = _open_sources(recipe, folder)
    made_of = _made_of(recipe, sources, tokenizer)
    data = _standing_sample(folder, made_of)
    if data is None:
        raise DataError(f"{folder / DATA_NAME} is not of the stream that this process sees: do all see the same files?")
    return _stream(sources, data, made_of)


def _stream(sources: dict[str, SourceShards], sample: PreparedData, made_of: dict[str, Any]) -> Stream:
    fingerprint = hash_text(json.dumps(made_of, sort_keys=True) + sample.fingerprint)
    return Stream(sources, dataclasses.replace(sample, fingerprint=fingerprint))


def _open_sources(recipe: Recipe, folder: Path) -> dict[str, SourceShards]:
    origins, files = _begun(folder)
    return {
        source.label: open_source(source, origins.get(source.label), files.get(source.label, ()))
        for source in recipe.data.all_sources()
    }


def _check_files(folder: Path, sources: dict[str, SourceShards]) -> None:
    """Refuse, by its name, a file that is not what it was when the run began."""
    _, begun = _begun(folder)
    for label, source in sources.items():
        if label in begun and (change := change_between(begun[label], source.files)):
            raise DataError(
                f"{change}, and the run in {folder} began with it as it was: a stream goes on only in the same text. "
                "Restore the file, choose another output folder, or --restart"
            )


def _begun(folder: Path) -> tuple[dict[str, Origin], dict[str, tuple[StreamFile, ...]]]:
    """What each source was when the run began, and its files."""
    try:
        record = _read_record(folder)
        origins = {label: Origin.from_dict(fields) for label, fields in record["origins"].items()}
        return origins, files_from_json(record[_FILES])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, {}  # nothing has begun, or what is there is no record: it is made anew


def _files_of(sources: dict[str, SourceShards]) -> dict[str, list[list[Any]]]:
    return {label: [list(file) for file in source.files] for label, source in sources.items()}


def _read_record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / DATA_NAME / STREAM_NAME).read_text("utf-8"))


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    """Times of files may be others than those recorded, and their hashes are then not to be taken a third time."""
    text = json.dumps(record, indent=2) + "\n"
    path = folder / DATA_NAME / STREAM_NAME
    if not path.is_file() or path.read_text("utf-8") != text:
        write_atomically(path, text.encode())


def _made_of(recipe: Recipe, sources: dict[str, SourceShards], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """All that decides what the stream is, and its sample."""
    data = recipe.data
    made_of = {
        "format": _FORMAT,
        "origins": origins_as_json(sources),
        "reading": {source.label: reading_facts(source) for source in data.all_sources()},
        "weights": data.weights(),
        "validation_fraction": data.validation_fraction,
        "sample_mb": data.stream_sample_mb,
        "seed": recipe.seed,
        "tokenizer": tokenizer_hash(tokenizer),
    }
    return json.loads(json.dumps(made_of))  # as it will be read back


def _standing_sample(folder: Path, made_of: dict[str, Any]) -> PreparedData | None:
    """The sample that an earlier call has prepared, if it is of this stream."""
    try:
        data = PreparedData.open(folder / DATA_NAME)
        record = _read_record(folder)
        record.pop(_FILES)  # what counts of them is in their source's origin
    except (OSError, ValueError, KeyError, AttributeError, DataError):
        return None
    return data if record == {**made_of, "sample": data.fingerprint} else None


class _Sample:
    """The first documents of each source, by weight; read once, and held in memory."""

    def __init__(self, recipe: Recipe, sources: dict[str, SourceShards]) -> None:
        self.recipe, self.sources, self.skips = recipe, sources, SkipReport()
        self._documents: list[Document] | None = None

    def documents(self, tokenizer: PreTrainedTokenizerFast | None) -> list[Document]:
        """The sample.

        Args:
            tokenizer: Its chat template writes conversations; None takes the one of every tokenizer that Tercet trains.

        Raises:
            DataError: A source without a document, or a sample of which nothing or all is held out.
        """
        if self._documents is None:
            self._documents = self._read(tokenizer)
        return self._documents

    def training_texts(self) -> Iterator[str]:
        """What a tokenizer learns from; reads the sample when it is asked."""
        fraction = self.recipe.data.validation_fraction
        for document in self.documents(None):
            if not is_validation(document.text, fraction):
                yield from document.plain_texts()

    def _read(self, tokenizer: PreTrainedTokenizerFast | None) -> list[Document]:
        data = self.recipe.data
        budget, weights, documents = data.stream_sample_mb * 1e6, data.weights() or {}, []
        bar = tqdm(total=int(budget), unit="B", unit_scale=True, desc="Sampling", disable=None, leave=False)
        with bar:
            for source in data.all_sources():
                found = len(documents)
                for document, num_bytes in self._first(source, tokenizer, budget * weights.get(source.label, 1.0)):
                    documents.append(document)
                    bar.update(num_bytes)
                if len(documents) == found:
                    left_out = self.skips.summary(source.label) or "there is no row"
                    raise DataError(
                        f"the first shards of {source.label} hold no document that can be used: {left_out}."
                    )
        fraction = data.validation_fraction
        num_held_out = sum(is_validation(document.text, fraction) for document in documents)
        if num_held_out in (0, len(documents)):
            which, change = ("all", "lower") if num_held_out else ("none", "raise")
            raise DataError(
                f"{which} of the {len(documents)} documents of the stream's sample ({data.stream_sample_mb:g} MB) are "
                f"held out: {change} data.validation_fraction ({fraction:g}), or raise data.stream_sample_mb."
            )
        return documents

    def _first(
        self, source: Source, tokenizer: PreTrainedTokenizerFast | None, budget: float
    ) -> Iterator[tuple[Document, int]]:
        """Documents of up to `budget` bytes, from the shards that training reads first, and each one's bytes."""
        shards, reader = self.sources[source.label], RowReader(source, self.skips, tokenizer)
        of_a_shard = budget / min(shards.num_shards, _MAX_SHARDS_SAMPLED)
        for shard in shard_order(self.recipe.seed, 0, source.label, shards.num_shards):
            left = of_a_shard
            for row in shards.shard(shards.num_shards, shard):
                document = reader.document(row.number, row.row, row.rows)
                if document is not None:
                    num_bytes = len(document.text.encode("utf-8"))
                    yield document, num_bytes
                    left, budget = left - num_bytes, budget - num_bytes
                if min(left, budget) <= 0:
                    break
            if budget <= 0:
                return
