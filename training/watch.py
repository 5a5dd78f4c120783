"""What steps measured, read from the device seldom; losses out of the ordinary; documents that no step survives."""

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import PreTrainedTokenizerFast

from tercet.training.step import StepResult
from tercet.training.step_batches import Piece, StepBatches

_INPUTS = ("input_ids", "shift_labels", "position_ids")
_MAX_NAMED = 3
_MAX_SHOWN_CHARS = 40


@dataclass(frozen=True)
class StepReading:
    """What a step measured, as numbers; see `StepResult`. `step` counts from 1."""

    step: int
    loss_nats: float
    grad_norm: float
    num_tokens: int
    is_finite: bool


class PendingSteps:
    """Results of steps that the host has not asked for yet.

    Asking makes the host wait until the device has done all that it was told; between logged steps a GPU so has its
    next work waiting.
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._results: list[StepResult] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, result: StepResult) -> None:
        """Take in the result of a step, on the device."""
        self._steps.append(step)
        self._results.append(result)

    def read(self) -> list[StepReading]:
        """All results since the last call, in order; one transfer from the device for each quantity."""
        if not self._steps:
            return []
        columns = [
            torch.stack([getattr(result, name) for result in self._results]).tolist()
            for name in ("loss_nats", "grad_norm", "num_tokens", "is_finite")
        ]
        readings = [
            StepReading(step, float(loss), float(norm), int(tokens), bool(finite))
            for step, loss, norm, tokens, finite in zip(self._steps, *columns, strict=True)
        ]
        self._steps, self._results = [], []
        return readings


class SpikeWatch:
    """Finds losses far above the recent ones.

    A loss is a spike if it lies more than `factor` robust standard deviations above the median of the last 100: 1.4826
    times their median distance from it, which one spike, or ten, do not move.

    Args:
        factor: The recipe's `training.spike_factor`.
        losses: Of the logged steps before, oldest first.
    """

    _WINDOW, _ENOUGH = 100, 20

    def __init__(self, factor: float, losses: Iterable[float] = ()) -> None:
        self._factor = factor
        self._losses = deque(losses, maxlen=self._WINDOW)

    def median_below(self, loss: float) -> float | None:
        """The recent median if this loss is a spike over it, else None; the loss then is one of the recent ones."""
        spike_over = None
        if len(self._losses) >= self._ENOUGH:
            median = statistics.median(self._losses)
            deviation = 1.4826 * statistics.median(abs(other - median) for other in self._losses)
            # Losses that are all but equal have no deviation to speak of.
            if loss - median > self._factor * max(deviation, 1e-3 * abs(median)):
                spike_over = median
        self._losses.append(loss)
        return spike_over


@torch.no_grad()
def describe_bad_step(
    model: nn.Module, batches: StepBatches, step: int, accelerator: Accelerator, tokenizer: PreTrainedTokenizerFast
) -> str:
    """Which documents of a step have a loss that is not finite, in words; all processes call this.

    Rows are read again one by one, and of those that are not finite each document by itself: what is not a number
    spreads through a row, masked or not. Where each row's loss is finite, as when only the gradient overflows, or
    none's is, as when the weights themselves are broken, the step's first documents are named.

    Args:
        model: Unwrapped.
        step: Counted from 0.
    """
    # The rows of a sharded model are read in step, so each process looks at as many: all have as many rows.
    rows = batches.pieces(step)
    whole = [{name: torch.cat([piece.batch[name] for piece in row], 1) for name in _INPUTS} for row in rows]
    is_bad = [not _is_finite(model, batch, accelerator) for batch in whole]
    suspects = [piece for row, bad in zip(rows, is_bad, strict=True) if bad for piece in row]
    counts = torch.tensor([[sum(is_bad), len(is_bad), len(suspects)]], device=accelerator.device)
    num_bad, num_rows, _ = (counts := cast(torch.Tensor, accelerator.gather(counts))).sum(0).tolist()
    if num_bad in (0, num_rows):
        which = "the loss of every row is not finite" if num_bad else "the loss of every row by itself is finite"
        first = [piece for row in rows for piece in row][:_MAX_NAMED]
        return f"{which}; the step began with {_in_words([_name(piece, tokenizer) for piece in first])}"
    found = []
    for index in range(int(counts[:, 2].max())):
        piece = suspects[index] if index < len(suspects) else rows[0][0]
        if not _is_finite(model, piece.batch, accelerator):
            found.append(_name(piece, tokenizer))
    return f"the loss is not finite in {_in_words(gather_object(found))}"


def _is_finite(model: nn.Module, batch: dict[str, torch.Tensor], accelerator: Accelerator) -> bool:
    batch = {name: batch[name].to(accelerator.device) for name in _INPUTS}
    with accelerator.autocast():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    nats = F.cross_entropy(logits.flatten(0, 1).float(), batch["shift_labels"].flatten(), reduction="sum")
    return bool(torch.isfinite(nats))


def _name(piece: Piece, tokenizer: PreTrainedTokenizerFast) -> str:
    """Where the document is, and how it begins."""
    text = " ".join(str(tokenizer.decode(piece.start_ids.tolist())).split())
    return f"{piece.document} ({text[:_MAX_SHOWN_CHARS]!r})"


def _in_words(names: Sequence[str]) -> str:
    """The first few of them, each once."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _MAX_NAMED} more" if len(distinct) > _MAX_NAMED else ""
    return ", ".join(distinct[:_MAX_NAMED]) + more
