"""What the training loop asks of its batches, whether they come from prepared data or from a stream.

Shapes: B per_device_batch_size, T sequence_length, n tokens of a piece.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np


class Piece(NamedTuple):
    """A document's part of a row.

    Attributes:
        document: Under which a user finds the document.
        start_ids: The tokens that it, or its part, begins with.
        batch: `input_ids`, `shift_labels` and `position_ids` of the part, (1, n).
    """

    document: str
    start_ids: np.ndarray
    batch: dict[str, Any]


class StepBatches(Protocol):
    """One process's batches of every step."""

    def steps(self, start: int, stop: int) -> Iterator[list[dict[str, Any]]]:
        """The micro-batches of steps start <= s < stop, tensors (B, T), made ahead of being asked for.

        Raises:
            DataError: They cannot be read.
        """
        ...

    def describe(self) -> str:
        """What an epoch of them is, for the opening line."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """What goes on behind the step that `steps` gave last, for JSON; None where a step's number says it all."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            UserError: It is of other data, another process, or another number of them.
        """
        ...

    def pieces(self, step: int) -> list[list[Piece]]:
        """The rows of a step that `steps` gave not long ago, each by its documents; made again."""
        ...
