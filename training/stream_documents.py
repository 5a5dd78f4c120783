"""What a row of a stream becomes: the tokens of a document to train on, or nothing; and what was read, by source."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tercet.tokenizer.chunking import chunking_of
from tercet.tokenizer.encoding import exact_words
from tercet.tokenizer.pretokenization import Words
from tercet.training.counts import counted, megabytes
from tercet.training.documents import Document
from tercet.training.encode_worker import Encoder, encode_pieces
from tercet.training.pieces import cut_into_pieces
from tercet.training.row_reader import RowReader
from tercet.training.skips import SkipReport
from tercet.training.source import Source
from tercet.training.split import digest_is_validation, document_digest
from tercet.training.stream_batches import StreamedTokens
from tercet.training.stream_order import StreamedRow
from tercet.training.stream_sources import SourceRow


@dataclass
class SourceCounts:
    """What one process, or all of them, read of a source.

    Attributes:
        documents: Trained on, to their end; in every epoch anew, like all of these.
        bytes: Of their text, in UTF-8.
        tokens: Of them, the ends of text included.
        held_out: Documents that validate, wherever in the stream they stand.
    """

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    held_out: int = 0

    def __add__(self, other: "SourceCounts") -> "SourceCounts":
        theirs = asdict(other)
        return SourceCounts(**{name: value + theirs[name] for name, value in asdict(self).items()})


class StreamDocuments:
    """Documents by the rules of prepared data: the same columns, limits, skips and tokens, and the same held out."""

    def __init__(
        self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast, validation_fraction: float
    ) -> None:
        """
        Args:
            sources: Of the recipe, with distinct labels.
            tokenizer: Its chat template writes conversations.
            validation_fraction: Part of the documents that is held out, by hash.
        """
        self.skips = SkipReport()
        self.counts = {source.label: SourceCounts() for source in sources}
        self._readers = {source.label: RowReader(source, tokenizer=tokenizer) for source in sources}
        for reader in self._readers.values():
            reader.skips = self.skips
        self._fraction = validation_fraction
        self._encoder = _DocumentEncoder(tokenizer.backend_tokenizer)
        self._last: tuple[SourceRow, np.ndarray | StreamedTokens | None] | None = None
        self._num_bytes = 0

    def size(self, row: SourceRow) -> int:
        """Tokens of a row's document, which weights weigh; 0 where it is left out."""
        tokens = self.encode(row)
        ids = tokens.ids if isinstance(tokens, StreamedTokens) else tokens
        return 0 if ids is None else len(ids) + 1

    def encode(self, row: SourceRow) -> np.ndarray | StreamedTokens | None:
        """Tokens of a row's document; None where the row gives none, or one that validates. Counted once a row.

        Raises:
            DataError: A row that cannot be used, where the source does not skip such.
        """
        if self._last is None or self._last[0] is not row:
            self._last = (row, self._encode(row))
        return self._last[1]

    def ended(self, item: StreamedRow) -> None:
        """A document has been trained on, to its last token."""
        counts = self.counts[item.source]
        counts.documents, counts.tokens = counts.documents + 1, counts.tokens + self.size(item.row)
        counts.bytes += self._num_bytes

    def state_dict(self) -> dict[str, Any]:
        """All that was counted, for JSON."""
        return {
            "counts": {label: asdict(counts) for label, counts in self.counts.items()},
            "skipped": self.skips.as_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from there."""
        self.counts = {label: SourceCounts(**counts) for label, counts in state["counts"].items()}
        self.skips = SkipReport.from_dict(state["skipped"])
        for reader in self._readers.values():
            reader.skips = self.skips

    def _encode(self, row: SourceRow) -> np.ndarray | StreamedTokens | None:
        document = self._readers[row.source].document(row.number, row.row, row.rows)
        if document is None:
            return None
        if digest_is_validation(document_digest(document.text), self._fraction):
            self.counts[row.source].held_out += 1
            return None
        self._num_bytes = len(document.text.encode("utf-8"))
        return self._encoder.tokens(document)


@dataclass(frozen=True)
class ReadByAll:
    """What all processes have read of a stream.

    Attributes:
        counts: Of each source under its label.
        skips: Rows that gave no document.
        whole_epochs: How often each source was read to its end, by the process that is furthest.
    """

    counts: dict[str, SourceCounts]
    skips: SkipReport
    whole_epochs: dict[str, int]

    def lines(self) -> list[str]:
        """What to print of it: a line for each source, and those of its skips."""
        shown = []
        for label, counts in self.counts.items():
            epochs = f", {counted(self.whole_epochs[label], 'time')} to the end" if self.whole_epochs[label] else ""
            shown.append(
                f"{label}: {counts.documents:,} documents read, {megabytes(counts.bytes)}, {counts.tokens:,} tokens; "
                f"{counts.held_out:,} held out{epochs}"
            )
        return shown + self.skips.lines()


def read_by_all(positions: Sequence[Mapping[str, Any]]) -> ReadByAll:
    """What processes have read, by the state of each (`StreamSteps.state_dict`)."""
    skips, counts = SkipReport(), {}
    for position in positions:
        skips.update(SkipReport.from_dict(position["read"]["skipped"]))
        for label, fields in position["read"]["counts"].items():
            counts[label] = counts.get(label, SourceCounts()) + SourceCounts(**fields)
    places = [position["stream"]["positions"] for position in positions]
    return ReadByAll(counts, skips, {label: max(place[label]["epoch"] for place in places) for label in counts})


class _DocumentEncoder:
    """Tokens of one document after the other, with the ids that preparing would give."""

    def __init__(self, backend: Tokenizer) -> None:
        dtype = "uint16" if backend.get_vocab_size() <= 1 << 16 else "uint32"
        # A tokenizer of its own: this one is used in another thread than whoever else has it.
        self._encoder = Encoder(backend.to_str(), dtype, chunking_of(backend))
        self._words: Words | None = exact_words(backend)

    def tokens(self, document: Document) -> np.ndarray | StreamedTokens:
        pieces = list(cut_into_pieces(document.text, document.segments, self._words))
        ids, counts = encode_pieces(
            self._encoder, [piece.text for piece in pieces], [piece.is_template for piece in pieces]
        )
        if document.segments is None:
            return ids
        return StreamedTokens(ids, np.repeat([piece.is_label for piece in pieces], counts))
