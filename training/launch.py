"""Where a run computes: device, precision, processes, trackers; checked before anything is written.

Several processes come from a launcher (torchrun, accelerate launch). Accelerate reads the launcher's environment, and
ignores some of what it finds there; what a run does not follow is refused or said here, never passed over.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

from tercet.training.agreement import COLLECTIVE_TIMEOUT
from tercet.training.allocator import keep_freed_memory
from tercet.training.counts import counted
from tercet.training.errors import UserError
from tercet.training.hardware import supports_bfloat16
from tercet.training.recipe import Recipe
from tercet.training.run_folder import TRACKERS_NAME

_BY_TORCHRUN = "torchrun --nproc_per_node N -m tercet.training RECIPE"
_REFUSED_PLUGINS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
# What starts several processes has told them so by one of these.
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def follow_launcher(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> tuple[Recipe, list[str]]:
    """The recipe with what the launcher's settings ask for, and a line for each setting that is not followed.

    Raises:
        UserError: The launcher asks for what a run cannot do, or started other processes than it was told to.
    """
    _check_launcher(environment)
    lines = []
    if _is_set(environment, "ACCELERATE_USE_FSDP"):
        lines.append(_check_fsdp(environment))
        recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"sharding": "full"})})
    asked = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked in ("fp16", "fp8") or (asked == "bf16" and not _computes_in_bfloat16(recipe)):
        lines.append(
            f"accelerate's mixed_precision {asked} is not used: training.precision ({recipe.training.precision}) "
            f"says {'bfloat16' if _computes_in_bfloat16(recipe) else 'float32'} on this device"
        )
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() not in ("no", ""):
        lines.append("accelerate's dynamo_backend is not used: training.compile decides")
    if environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
        lines.append(
            "accelerate's gradient_accumulation_steps is not used: it follows from training.global_batch_size, "
            "training.per_device_batch_size and the number of processes"
        )
    return recipe, lines


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1", "yes", "on")


def _check_launcher(environment: Mapping[str, str]) -> None:
    for name, plugin in _REFUSED_PLUGINS.items():
        if _is_set(environment, name):
            raise UserError(
                f"accelerate was configured with {plugin}, which Tercet does not train with: use DDP or FSDP2 "
                "(recipes/accelerate has both), or torchrun with --set training.sharding=full"
            )
    if any(name in environment for name in _WORLD_SIZES):
        return
    # Accelerate's launcher for CPUs starts one process whatever it is told; this is the trace that it leaves.
    if _is_set(environment, "ACCELERATE_USE_CPU") and "MASTER_ADDR" in environment:
        raise UserError(
            "accelerate launch was asked for several processes on CPUs and started one (MASTER_ADDR is set, WORLD_SIZE "
            f"is not): use {_BY_TORCHRUN}"
        )
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_PROCID" in environment and tasks.isdigit() and int(tasks) > 1:
        raise UserError(
            f"srun started {tasks} tasks that do not know of each other (WORLD_SIZE is not set): start one torchrun a "
            "node, as recipes/slurm.sh does"
        )


def _check_fsdp(environment: Mapping[str, str]) -> str:
    """What to say of an FSDP config of accelerate's."""
    if environment.get("FSDP_VERSION", "1") != "2":
        raise UserError(
            "accelerate was configured with FSDP 1, which torch has deprecated: write fsdp_version: 2 into the config, "
            "or start with --set training.sharding=full and no FSDP config"
        )
    if _is_set(environment, "FSDP_OFFLOAD_PARAMS"):
        raise UserError(
            "accelerate was configured with fsdp_offload_params, which Tercet does not do: remove it and use more "
            "processes, or training.gradient_checkpointing"
        )
    ignored = []
    if _is_set(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        ignored.append("fsdp_activation_checkpointing (set training.gradient_checkpointing)")
    if environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        ignored.append("fsdp_reshard_after_forward: false")
    return (
        "accelerate's FSDP config is read as training.sharding: full; Tercet shards every block itself, on CPUs as on "
        f"GPUs; not used: {', '.join(ignored) or 'wrapping policy, state dict type, prefetching'}"
    )


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Device, precision and processes of a run.

    Raises:
        UserError: A device that is not there, a precision that it does not compute in, a tracker that is not
            installed, or a global batch that does not divide among the processes.
    """
    training = recipe.training
    if training.num_threads is not None:
        torch.set_num_threads(training.num_threads)
    if training.device == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device is cuda and no CUDA device is there: use --set training.device=cpu")
    if training.device == "cuda" and _uses_cpu(recipe):
        raise UserError(
            "training.device is cuda and accelerate was told to use the CPU (ACCELERATE_USE_CPU): launch without "
            "--cpu, or use --set training.device=cpu"
        )
    for tracker in training.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise UserError(f"training.trackers names {tracker}, which is not installed: pip install 'tercet[track]'")
    if training.precision == "bfloat16" and not supports_bfloat16(_uses_cpu(recipe)):
        raise UserError(
            "training.precision is bfloat16, which this device only emulates, some 50 times slower than float32: "
            "use --set training.precision=float32"
        )
    _check_gpus(recipe)
    if _uses_cpu(recipe):
        keep_freed_memory()
    # Sharding is Tercet's own (sharding.py), and the launcher's plugin refuses a model that is sharded already.
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    accelerator = Accelerator(
        cpu=_uses_cpu(recipe),
        mixed_precision="bf16" if _computes_in_bfloat16(recipe) else "no",
        log_with=list(training.trackers) or None,
        project_dir=str(folder / TRACKERS_NAME) if training.trackers else None,
        dynamo_backend="no",
        # Given, or a number in the environment would divide every loss once more.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
    )
    _check_processes(recipe, accelerator.num_processes)
    return accelerator


def _uses_cpu(recipe: Recipe) -> bool:
    # `accelerate launch --cpu` has the last word in Accelerate, whatever the recipe says.
    is_told = _is_set(os.environ, "ACCELERATE_USE_CPU")
    return recipe.training.device == "cpu" or is_told or not torch.cuda.is_available()


def _computes_in_bfloat16(recipe: Recipe) -> bool:
    precision, use_cpu = recipe.training.precision, _uses_cpu(recipe)
    return precision == "bfloat16" or (precision == "auto" and not use_cpu and supports_bfloat16(use_cpu))


def _check_gpus(recipe: Recipe) -> None:
    """Two processes on one GPU wait for each other forever in NCCL."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not _uses_cpu(recipe) and local > torch.cuda.device_count():
        raise UserError(
            f"{local} processes were started on this machine and each sees "
            f"{counted(torch.cuda.device_count(), 'GPU')}: start one a GPU, all of them visible to each"
        )


def _check_processes(recipe: Recipe, num_processes: int) -> None:
    started = next((int(os.environ[name]) for name in _WORLD_SIZES if name in os.environ), 1)
    if num_processes != started:
        raise UserError(
            f"{started} processes were started and accelerate sees {num_processes}: start them with {_BY_TORCHRUN}"
        )
    training = recipe.training
    at_once = training.per_device_batch_size * num_processes
    sizes = {"training.global_batch_size": training.global_batch_size}
    for stage in training.batch_size_warmup:
        sizes[f"training.batch_size_warmup until step {stage.until_step}"] = stage.global_batch_size
    for name, size in sizes.items():
        if size % at_once:
            raise UserError(
                f"{name} ({size}) is not a multiple of training.per_device_batch_size "
                f"({training.per_device_batch_size}) x {num_processes} processes: "
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
