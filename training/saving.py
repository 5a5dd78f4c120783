"""Checkpoints are written by a thread of their own, from a snapshot, while training goes on."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from tercet.training.atomic import TEMPORARY_PREFIX, is_disk_full, make_readable, system_errors
from tercet.training.checkpoints import (
    AVERAGES_NAME,
    CHECKPOINTS,
    RUN_NAME,
    STATE,
    checkpoint_path,
    list_checkpoints,
    optimizer_name,
    position_name,
    random_state_name,
    step_of,
)
from tercet.training.errors import UserError
from tercet.training.manifest import write_manifest
from tercet.training.results import RESULTS_NAME, RunResults
from tercet.training.retention import Retention
from tercet.training.snapshot import Snapshot

WriteModel = Callable[[Path, dict[str, torch.Tensor]], None]
"""Writes the folder that transformers loads, from weights as `state_dict` names them."""

Measure = Callable[[], RunResults]
"""Says what was measured up to a checkpoint."""


class CheckpointWriter:
    """Writes one checkpoint at a time behind the training's back. Used by the main process.

    Args:
        output_dir: Of the run.
        write_model: Called in the thread.
        retention: Applied once a checkpoint is whole.
        on_written: Called in the thread with a whole checkpoint, before older ones are removed.

    Attributes:
        error: Of the last checkpoint, if it could not be written.
        longest_s: Seconds that the slowest one took.
    """

    def __init__(
        self,
        output_dir: Path,
        write_model: WriteModel,
        retention: Retention,
        on_written: Callable[[Path], None] | None = None,
    ) -> None:
        self._output_dir, self._write_model, self._retention = output_dir, write_model, retention
        self._on_written = on_written
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.longest_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, snapshot: Snapshot, measure: Measure | None = None) -> None:
        """Begin to write. The one before must have ended: its memory is the snapshot's.

        Args:
            measure: Called in the thread; what it returns is written beside the weights.
        """
        assert not self.is_busy, "a snapshot was taken while another was being written"
        # A daemon: a second Ctrl-C ends the process at once, and what is half-written has another name.
        self._thread = threading.Thread(target=self._write, args=(snapshot, measure), name="tercet-save", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until nothing is being written; see `error` for how it ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failure(self) -> str:
        """The error in one line, empty if there is none."""
        if self.error is None:
            return ""
        kept = list_checkpoints(self._output_dir)
        reason, remedy = " ".join(str(self.error).split())[:200], "remove the reason"
        if is_disk_full(self.error):
            reason, remedy = "the disk is full", "free some space"
        elif errno.EFBIG in system_errors(self.error):
            reason = "a file became larger than this shell (ulimit -f) or the file system takes"
            remedy = "raise the limit"
        return (
            f"a checkpoint could not be saved in {self._output_dir / CHECKPOINTS}: {reason}; {remedy} and run the same "
            f"command again, which goes on from {kept[-1].name if kept else 'the start'}"
        )

    def _write(self, snapshot: Snapshot, measure: Measure | None) -> None:
        started = time.perf_counter()
        try:
            folder = write_checkpoint(self._output_dir, snapshot, self._write_model, measure)
            if self._on_written is not None:
                self._on_written(folder)
            remove_old(self._output_dir, self._retention, snapshot.state.best_step)
        except BaseException as error:
            self.error = error
        self.longest_s = max(self.longest_s, time.perf_counter() - started)


def raise_failure(message: str, error: BaseException | None) -> None:
    """What every process raises when a checkpoint could not be written; a bug of ours as itself, where it happened."""
    if error is not None and not isinstance(error, OSError) and not system_errors(error):
        raise error
    raise UserError(message) from error


def write_checkpoint(
    output_dir: Path, snapshot: Snapshot, write_model: WriteModel, measure: Measure | None = None
) -> Path:
    """Write one checkpoint, whole or not at all.

    It is written under another name, described by a manifest, synced and renamed.
    """
    folder = checkpoint_path(output_dir, snapshot.state.step)
    temporary = folder.with_name(TEMPORARY_PREFIX + folder.name)
    _remove_unfinished(output_dir)
    try:
        (temporary / STATE).mkdir(parents=True)
        write_model(temporary, snapshot.weights)
        if measure is not None:
            measure().save(temporary / RESULTS_NAME)
        _write_state(temporary / STATE, snapshot)
        make_readable(temporary)
        write_manifest(temporary, STATE)
        _sync_tree(temporary)
        if folder.exists():
            _remove(folder)
        os.replace(temporary, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk the space is wanted
        raise
    return folder


def remove_old(output_dir: Path, retention: Retention, best_step: int | None) -> None:
    """Remove the checkpoints that a recipe does not want kept."""
    for step in retention.to_remove(map(step_of, list_checkpoints(output_dir)), best_step):
        _remove(checkpoint_path(output_dir, step))


def _write_state(folder: Path, snapshot: Snapshot) -> None:
    for index, tensors in enumerate(snapshot.optimizers):
        save_file(tensors, folder / optimizer_name(index))
    for rank, tensors in enumerate(snapshot.random_states):
        save_file(tensors, folder / random_state_name(rank))
    for rank, position in enumerate(snapshot.positions or ()):
        (folder / position_name(rank)).write_text(json.dumps(position) + "\n", encoding="utf-8")
    if snapshot.averages is not None:
        save_file(snapshot.averages, folder / AVERAGES_NAME)
    (folder / RUN_NAME).write_text(json.dumps(asdict(snapshot.state), indent=2) + "\n", encoding="utf-8")


def _remove(folder: Path) -> None:
    # Renamed first: a kill in between must not leave a torn folder under a checkpoint's name.
    doomed = folder.with_name(f"{TEMPORARY_PREFIX}old-{folder.name}")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def _remove_unfinished(output_dir: Path) -> None:
    for path in (output_dir / CHECKPOINTS).glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root, name))
        _sync(Path(root))


def _sync(path: Path) -> None:
    """Ask the system to put a file's content, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
