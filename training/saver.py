"""When the loop saves: it stands still for a copy of the state, and a thread writes it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch import nn

from tercet.training.agreement import Agreement
from tercet.training.checkpoints import checkpoint_path
from tercet.training.ema import WeightAverage
from tercet.training.errors import UserError
from tercet.training.recipe import TrainingSection
from tercet.training.retention import Retention
from tercet.training.run_state import RunState
from tercet.training.saving import CheckpointWriter, Measure, WriteModel, raise_failure
from tercet.training.snapshot import SnapshotTaker

# Before a save has been seen: weights and two moments at the speed of a slow disk.
_GUESSED_BYTES_PER_SECOND = 200e6
_GUESSED_BYTES_PER_PARAMETER = 12


class Saver:
    """Saves a run. Inside `with`, whatever ends it waits for the checkpoint that is being written.

    Args:
        training: The recipe's section: what to keep.
        output_dir: Of the run.
        model: Unwrapped.
        optimizers: Of its parameters.
        average: Of the weights, if the run keeps one.
        accelerator: All of its processes make a Saver and call its methods at the same steps.
        agreement: Between them.
        write_model: Writes the folder that transformers loads.
        on_written: Called in the main process, in another thread, with every checkpoint that is whole.

    Attributes:
        newest: The newest checkpoint, which may still be on its way to the disk.
        longest_s: Seconds that the slowest save took, until it was on the disk; a guess before the first.
        stalled_s: Seconds that training stood still for saves.
    """

    def __init__(
        self,
        training: TrainingSection,
        output_dir: Path,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        average: WeightAverage | None,
        accelerator: Accelerator,
        agreement: Agreement,
        write_model: WriteModel,
        on_written: Callable[[Path], None] | None = None,
    ) -> None:
        self._output_dir, self._agreement, self._is_main = output_dir, agreement, accelerator.is_main_process
        self._taker = SnapshotTaker(model, optimizers, accelerator, average)
        retention = Retention(training.keep_last, training.keep_every, training.keep_best)
        self._writer = CheckpointWriter(output_dir, write_model, retention, on_written)
        self._guess_s = (
            sum(parameter.numel() for parameter in model.parameters())
            * _GUESSED_BYTES_PER_PARAMETER
            / _GUESSED_BYTES_PER_SECOND
        )
        self._longest_copy_s = self.stalled_s = 0.0
        self.newest: Path | None = None

    @property
    def longest_s(self) -> float:
        """See the class."""
        return self._longest_copy_s + self._writer.longest_s if self._writer.longest_s else self._guess_s

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer.is_busy

    @property
    def has_failed(self) -> bool:
        """Whether a checkpoint could not be written; known to the main process alone."""
        return self._writer.error is not None

    def save(
        self,
        state: RunState,
        positions: list[dict[str, Any]] | None = None,
        *,
        is_final: bool,
        measure: Measure | None = None,
    ) -> None:
        """Copy the state, and let it be written; `is_final` waits until it is on the disk.

        Args:
            positions: Of each process in its stream; None where the data was prepared.
            measure: Says what was measured up to this state; called in another thread.

        Raises:
            UserError: This one, or the one before, could not be written.
        """
        started = time.perf_counter()
        self._writer.finish()
        self.check()
        copying = time.perf_counter()
        snapshot = self._taker.take(state, positions)
        self._longest_copy_s = max(self._longest_copy_s, time.perf_counter() - copying)
        if snapshot is not None:
            self._writer.start(snapshot, measure)
        self.newest = checkpoint_path(self._output_dir, state.step)
        if is_final:
            self._writer.finish()
            self.check()
        self.stalled_s += time.perf_counter() - started

    def check(self) -> None:
        """End all processes if a checkpoint could not be written; all of them call this."""
        message = self._agreement.text_of_main(self._writer.failure())
        if message:
            raise_failure(message, self._writer.error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C for the second time acts at once
        self._writer.finish()
        # Where the run ends well, it has saved last and looked; an error of its own goes first, and must not hide this.
        if isinstance(error, UserError) and (failure := self._writer.failure()) and failure not in str(error):
            raise UserError(f"{error}; besides, {failure}") from error
