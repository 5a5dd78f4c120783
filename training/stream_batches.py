"""Batches from a stream: documents one behind the other, cut every T tokens; what `PackedBatches` is for prepared data.

Shapes: B per_device_batch_size, T sequence_length, N stored tokens of a document, its end of text included.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tercet.training.batches import Batch
from tercet.training.documents import DataError
from tercet.training.errors import UserError
from tercet.training.packing import IGNORE_INDEX
from tercet.training.stream_order import Row, StreamedRow, StreamOrder


class StreamedTokens(NamedTuple):
    """A document of which not every token is a label.

    Attributes:
        ids: Without an end-of-text token.
        is_label: Which of them are labels; the end of text behind them then is none.
    """

    ids: Sequence[int] | np.ndarray
    is_label: Sequence[bool] | np.ndarray


class StreamBatches:
    """This rank's batches of a stream, without end and without padding; `StreamOrder` says what a stream guarantees.

    The state names the document that the last batch ended in and how many of its tokens have been handed out: going on
    reads that document again, and no token is lost or repeated.

    Attributes:
        documents: Rows that the pieces of the last batch are of, in their order; every piece begins with position 0.
    """

    def __init__(
        self,
        order: StreamOrder,
        encode: Callable[[Row], Sequence[int] | np.ndarray | StreamedTokens | None],
        *,
        sequence_length: int,
        per_device_batch_size: int,
        eos_token_id: int,
        on_end: Callable[[StreamedRow], None] | None = None,
    ) -> None:
        """
        Args:
            order: Gives the rows of this rank.
            encode: The token ids of a row's text, without an end-of-text token; None leaves the row out.
            eos_token_id: Starts every document as input and ends it as label.
            on_end: Called with every document whose last token has been handed out.
        """
        self.order, self.encode, self.eos_token_id, self.on_end = order, encode, eos_token_id, on_end
        self.shape = (per_device_batch_size, sequence_length)
        self.documents: list[StreamedRow] = []
        self._state = {"stream": order.state_dict(), "tokens": 0}

    def __iter__(self) -> Generator[Batch]:
        """Batches from where the state stands: `input_ids`, `shift_labels`, `position_ids`, each int64 (B, T).

        Raises:
            DataError: A source that gives this rank no document in a whole epoch.
            UserError: The document that the state ended in has become shorter.
        """
        num_slots, length = self.shape[0] * self.shape[1], self.shape[1]
        done, at, batch = int(self._state["tokens"]), 0, self._empty()
        self.documents = []
        for before, item, inputs, labels in self._documents():
            if done > len(labels):
                raise UserError(
                    f"the stream went on in a document of {len(labels)} tokens of which {done} had been read: the data "
                    "or the tokenizer has changed. Start anew"
                )
            while done < len(labels):
                size = min(length - at % length, len(labels) - done)
                for name, values in (
                    ("input_ids", inputs[done : done + size]),
                    ("shift_labels", labels[done : done + size]),
                    ("position_ids", np.arange(size)),
                ):
                    batch[name].view(-1)[at : at + size] = torch.from_numpy(values)
                self.documents.append(item)
                done, at = done + size, at + size
                if at == num_slots:
                    self._state = {"stream": self.order.state_dict(before), "tokens": done}
                    yield batch
                    at, batch, self.documents = 0, self._empty(), []
            done = 0
            if self.on_end is not None:
                self.on_end(item)

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

    def _documents(self) -> Iterator[tuple[dict[str, Any], StreamedRow, np.ndarray, np.ndarray]]:
        """Documents with the positions before them, and their inputs and labels, int64 (N,)."""
        found_in: dict[str, int] = {}
        rows = iter(self.order)
        while True:
            before = self.order.positions()
            item = next(rows)
            tokens = self.encode(item.row)
            if tokens is None:
                # A source of nothing but rows that are left out would be read for ever.
                if item.epoch > found_in.setdefault(item.source, item.epoch) + 1:
                    raise DataError(
                        f"source {item.source} gives rank {self.order.rank} of {self.order.world_size} no document in "
                        "a whole epoch: all of its rows are left out. Use fewer processes, or another source."
                    )
                continue
            found_in[item.source] = item.epoch
            ids, is_label = tokens if isinstance(tokens, StreamedTokens) else (tokens, None)
            stored = np.append(np.asarray(ids, dtype=np.int64), self.eos_token_id)
            labels = stored
            if is_label is not None:
                labels = np.where(np.append(np.asarray(is_label, dtype=bool), False), stored, IGNORE_INDEX)
            yield before, item, np.append(self.eos_token_id, stored[:-1]), labels

    def _empty(self) -> Batch:
        return {name: torch.empty(self.shape, dtype=torch.int64) for name in _NAMES}


_NAMES = ("input_ids", "shift_labels", "position_ids")
