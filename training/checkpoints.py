"""Checkpoints: a folder that transformers loads, with all that a run needs to go on from exactly there.

    checkpoints/step-00000200/       config.json, model.safetensors, tokenizer, code: a model like any other
        state/run.json               step, tokens, seconds of training, number of processes, best evaluation
        state/optimizer-0.safetensors state of the first optimizer, by parameter name, and so on
        state/rng-0.safetensors      random state of process 0, and so on
        state/stream-0.json          where process 0 stands in the stream that the run trains on, if it does, and so on
        state/ema.safetensors        running average of the weights, by parameter name, if the run keeps one
        state/manifest.json          size and SHA-256 of every file, also of the model's

Tensors are whole, so a run on prepared data goes on with another number of processes, sharded or not. Nothing is
pickled.
`tercet.training.saving` writes them.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from tercet.training.counts import counted
from tercet.training.ema import WeightAverage
from tercet.training.errors import UserError
from tercet.training.manifest import DamagedError, check_manifest
from tercet.training.run_state import RunState
from tercet.training.sharding import part_like
from tercet.training.snapshot import restore_random_state

CHECKPOINTS = "checkpoints"
STATE = "state"
RUN_NAME = "run.json"
AVERAGES_NAME = "ema.safetensors"
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE_PREFIX = "damaged-"


def optimizer_name(index: int | str) -> str:
    """File of an optimizer's state."""
    return f"optimizer-{index}.safetensors"


def random_state_name(rank: int) -> str:
    """File of a process's random state."""
    return f"rng-{rank}.safetensors"


def position_name(rank: int) -> str:
    """File of where a process stands in the stream."""
    return f"stream-{rank}.json"


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return output_dir / CHECKPOINTS / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoints of a run by their names, oldest first; `newest_whole` looks into them."""
    found = [path for path in (output_dir / CHECKPOINTS).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def newest_whole(output_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are those that were written, every byte of them read.

    Newer ones that are not are set aside under another name, so that the run can write theirs again; never removed.

    Args:
        say: Gets a line for each of them.

    Returns:
        The checkpoint; None if the run has none.

    Raises:
        UserError: It has some, and none is whole. All stay where they are.
    """
    damaged: list[tuple[Path, DamagedError]] = []
    for folder in reversed(list_checkpoints(output_dir)):
        try:
            check_manifest(folder, STATE)
        except DamagedError as error:
            damaged.append((folder, error))
            continue
        for other, error in damaged:
            aside = _set_aside(other)
            say(f"{other} is damaged ({error}); it is now {aside.name}, and the run goes on from {folder.name}")
        return folder
    if damaged:
        reasons = "; ".join(f"{folder.name}: {error}" for folder, error in damaged)
        raise UserError(
            f"no checkpoint in {output_dir / CHECKPOINTS} is whole ({reasons}): put a whole one back, or --restart to "
            "begin anew"
        )
    return None


def check_is_checkpoint(folder: Path, what: str) -> None:
    """Refuse a folder that holds no checkpoint, without reading much of it.

    Raises:
        UserError: Names `what` was to be the checkpoint.
    """
    if not (folder / STATE / RUN_NAME).is_file():
        raise UserError(f"{what} {folder} is no checkpoint of a run: give a folder such as RUN/{CHECKPOINTS}/step-...")


def check_whole(folder: Path, what: str) -> None:
    """Refuse a checkpoint that is not what was written.

    Raises:
        UserError: Names `what` was to be the checkpoint, and why it is none.
    """
    check_is_checkpoint(folder, what)
    try:
        check_manifest(folder, STATE)
    except DamagedError as error:
        raise UserError(f"{what} {folder} is damaged ({error}): give another checkpoint") from error


