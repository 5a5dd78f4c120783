"""The steps of a run that trains on a stream: its batches by their number, and the state that belongs to each.

Batches are made ahead, so the stream is always further than the run. What a checkpoint keeps is the state behind the
last step that was handed out.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tercet.training.batch_sizes import BatchSizes
from tercet.training.batches import Batch
from tercet.training.packing import document_bounds
from tercet.training.step_batches import Piece
from tercet.training.stream_batches import StreamBatches
from tercet.training.stream_documents import StreamDocuments

# Of so many steps it is remembered where they began; the loop asks about none that lies further back.
_MAX_REMEMBERED = 1100
_SHOWN_TOKENS = 40


class Reading(NamedTuple):
    """A stream in the course of being read; `batches` encode by `documents`."""

    batches: StreamBatches
    documents: StreamDocuments


class _Step(NamedTuple):
    micro_batches: list[Batch]
    before: dict[str, Any]
    after: dict[str, Any]


class StreamSteps:
    """This process's batches of every step of a stream; `StepBatches` for the training loop."""

    def __init__(
        self,
        open_reading: Callable[[], Reading],
        *,
        sizes: BatchSizes,
        rows_at_once: int,
        with_document_bounds: bool = False,
    ) -> None:
        """
        Args:
            open_reading: Begins to read the stream; called again to read a step's documents a second time.
            sizes: Rows of the global batch at every step.
            rows_at_once: Rows in a micro-batch of all processes together.
            with_document_bounds: Batches also hold what varlen attention takes.
        """
        self._open, self._sizes, self._rows_at_once = open_reading, sizes, rows_at_once
        self._with_document_bounds = with_document_bounds
        self._reading = open_reading()
        self._state = self._state_of_reading()
        self._begun: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_MAX_REMEMBERED)

    def steps(self, start: int, stop: int, *, ahead: int = 2) -> Iterator[list[Batch]]:
        """The micro-batches of steps start <= s < stop, made by a thread `ahead` steps in front.

        `start` is the step that the state stands at.

        Raises:
            DataError: The stream cannot be read on.
        """
        batches = iter(self._reading.batches)
        with closing(batches), ThreadPoolExecutor(max_workers=1, thread_name_prefix="tercet-stream") as executor:
            waiting: deque[Future[_Step]] = deque()
            try:
                for step in range(start, stop):
                    waiting.append(executor.submit(self._read, batches, step))
                    if len(waiting) > ahead:
                        yield self._hand_out(step - ahead, waiting.popleft().result())
                while waiting:
                    yield self._hand_out(stop - len(waiting), waiting.popleft().result())
            finally:
                for future in waiting:
                    future.cancel()

    def describe(self) -> str:
        """See `StepBatches`."""
        return "a stream, documents one behind the other, no padding"

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands behind the step handed out last, and what was read until then; for JSON."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; for `steps` called from now on.

        Raises:
            UserError: The state of another process, number of processes, seed, or of other sources.
        """
        _load(self._reading, state)
        self._state = dict(state)

    def pieces(self, step: int) -> list[list[Piece]]:
        """The rows of a step by their documents; reads the stream again from where the step began.

        Raises:
            DataError: It cannot be read.
        """
        reading = self._open()
        _load(reading, next(state for begun, state in self._begun if begun == step))
        rows, batches = [], iter(reading.batches)
        for _ in range(self._accumulation_steps(step)):
            batch = next(batches)
            documents = iter(reading.batches.documents)
            for row in range(len(batch["position_ids"])):
                (starts,) = torch.nonzero(batch["position_ids"][row] == 0, as_tuple=True)
                bounds = [*starts.tolist(), batch["position_ids"].shape[1]]
                rows.append([])
                for first, end in pairwise(bounds):
                    part = {name: tensor[row : row + 1, first:end] for name, tensor in batch.items()}
                    begins = part["input_ids"][0, 1 : 1 + _SHOWN_TOKENS].numpy()
                    rows[-1].append(Piece(next(documents).row.place, begins, part))
        return rows

    def _read(self, batches: Iterator[Batch], step: int) -> _Step:
        before = self._state_of_reading()
        micro_batches = [next(batches) for _ in range(self._accumulation_steps(step))]
        if self._with_document_bounds:
            micro_batches = [{**batch, **document_bounds(batch["position_ids"])} for batch in micro_batches]
        return _Step(micro_batches, before, self._state_of_reading())

    def _hand_out(self, step: int, read: _Step) -> list[Batch]:
        self._begun.append((step, read.before))
        self._state = read.after
        return read.micro_batches

    def _accumulation_steps(self, step: int) -> int:
        return self._sizes.at(step) // self._rows_at_once

    def _state_of_reading(self) -> dict[str, Any]:
        return {**self._reading.batches.state_dict(), "read": self._reading.documents.state_dict()}


def _load(reading: Reading, state: Mapping[str, Any]) -> None:
    reading.batches.load_state_dict({name: value for name, value in state.items() if name != "read"})
    reading.documents.load_state_dict(state["read"])
