"""Rows of a fixed length from documents of any length: no token dropped, none seen from another document.

A document of n stored tokens d[0..n-1], the last one end-of-text, is a segment of n positions: inputs
[end-of-text, d[0], ..., d[n-2]], labels d[0..n-1]. The end-of-text token thus also starts every text, and each stored
token is a label once. A document longer than a row is cut into pieces: piece [a, b) has inputs and labels [a, b) of the
segment, so that a cut costs context but no label. In a chat document only the assistant's tokens are labels.

Shapes: T sequence_length, R rows, P pieces, B rows of a batch.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from tercet.training.documents import DataError

IGNORE_INDEX = -100
MAX_PADDING_FRACTION = 0.01


@dataclass(frozen=True)
class Packing:
    """Which piece of which document stands in which row; a row's pieces stand side by side, padding behind them.

    Attributes:
        sequence_length: T.
        row_offsets: Pieces row_offsets[i] <= p < row_offsets[i + 1] make row i, int64 (R + 1,).
        document: Document of each piece, int64 (P,).
        start: Its first position within the document's segment, int64 (P,).
        length: Its positions, int64 (P,).
    """

    sequence_length: int
    row_offsets: np.ndarray
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows R."""
        return len(self.row_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Labels in one epoch: all stored tokens."""
        return int(self.length.sum())

    @property
    def padding_fraction(self) -> float:
        """Part of all slots that hold no token."""
        return 1.0 - self.num_tokens / (self.num_rows * self.sequence_length)


def pack(document_lengths: np.ndarray, sequence_length: int) -> Packing:
    """Pack documents into rows: whole rows of long ones, then tails and short ones best-fit decreasing.

    Rows are dissolved, and their pieces cut to fill gaps of others, only while padding is over 1 % of all slots: a
    piece that starts inside a document lacks the context before it. Equal arguments give an equal packing.

    Args:
        document_lengths: Stored tokens of each document, (documents,).
        sequence_length: T.

    Raises:
        DataError: If all documents together do not fill one row.
        ValueError: If sequence_length < 1.
    """
    lengths = _checked(document_lengths, sequence_length)
    num_tokens = int(lengths.sum())
    pieces = _cut(lengths, sequence_length)
    rows = best_fit_rows(pieces[2], sequence_length)
    target = max(-(-num_tokens // sequence_length), int(num_tokens / (sequence_length * (1.0 - MAX_PADDING_FRACTION))))
    return build_packing(*_dissolve(pieces, rows, sequence_length, target), sequence_length)


def concatenate(document_lengths: np.ndarray, sequence_length: int) -> Packing:
    """Documents one behind the other in the order of the set, cut into rows every T tokens: the alternative to `pack`.

    No padding but in the last row; every row border cuts a document, whose rest then lacks the context before it.
    Attention, positions and labels are those of any packing: documents of a row do not see each other.

    Args:
        document_lengths: Stored tokens of each document, (documents,).
        sequence_length: T.

    Raises:
        DataError: If all documents together do not fill one row.
        ValueError: If sequence_length < 1.
    """
    lengths = _checked(document_lengths, sequence_length)
    document_ends = np.cumsum(lengths)
    ends = np.union1d(document_ends, np.arange(sequence_length, document_ends[-1], sequence_length))
    starts = np.concatenate([[0], ends[:-1]])
    document = np.searchsorted(document_ends, starts, side="right")
    start = starts - (document_ends - lengths)[document]
    return build_packing(np.stack([document, start, ends - starts]), starts // sequence_length, sequence_length)


def _checked(document_lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}.")
    lengths = np.asarray(document_lengths, dtype=np.int64)
    if (num_tokens := int(lengths.sum())) < sequence_length:
        raise DataError(
            f"The training text has {num_tokens} tokens, fewer than one row of {sequence_length}. Give more text or a "
            f"smaller sequence_length."
        )
    return lengths


def build_packing(pieces: np.ndarray, rows: np.ndarray, sequence_length: int) -> Packing:
    """Order pieces by their rows. `pieces` holds document, start and length as rows of a (3, P) array."""
    order = np.argsort(rows, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64)
    document, start, length = pieces[:, order]
    return Packing(sequence_length, offsets, document, start, length)


def best_fit_rows(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """The row of each piece, best-fit decreasing: each goes where it leaves the least room, the longest first.

    Pieces of one length are placed together, and so are rows of one free space: the work grows with the number of
    distinct lengths and free spaces, not with the number of pieces.

    Args:
        lengths: Between 1 and sequence_length, (P,).

    Returns:
        Rows numbered from 0 without a gap, int64 (P,).
    """
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(-lengths, return_counts=True)
    rows = np.empty(len(lengths), dtype=np.int64)
    free = _FreeSpace()
    num_rows = done = 0
    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        while count:
            space = free.smallest_at_least(length)
            per_row = (space or sequence_length) // length  # best fit stays in a row until no further piece fits
            wanted = -(-count // per_row)
            if space is None:
                space = sequence_length
                chosen = np.arange(num_rows, num_rows + wanted)
                num_rows += wanted
            else:
                chosen = free.take(space, wanted)
            placed = min(count, len(chosen) * per_row)
            rows[order[done : done + placed]] = np.repeat(chosen, per_row)[:placed]
            full, rest = divmod(placed, per_row)
            free.put(space - per_row * length, chosen[:full])
            if rest:
                free.put(space - rest * length, chosen[full:])
            done += placed
            count -= placed
    return rows


class _FreeSpace:
    """Rows by the space that is free in them, and the occupied spaces in order."""

    def __init__(self) -> None:
        self._rows: dict[int, list[np.ndarray]] = {}
        self._spaces: list[int] = []

    def smallest_at_least(self, length: int) -> int | None:
        i = bisect.bisect_left(self._spaces, length)
        return self._spaces[i] if i < len(self._spaces) else None

    def put(self, space: int, rows: np.ndarray) -> None:
        if space == 0 or len(rows) == 0:
            return
        if space not in self._rows:
            self._rows[space] = []
            bisect.insort(self._spaces, space)
        self._rows[space].append(rows)

    def take(self, space: int, wanted: int) -> np.ndarray:
        """At most `wanted` rows of exactly this space."""
        groups = self._rows[space]
        rows = groups.pop()
        if len(rows) > wanted:
            groups.append(rows[wanted:])
        if not groups:
            del self._rows[space]
            self._spaces.remove(space)
        return rows[:wanted]


def _cut(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """Each document as pieces of at most a row, (3, P): document, start, length."""
    num_pieces = -(-lengths // sequence_length)
    document = np.repeat(np.arange(len(lengths)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    start = (np.arange(len(document)) - first_piece[document]) * sequence_length
    return np.stack([document, start, np.minimum(lengths[document] - start, sequence_length)])


def _dissolve(pieces: np.ndarray, rows: np.ndarray, sequence_length: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Empty the emptiest rows until `target` remain, cutting their pieces to fill the widest gaps of the others."""
    used = np.bincount(rows, weights=pieces[2]).astype(np.int64)
    if len(used) <= target:
        return pieces, rows
    by_use = np.argsort(-used, kind="stable")
    kept, number = by_use[:target], np.full(len(used), -1)
    number[kept] = np.arange(target)
    moves = number[rows] < 0
    document, start, length = moved = pieces[:, moves]
    # Lay the moved tokens end to end, and the gaps beside them: both sets of borders cut the moved pieces.
    piece_ends, gaps = np.cumsum(length), (sequence_length - used[kept])[::-1]
    gap_ends = np.cumsum(gaps)
    total = int(piece_ends[-1])
    ends = np.union1d(piece_ends, gap_ends[(gap_ends > 0) & (gap_ends < total)])
    starts = np.concatenate([[0], ends[:-1]])
    piece = np.searchsorted(piece_ends, starts, side="right")
    gap = np.searchsorted(gap_ends, starts, side="right")
    inner = starts - (piece_ends[piece] - moved[2][piece])
    filled = np.stack([document[piece], start[piece] + inner, ends - starts])
    return (
        np.concatenate([pieces[:, ~moves], filled], axis=1),
        np.concatenate([number[rows[~moves]], target - 1 - gap]),
    )


def document_bounds(position_ids: torch.Tensor) -> dict[str, Any]:
    """Where documents begin and end in a batch of packed rows, as varlen attention wants it.

    These are the keyword arguments that transformers hands to flash attention (`FlashAttentionKwargs`); bounds count
    through the rows of the batch laid end to end. What a piece is to `position_ids`, padding included, is one here.

    Args:
        position_ids: Of a batch, (B, T), 0 at the first token of each piece.

    Returns:
        cu_seq_lens_q, cu_seq_lens_k: int32 (pieces + 1,), from 0 to B * T.
        max_length_q, max_length_k: Tokens of the longest piece, an int.
    """
    starts = torch.nonzero(position_ids.reshape(-1) == 0).flatten()
    bounds = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).to(torch.int32)
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


