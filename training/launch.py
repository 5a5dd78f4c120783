"""Where a run computes: device, precision, processes, trackers; checked before anything is written."""

import importlib.util
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from tercet.training.errors import UserError
from tercet.training.hardware import supports_bfloat16
from tercet.training.recipe import Recipe
from tercet.training.run_folder import TRACKERS_NAME


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Device, precision and processes of a run.

    Raises:
        UserError: A device that is not there, a precision that it does not compute in, a tracker that is not
            installed, or a global batch that does not divide among the processes.
    """
    training = recipe.training
    if training.num_threads is not None:
        torch.set_num_threads(training.num_threads)
    has_cuda = torch.cuda.is_available()
    if training.device == "cuda" and not has_cuda:
        raise UserError("training.device is cuda and no CUDA device is there: use --set training.device=cpu")
    for tracker in training.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise UserError(f"training.trackers names {tracker}, which is not installed: pip install 'tercet[track]'")
    use_cpu = training.device == "cpu" or not has_cuda
    can_bfloat16 = supports_bfloat16(use_cpu)
    if training.precision == "bfloat16" and not can_bfloat16:
        raise UserError(
            "training.precision is bfloat16, which this device only emulates, some 50 times slower than float32: "
            "use --set training.precision=float32"
        )
    bfloat16 = training.precision == "bfloat16" or (training.precision == "auto" and not use_cpu and can_bfloat16)
    accelerator = Accelerator(
        cpu=use_cpu,
        mixed_precision="bf16" if bfloat16 else "no",
        log_with=list(training.trackers) or None,
        project_dir=str(folder / TRACKERS_NAME) if training.trackers else None,
        # The other processes wait while the first one tokenizes a corpus, which may take hours.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=12))],
    )
    _check_processes(recipe, accelerator.num_processes)
    return accelerator


def _check_processes(recipe: Recipe, num_processes: int) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes != started:
        raise UserError(
            f"{started} processes were started and accelerate sees {num_processes}: "
            "on CPUs start them with torchrun --nproc_per_node"
        )
    training = recipe.training
    if training.global_batch_size % (training.per_device_batch_size * num_processes):
        raise UserError(
            f"training.global_batch_size ({training.global_batch_size}) is not a multiple of "
            f"training.per_device_batch_size ({training.per_device_batch_size}) x {num_processes} processes: "
            "choose a smaller training.per_device_batch_size"
        )


def start_trackers(recipe: Recipe, accelerator: Accelerator) -> None:
    """Open the recipe's trackers, with the recipe as the run's settings."""
    if recipe.training.trackers:
        accelerator.init_trackers("tercet", config=_flatten(recipe.model_dump(mode="json")))


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of plain values, which is all that trackers take."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat
