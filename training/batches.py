"""Batches for training, as a function of the step's number, and windows that score a validation set once.

Shapes: B per_device_batch_size, T sequence_length.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch

from tercet.training.batch_sizes import BatchSizes
from tercet.training.documents import DataError
from tercet.training.order import sample_rows
from tercet.training.packing import (
    IGNORE_INDEX,
    PackedDataset,
    Packing,
    best_fit_rows,
    build_packing,
    document_bounds,
)
from tercet.training.step_batches import Piece
from tercet.training.token_set import TokenSet

Batch = dict[str, Any]
"""Keyword arguments of the model: tensors (B, T), and where asked for the bounds of documents."""

Order = Callable[[np.ndarray], np.ndarray]
"""Rows of samples counted through all epochs, both int64 of one shape: a pure function."""

_SHOWN_TOKENS = 40


class PackedBatches:
    """What each process trains on at each step; nothing is remembered between steps.

    Step s consumes the global samples s * global_batch_size, ..., (s + 1) * global_batch_size - 1, or where batches
    grow in stages those behind the samples of all steps before; sample n is row permuted(n % num_rows) of epoch
    n // num_rows, or what another `order` says. Processes and micro-batches only divide a step's samples among
    themselves: their union is the same whatever their number, so a run goes on from a step with any other division.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        seed: int,
        global_batch_size: int,
        per_device_batch_size: int,
        rank: int,
        world_size: int,
        order: Order | None = None,
        with_document_bounds: bool = False,
        warmup: Sequence[tuple[int, int]] = (),
    ) -> None:
        """
        Args:
            seed: Of the default order, in which every row comes once in an epoch.
            order: Another one, such as `WeightedOrder`.
            with_document_bounds: Batches also hold what varlen attention takes; see `document_bounds`.
            warmup: Stages of smaller global batches before global_batch_size; see `BatchSizes`.

        Raises:
            ValueError: If a global batch size is no multiple of per_device_batch_size * world_size, or a field is out
                of range.
        """
        for name, value in (
            ("per_device_batch_size", per_device_batch_size),
            ("world_size", world_size),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in range(world_size), not {rank} with world_size {world_size}.")
        self.sizes = BatchSizes(global_batch_size, tuple(warmup))
        for size in self.sizes:
            if size % (per_device_batch_size * world_size):
                raise ValueError(
                    f"global_batch_size ({size}) must be a multiple of per_device_batch_size ({per_device_batch_size}) "
                    f"times world_size ({world_size}). Choose numbers whose product divides it."
                )
        self.dataset = dataset
        self.seed = seed
        self.per_device_batch_size = per_device_batch_size
        self.rank = rank
        self.world_size = world_size
        self.order = order
        self.with_document_bounds = with_document_bounds

    def accumulation_steps(self, step: int) -> int:
        """Micro-batches of each process in a step."""
        return self.sizes.at(step) // (self.per_device_batch_size * self.world_size)

    def rows(self, step: int) -> np.ndarray:
        """Rows of this process in a step, int64 (accumulation_steps, B)."""
        if step < 0:
            raise ValueError(f"step must be at least 0, not {step}.")
        divided = np.arange(self.sizes.before(step), self.sizes.before(step + 1)).reshape(
            self.accumulation_steps(step), self.world_size, self.per_device_batch_size
        )
        samples = divided[:, self.rank]
        return self.order(samples) if self.order else sample_rows(self.seed, samples, len(self.dataset))

    def micro_batches(self, step: int) -> list[Batch]:
        """This process's batches of a step, each tensor (B, T); see `PackedDataset.row` for what they hold."""
        return [self.batch(rows) for rows in self.rows(step)]

    def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """These rows as a batch."""
        batch: Batch = self.dataset.rows(rows)
        return {**batch, **document_bounds(batch["position_ids"])} if self.with_document_bounds else batch

    def steps(self, start: int, stop: int, *, ahead: int = 2) -> Iterator[list[Batch]]:
        """`micro_batches` of steps start <= s < stop, in this order, made by a thread `ahead` steps in front."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tercet-batches") as executor:
            waiting: deque[Future[list[Batch]]] = deque()
            try:
                for step in range(start, stop):
                    waiting.append(executor.submit(self.micro_batches, step))
                    if len(waiting) > ahead:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def describe(self) -> str:
        """Rows of an epoch, and how full they are."""
        packing = self.dataset.packing
        return f"{packing.num_rows:,} rows an epoch, {packing.padding_fraction:.2%} padding"

    def state_dict(self) -> None:
        """None: a step's number says all."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: there is no state."""
        assert not state, "prepared data has no state"

    def pieces(self, step: int) -> list[list[Piece]]:
        """The rows of this process in a step, each by its documents; their numbers are among the training documents."""
        return [self._pieces(int(row)) for row in self.rows(step).ravel()]

    def _pieces(self, row: int) -> list[Piece]:
        batch, packing = self.dataset.rows([row]), self.dataset.packing
        token_set = cast(TokenSet, self.dataset.token_set)
        bounds = slice(packing.row_offsets[row], packing.row_offsets[row + 1])
        pieces, at = [], 0
        for document, length in zip(packing.document[bounds].tolist(), packing.length[bounds].tolist(), strict=True):
            num_shown = min(int(token_set.document_lengths[document]), _SHOWN_TOKENS)
            name = f"document {document} of {token_set.sources[int(token_set.document_sources[document])]}"
            part = {key: tensor[:, at : at + length] for key, tensor in batch.items()}
            pieces.append(Piece(name, token_set.tokens(document, 0, num_shown), part))
            at += length
        return pieces


class EvaluationWindows:
    """Batches that together score every label of a set once; a sequence, made as it is read.

    Each batch holds int64 tensors `input_ids`, `shift_labels` and `position_ids`, each (b, T), b <= batch_size. A label
    equal to a special token's id is no text, which never encodes to it: the end of a document, or of a turn. Bits per
    byte sum over the nats of the other labels and divide by the set's num_label_bytes.
    """

    def __init__(self, dataset: PackedDataset, num_context: np.ndarray, batch_size: int) -> None:
        self._dataset = dataset
        self._num_context = num_context
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._dataset) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Batch:
        if not 0 <= i < len(self):
            raise IndexError(f"Batch {i} of {len(self)} batches.")
        rows = np.arange(i * self._batch_size, min((i + 1) * self._batch_size, len(self._dataset)))
        batch = self._dataset.rows(rows)
        # The window before has scored the first labels; here they are context.
        scored_before = (
            torch.arange(self._dataset.packing.sequence_length) < torch.from_numpy(self._num_context[rows])[:, None]
        )
        batch["shift_labels"].masked_fill_(scored_before, IGNORE_INDEX)
        return batch

    def documents(self, i: int) -> np.ndarray:
        """The document of each position of batch i, -1 on padding, int64 (b, T)."""
        packing = self._dataset.packing
        first, last = i * self._batch_size, min((i + 1) * self._batch_size, len(self._dataset))
        documents = np.full((last - first, packing.sequence_length), -1, dtype=np.int64)
        for b, row in enumerate(range(first, last)):
            pieces = slice(packing.row_offsets[row], packing.row_offsets[row + 1])
            of_row = np.repeat(packing.document[pieces], packing.length[pieces])
            documents[b, : len(of_row)] = of_row
        return documents