def read_state(folder: Path) -> RunState:
    """Where the run stood when a checkpoint was saved.

    Raises:
        UserError: It is no state that this version reads.
    """
    try:
        return RunState(**json.loads((folder / STATE / RUN_NAME).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / STATE / RUN_NAME} cannot be read ({error}): is it of another version?") from error


def read_position(folder: Path, rank: int) -> dict[str, Any]:
    """Where a process stood in the stream when a checkpoint was saved.

    Raises:
        UserError: It cannot be read, or the checkpoint is of a run on prepared data.
    """
    path = folder / STATE / position_name(rank)
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): is {folder} of a run on a stream?") from error


def load_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    accelerator: Accelerator,
    average: WeightAverage | None = None,
) -> None:
    """Put a run back to where a checkpoint left it. All processes call this.

    Args:
        model: Unwrapped, on its device, sharded if it is to be; with the shapes of the checkpoint.
        average: Gets the checkpoint's; where that has none, it begins with its weights.

    Raises:
        UserError: The checkpoint belongs to another model, or to other optimizers.
    """
    num_processes = read_state(folder).num_processes
    try:
        _load_model(model, folder)
        if (held := len(list((folder / STATE).glob(optimizer_name("*"))))) != len(optimizers):
            raise ValueError(
                f"it holds the state of {counted(held, 'optimizer')}, and the recipe has {len(optimizers)}"
            )
        for index, optimizer in enumerate(optimizers):
            _load_optimizer(optimizer, model, folder / STATE / optimizer_name(index))
        if average is not None:
            _load_average(average, folder / STATE / AVERAGES_NAME)
        random_state_path = folder / STATE / random_state_name(accelerator.process_index)
        # At another number of processes there is no state to go on with for the new ones; they start from the seed.
        if random_state_path.exists() and num_processes == accelerator.num_processes:
            restore_random_state(load_file(random_state_path), accelerator.device)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder} cannot be gone on from ({reason}): is it of another model, or of another version of Tercet?"
        ) from error


def _set_aside(folder: Path) -> Path:
    aside, number = folder.with_name(_ASIDE_PREFIX + folder.name), 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{_ASIDE_PREFIX}{folder.name}-{number}")
    folder.rename(aside)
    return aside


def _tensors(paths: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors, one at a time: a sharded model may be larger than a process's memory."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open's handle is no mapping
                yield name, file.get_tensor(name)


@torch.no_grad()
def _load_model(model: nn.Module, folder: Path) -> None:
    targets = model.state_dict(keep_vars=True)
    loaded, unknown = set(), []
    for name, tensor in _tensors(sorted(folder.glob("model*.safetensors"))):
        target = targets.get(name)
        if target is None:
            unknown.append(name)
            continue
        if target.shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} there and {tuple(target.shape)} here")
        target.copy_(part_like(tensor.to(target.device), target))
        loaded.add(id(target))
    # A tied weight is stored under one of its names.
    missing = [name for name, target in targets.items() if id(target) not in loaded]
    if missing or unknown:
        raise ValueError(f"weights missing: {missing[:3]}, unknown: {unknown[:3]}")


def _load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    parameters = dict(model.named_parameters())
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for full_name, value in _tensors([path]):
        name, _, key = full_name.rpartition("::")
        parameter = parameters[name]
        if id(parameter) not in known:
            raise ValueError(f"optimizer state for {name}, which this optimizer does not update")
        if value.shape == parameter.shape and value.ndim:
            value = part_like(value.to(parameter.device), parameter)
        elif value.ndim or optimizer_is_fused(optimizer):
            # AdamW counts its steps in a tensor that stays on the CPU unless fused on the parameter's device.
            value = value.to(parameter.device)
        # On a CPU what was read is a view of the mapped file, which would hold its place on the disk, and on NFS its
        # folder, for as long as the run lasts, whoever removes it.
        optimizer.state[parameter][key] = value.clone() if value.is_cpu else value


def _load_average(average: WeightAverage, path: Path) -> None:
    if path.exists():
        average.load(load_file(path))
    else:  # of a run without, from which this one branches
        average.begin_anew()


def optimizer_is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps its step counters on the parameters' device."""
    return any(group.get("fused") for group in optimizer.param_groups)
