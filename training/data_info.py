"""What a set of prepared data holds, in words: counts by source, lengths, what was left out, how rows fill, a row.

Shapes: T sequence_length.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from tercet.training.arrangement import PackingName, arrange
from tercet.training.counts import megabytes
from tercet.training.documents import DataError
from tercet.training.packing import Packing
from tercet.training.token_set import PreparedData, SourceReport, TokenSet

_BAR_WIDTH = 40
_SHOWN_CHARS = 320
_MIDDLE = "  [...]  "


@dataclass(frozen=True)
class LengthHistogram:
    """Documents by their length in tokens, in bins that double.

    Attributes:
        first: Shortest length of each bin: 1, 2, 4, ..., int64 (bins,); a bin ends where the next one begins.
        documents: In each bin, int64 (bins,).
        tokens: Of these documents together, int64 (bins,).
    """

    first: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray


def length_histogram(lengths: np.ndarray) -> LengthHistogram:
    """Documents and tokens by length; bins from the shortest document's to the longest one's."""
    if not len(lengths):
        empty = np.empty(0, np.int64)
        return LengthHistogram(empty, empty, empty)
    # frexp is exact where log2 rounds: 2**k lies in bin k.
    bins = np.frexp(lengths.astype(np.float64))[1] - 1
    low, high = int(bins.min()), int(bins.max())
    documents = np.bincount(bins - low, minlength=high - low + 1)
    tokens = np.bincount(bins - low, weights=lengths, minlength=high - low + 1).astype(np.int64)
    return LengthHistogram(1 << np.arange(low, high + 1, dtype=np.int64), documents, tokens)


@dataclass(frozen=True)
class RowFill:
    """What the slots of all rows hold, as parts that sum to 1.

    Attributes:
        sequence_length: T.
        num_rows: Rows.
        whole: Tokens of documents that stand whole in one row.
        cut: Tokens of documents that are cut, most of them longer than a row.
        padding: Nothing.
    """

    sequence_length: int
    num_rows: int
    whole: float
    cut: float
    padding: float


def row_fill(document_lengths: np.ndarray, packing: Packing) -> RowFill:
    """How a packing fills its rows."""
    slots = packing.num_rows * packing.sequence_length
    is_whole = packing.length == np.asarray(document_lengths)[packing.document]
    whole = int(packing.length[is_whole].sum())
    cut = packing.num_tokens - whole
    return RowFill(packing.sequence_length, packing.num_rows, whole / slots, cut / slots, 1.0 - (whole + cut) / slots)


def bytes_per_token(report: SourceReport, num_ends: int) -> float:
    """UTF-8 bytes that a token stands for; ends of documents, which stand for none, are left out."""
    return report.bytes / max(report.tokens - num_ends, 1)


def describe_data(
    data_dir: Path,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    sequence_length: int = 1024,
    packing: PackingName = "best_fit",
    weights: Mapping[str, float] | None = None,
    row: int = 0,
) -> Iterator[str]:
    """Lines that say what a folder of prepared data holds.

    Args:
        tokenizer: Decodes the row; None shows its ids.
        sequence_length: T.
        packing: How training fills rows.
        weights: Of the sources, where training mixes them by weight.
        row: Which row of the packed training split to show.

    Raises:
        DataError: If there is no finished set, the tokenizer is another than the set's, or there is no such row.
    """
    data = PreparedData.open(data_dir)
    if tokenizer is not None:
        check_tokenizer(data, tokenizer, data_dir)
    # Before the first line: a report that ends in an error reads as if it were none.
    rows, no_rows = None, ""
    try:
        rows = arrange(data.train, sequence_length, packing=packing, weights=weights).packing
    except DataError as error:
        no_rows = f"\nNo rows to train on: {error}"
    if rows is not None:
        check_row(rows, row)
    yield from _totals(data, data_dir)
    yield from ["", *_sources(data)]
    if lines := data.skips.lines():
        yield from ["", "Left out while reading", *(f"  {line}" for line in lines)]
    yield from ["", *_divided(data), *_lengths(stored_lengths(data))]
    if rows is None:
        yield no_rows
        return
    yield from ["", *_fill(row_fill(data.train.document_lengths, rows))]
    yield from ["", *_row(data.train, rows, row, tokenizer)]


def check_row(packing: Packing, row: int) -> None:
    """Refuse a row that is not there.

    Raises:
        DataError: Says which there are.
    """
    if not 0 <= row < packing.num_rows:
        raise DataError(f"There is no row {row}: rows are numbered from 0 to {packing.num_rows - 1}.")


def stored_lengths(data: PreparedData) -> np.ndarray:
    """Tokens of each document, int64; of one that is divided, of each of its two pieces."""
    return np.concatenate([data.train.document_lengths, data.validation.document_lengths])


def num_divided(data: PreparedData) -> int:
    """Documents that stand in the training and in the validation text, each with one piece."""
    return max(data.train.num_documents + data.validation.num_documents - data.report.documents, 0)


def held_out(data: PreparedData) -> float:
    """Part of the tokens that validate; the recipe's fraction is of documents, or of each one's bytes."""
    return data.validation.num_tokens / max(data.report.tokens, 1)


def _divided(data: PreparedData) -> Iterator[str]:
    if count := num_divided(data):
        yield f"{count:,} documents are divided, and counted below as two: what trains and what validates"


def check_tokenizer(data: PreparedData, tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    """Refuse a tokenizer whose ids mean something else than the set's.

    Raises:
        DataError: If it is not the one that the manifest names.
    """
    from tercet.training.shards import tokenizer_hash

    if tokenizer_hash(tokenizer) != data.settings["tokenizer"]:
        raise DataError(
            f"{data_dir} was tokenized with another tokenizer ({data.settings['vocab_size']:,} tokens) than this one "
            f"({len(tokenizer):,} tokens). Give its own with --tokenizer, or prepare the data again."
        )


def _totals(data: PreparedData, data_dir: Path) -> Iterator[str]:
    report, settings = data.report, data.settings
    num_stored = data.train.num_documents + data.validation.num_documents
    yield (
        f"{data_dir}: {report.documents:,} documents, {report.tokens:,} tokens, {megabytes(report.bytes)}, "
        f"{bytes_per_token(report, num_stored):.2f} bytes per token"
    )
    part = settings.get("part")
    of = f"part {part[0]} of {part[1]} (0 is the first), " if part else ""
    of += f"merged from {settings['merged_parts']} parts, " if "merged_parts" in settings else ""
    yield (
        f"{of}{settings['vocab_size']:,} tokens in the vocabulary, stored as {settings['dtype']}, "
        f"{held_out(data):.1%} of the tokens held "
        f"out (asked for: {settings['validation_fraction']:.1%}, by {settings['split_by']})"
    )
    yield f"{'':16}{'documents':>14}{'tokens':>18}{'MB':>12}"
    for name, tokens in (("training", data.train), ("validation", data.validation)):
        yield f"  {name:<14}{tokens.num_documents:>14,}{tokens.num_tokens:>18,}{tokens.num_bytes / 1e6:>12,.2f}"


def ends_by_source(data: PreparedData) -> dict[str, int]:
    """Stored documents, which are end-of-text tokens, of each source."""
    ends: dict[str, int] = {}
    for tokens in (data.train, data.validation):
        for name, count in zip(
            tokens.sources, np.bincount(tokens.document_sources, minlength=len(tokens.sources)).tolist(), strict=True
        ):
            ends[name] = ends.get(name, 0) + count
    return ends


def _sources(data: PreparedData) -> Iterator[str]:
    width = min(max([len(name) for name in data.report.by_source] + [len("Sources")]), 44)
    yield (
        f"{'Sources':<{width + 2}}{'documents':>12}{'tokens':>16}{'share':>8}{'MB':>11}{'bytes/token':>13}"
        f"{'duplicates':>12}{'empty':>8}"
    )
    ends = ends_by_source(data)
    for name, report in sorted(data.report.by_source.items(), key=lambda item: -item[1].tokens):
        shown = name if len(name) <= width else "..." + name[3 - width :]
        share = report.tokens / max(data.report.tokens, 1)
        yield (
            f"  {shown:<{width}}{report.documents:>12,}{report.tokens:>16,}{share:>8.1%}{report.bytes / 1e6:>11,.2f}"
            f"{bytes_per_token(report, ends.get(name, 0)):>13.2f}{report.duplicates_dropped:>12,}"
            f"{report.empty_dropped:>8,}"
        )


def _lengths(lengths: np.ndarray) -> Iterator[str]:
    histogram = length_histogram(lengths)
    yield f"{'Length in tokens':<22}{'documents':>12}  {'':{_BAR_WIDTH}}{'share of tokens':>17}"
    most = max(int(histogram.documents.max(initial=0)), 1)
    total = max(int(histogram.tokens.sum()), 1)
    for first, documents, tokens in zip(
        histogram.first.tolist(), histogram.documents.tolist(), histogram.tokens.tolist(), strict=True
    ):
        span = f"{first:,}" if first == 1 else f"{first:,} - {2 * first - 1:,}"
        yield f"  {span:>20}{documents:>12,}  {_bar(documents / most):<{_BAR_WIDTH}}{tokens / total:>17.1%}"
    if len(lengths):
        yield f"  median {np.median(lengths):,.0f}, mean {lengths.mean():,.0f}, longest {lengths.max():,}"


def _bar(part: float) -> str:
    """A bar of eighths of a character; what is not nothing is seen."""
    eighths = round(part * _BAR_WIDTH * 8)
    if part > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("" if rest == 0 else "▏▎▍▌▋▊▉"[rest - 1])


def _fill(fill: RowFill) -> Iterator[str]:
    yield (
        f"Packed for training: {fill.num_rows:,} rows of {fill.sequence_length:,} tokens; {fill.whole:.1%} of the "
        f"slots hold whole documents, {fill.cut:.1%} pieces of cut ones, {fill.padding:.2%} padding"
    )


def _row(train: TokenSet, packing: Packing, row: int, tokenizer: PreTrainedTokenizerFast | None) -> Iterator[str]:
    yield f"Row {row:,} of {packing.num_rows:,}"
    used = 0
    for piece in range(int(packing.row_offsets[row]), int(packing.row_offsets[row + 1])):
        document, start, length = (int(a[piece]) for a in (packing.document, packing.start, packing.length))
        total = int(train.document_lengths[document])
        span = f"all {total:,} tokens" if length == total else f"tokens {start:,} to {start + length:,} of {total:,}"
        source = train.sources[int(train.document_sources[document])]
        yield f"  ┌ slots {used:,} - {used + length - 1:,}: document {document:,} of {source}, {span}"
        used += length
        ids = train.tokens(document, start, start + length).tolist()
        is_end = start + length == total
        text = _text(ids[: len(ids) - is_end], tokenizer)
        for line in _shortened(text).splitlines() or [""]:
            yield f"  │ {line}"
        mask = train.label_mask(document, start, start + length)
        labels = "" if mask is None else f"; {int(mask.sum()):,} of {length:,} tokens are labels"
        yield f"  └ {'end of text' if is_end else 'cut here, goes on in another row'}{labels}"
    if padding := packing.sequence_length - used:
        yield f"  · {padding:,} slots of padding"


def _text(ids: list[int], tokenizer: PreTrainedTokenizerFast | None) -> str:
    return ", ".join(map(str, ids)) if tokenizer is None else "".join(tokenizer.decode(ids))


def _shortened(text: str) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= _SHOWN_CHARS:
        return text
    half = _SHOWN_CHARS // 2
    return text[:half] + _MIDDLE + text[-half:]