class StoredDocuments(Protocol):
    """What rows are read from; `TokenSet` is one."""

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Stored tokens start <= t < stop of a document."""
        ...

    def label_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """Which of these tokens are labels, bool (stop - start,); None: all of them."""
        ...


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Rows of a packing as tensors: a map-style dataset of num_rows rows."""

    def __init__(self, token_set: StoredDocuments, packing: Packing, *, eos_token_id: int, pad_token_id: int) -> None:
        self.token_set = token_set
        self.packing = packing
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id

    def __len__(self) -> int:
        return self.packing.num_rows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.row(i)

    def row(self, i: int) -> dict[str, torch.Tensor]:
        """Row i as int64 tensors, each (T,).

        Returns:
            input_ids: What the model reads.
            shift_labels: The token that follows each input, already aligned with it; end-of-text is a label like any
                other, -100 stands on padding and on what a chat document gives as context only.
            position_ids: Counted from 0 within each piece. Padding counts anew as well: it is a segment of its own,
                which no token sees.
        """
        return {name: tensor[0] for name, tensor in self.rows([i]).items()}

    def rows(self, indexes: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
        """Several rows stacked, each tensor (B, T): what `row` gives one of."""
        T = self.packing.sequence_length
        input_ids = np.full((len(indexes), T), self.pad_token_id, dtype=np.int64)
        shift_labels = np.full((len(indexes), T), IGNORE_INDEX, dtype=np.int64)
        position_ids = np.empty((len(indexes), T), dtype=np.int64)
        counting = np.arange(T)
        for b, i in enumerate(indexes):
            at = 0
            for document, start, length in self._pieces(int(i)):
                to = at + length
                # The input of a position is the label of the one before: one read serves both.
                tokens = self.token_set.tokens(document, max(start - 1, 0), start + length)
                shift_labels[b, at:to] = tokens[-length:]
                mask = self.token_set.label_mask(document, start, start + length)
                if mask is not None:
                    shift_labels[b, at:to][~mask] = IGNORE_INDEX
                input_ids[b, to - len(tokens) + 1 : to] = tokens[:-1]
                if start == 0:
                    input_ids[b, at] = self.eos_token_id
                position_ids[b, at:to] = counting[:length]
                at = to
            position_ids[b, at:] = counting[: T - at]
        return {
            "input_ids": torch.from_numpy(input_ids),
            "shift_labels": torch.from_numpy(shift_labels),
            "position_ids": torch.from_numpy(position_ids),
        }

    def _pieces(self, i: int) -> Iterator[tuple[int, int, int]]:
        if not 0 <= i < len(self):
            raise IndexError(f"Row {i} of {len(self)} rows.")
        packing = self.packing
        bounds = slice(packing.row_offsets[i], packing.row_offsets[i + 1])
        return zip(
            packing.document[bounds].tolist(),
            packing.start[bounds].tolist(),
            packing.length[bounds].tolist(),
            strict=True,
        )
