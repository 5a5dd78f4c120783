"""Batches from a stream: documents one behind the other, cut every T tokens; what `PackedBatches` is for prepared data.

Shapes: B per_device_batch_size, T sequence_length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tercet.training.batches import Batch
from tercet.training.errors import UserError
from tercet.training.stream_order import Row, StreamOrder


class StreamBatches:
    """This rank's batches of a stream, without end and without padding; `StreamOrder` says what a stream guarantees.

    The state names the document that the last batch ended in and how many of its tokens have been handed out: going on
    reads that document again, and no token is lost or repeated.
    """

    def __init__(
        self,
        order: StreamOrder,
        encode: Callable[[Row], Sequence[int]],
        *,
        sequence_length: int,
        per_device_batch_size: int,
        eos_token_id: int,
    ) -> None:
        """
        Args:
            order: Gives the rows of this rank.
            encode: The token ids of a row's text, without an end-of-text token.
            eos_token_id: Starts every document as input and ends it as label.
        """
        self.order, self.encode, self.eos_token_id = order, encode, eos_token_id
        self.shape = (per_device_batch_size, sequence_length)
        self._state = {"stream": order.state_dict(), "tokens": 0}

    def __iter__(self) -> Iterator[Batch]:
        """Batches from where the state stands: `input_ids`, `shift_labels`, `position_ids`, each int64 (B, T).

        Raises:
            DataError: A source that gives this rank no row.
            UserError: The document that the state ended in has become shorter.
        """
        num_slots, length = self.shape[0] * self.shape[1], self.shape[1]
        done, at, batch = int(self._state["tokens"]), 0, self._empty()
        rows = iter(self.order)
        while True:
            before = self.order.state_dict()
            stored = np.append(np.asarray(self.encode(next(rows).row), dtype=np.int64), self.eos_token_id)
            if done > len(stored):
                raise UserError(
                    f"the stream went on in a document of {len(stored)} tokens of which {done} had been read: the data "
                    "or the tokenizer has changed. Start anew"
                )
            inputs = np.append(self.eos_token_id, stored[:-1])
            while done < len(stored):
                size = min(length - at % length, len(stored) - done)
                for name, values in (
                    ("input_ids", inputs[done : done + size]),
                    ("shift_labels", stored[done : done + size]),
                    ("position_ids", np.arange(size)),
                ):
                    batch[name].view(-1)[at : at + size] = torch.from_numpy(values)
                done, at = done + size, at + size
                if at == num_slots:
                    self._state = {"stream": before, "tokens": done}
                    yield batch
                    at, batch = 0, self._empty()
            done = 0

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of this rank goes on from behind the last batch handed out; numbers, for JSON."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch after which the state was taken; for iterators made from now on.

        Raises:
            UserError: The state of another rank, world size, seed, or of other sources; see `StreamOrder`.
        """
        self.order.load_state_dict(state["stream"])
        self._state = dict(state)

    def _empty(self) -> Batch:
        return {name: torch.empty(self.shape, dtype=torch.int64) for name in _NAMES}


_NAMES = ("input_ids", "shift_labels", "position_ids")