def evaluation_windows(
    token_set: TokenSet, sequence_length: int, stride: int, batch_size: int, *, eos_token_id: int, pad_token_id: int
) -> EvaluationWindows:
    """Windows of sequence_length over each document, `stride` apart; short documents stand several to a row.

    What is a label in training is scored: all tokens of a text, and of a conversation what the assistant writes. Each
    is scored in the first window that reaches it, so that all but a document's first sequence_length tokens see at
    least sequence_length - stride tokens before them. The last window ends with the document, so it has the most
    context.

    Args:
        sequence_length: T.
        stride: From 1 to sequence_length; a smaller one gives more context, at sequence_length / stride times the work.

    Raises:
        DataError: If the set holds no token.
        ValueError: If stride is not in 1..sequence_length, or batch_size < 1.
    """
    if not 1 <= stride <= sequence_length:
        raise ValueError(f"stride must be from 1 to sequence_length ({sequence_length}), not {stride}.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}.")
    if not token_set.num_tokens:
        raise DataError("The validation split holds no token. Prepare the data with a larger validation_fraction.")
    packing, num_context = _windows(token_set.document_lengths, sequence_length, stride)
    dataset = PackedDataset(token_set, packing, eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    return EvaluationWindows(dataset, num_context, batch_size)


def _windows(lengths: np.ndarray, sequence_length: int, stride: int) -> tuple[Packing, np.ndarray]:
    """The windows as a packing, and of each row the number of leading labels that an earlier window scores."""
    num_windows = 1 + -(-np.maximum(lengths - sequence_length, 0) // stride)
    document = np.repeat(np.arange(len(lengths)), num_windows)
    ordinal = np.arange(len(document)) - (np.cumsum(num_windows) - num_windows)[document]
    stop = np.minimum(lengths[document], sequence_length + ordinal * stride)
    start = np.maximum(stop - sequence_length, 0)
    scored_before = np.where(ordinal > 0, sequence_length + (ordinal - 1) * stride, 0)
    pieces = np.stack([document, start, stop - start])
    rows = best_fit_rows(pieces[2], sequence_length)
    num_context = np.zeros(int(rows.max()) + 1, dtype=np.int64)
    # A window with context fills its row alone; rows shared by short documents have none.
    num_context[rows[ordinal > 0]] = (scored_before - start)[ordinal > 0]
    return build_packing(pieces, rows, sequence_length), num_context
