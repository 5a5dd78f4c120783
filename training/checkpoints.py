"""Checkpoints: a folder that transformers loads, with all that a run needs to go on from exactly there.

    checkpoints/step-00000200/       config.json, model.safetensors, tokenizer, code: a model like any other
        state/run.json               step, tokens, seconds of training, number of processes
        state/optimizer-0.safetensors state of the first optimizer, by parameter name, and so on
        state/rng-0.safetensors      random state of process 0, and so on

A checkpoint is written under another name, synced and renamed: one that is there is whole. Nothing is pickled.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from tercet.training.atomic import make_readable
from tercet.training.errors import UserError

CHECKPOINTS = "checkpoints"
_STATE = "state"
_TEMPORARY_PREFIX = ".writing-"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class RunState:
    """Where a run stands; with the recipe it says what comes next."""

    step: int = 0
    tokens_seen: int = 0
    duration_s: float = 0.0
    num_processes: int = 1
    loss_nats: float = 0.0
    data_fingerprint: str = ""


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = [path for path in (output_dir / CHECKPOINTS).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def save_checkpoint(
    output_dir: Path,
    state: RunState,
    *,
    write_model: Callable[[Path], None],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    accelerator: Accelerator,
    keep_last: int,
) -> Path:
    """Write one checkpoint, whole or not at all, then remove those beyond `keep_last`. All processes call this.

    Args:
        write_model: Writes the folder that transformers loads; called in the main process.
        model: Gives the names under which optimizer state is kept.
    """
    folder = output_dir / CHECKPOINTS / f"step-{state.step:08d}"
    temporary = folder.with_name(_TEMPORARY_PREFIX + folder.name)
    if accelerator.is_main_process:
        _remove_unfinished(output_dir)
        (temporary / _STATE).mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        save_file(_rng_tensors(accelerator.device), temporary / _STATE / f"rng-{accelerator.process_index}.safetensors")
        if accelerator.is_main_process:
            write_model(temporary)
            for index, optimizer in enumerate(optimizers):
                _save_optimizer(optimizer, model, temporary / _STATE, index)
            (temporary / _STATE / "run.json").write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            make_readable(temporary)
            _sync_tree(temporary)
            if folder.exists():  # written by a run that was killed before it could go on from here
                shutil.rmtree(folder)
            os.replace(temporary, folder)
            _sync(folder.parent)
            for old in list_checkpoints(output_dir)[:-keep_last]:
                shutil.rmtree(old)
    except BaseException:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    return folder


def load_checkpoint(
    folder: Path, *, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], accelerator: Accelerator
) -> RunState:
    """Put a run back to where a checkpoint left it.

    Args:
        model: Unwrapped, on its device, with the shapes of the checkpoint.

    Returns:
        Where the run stands.

    Raises:
        UserError: The checkpoint is damaged or belongs to another model.
    """
    try:
        state = RunState(**json.loads((folder / _STATE / "run.json").read_text("utf-8")))
        _load_model(model, folder)
        for index, optimizer in enumerate(optimizers):
            _load_optimizer(optimizer, model, folder / _STATE, index)
        rng_path = folder / _STATE / f"rng-{accelerator.process_index}.safetensors"
        # At another number of processes there is no state to go on with for the new ones; they start from the seed.
        if rng_path.exists() and state.num_processes == accelerator.num_processes:
            _restore_rng(load_file(rng_path), accelerator.device)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder} cannot be resumed from ({reason}); remove this folder to go on from the one before"
        ) from error
    return state


def _load_model(model: nn.Module, folder: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(path))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = getattr(model, "all_tied_weights_keys", {})
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        raise ValueError(f"weights missing: {missing[:3]}, unknown: {unexpected[:3]}")


def _save_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path, index: int) -> None:
    """Tensors of the state by parameter name, `name::key`; the rest of an optimizer is in the recipe."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            assert isinstance(value, torch.Tensor), f"optimizer state {key} is no tensor"
            tensors[f"{names[id(parameter)]}::{key}"] = value.detach().contiguous()
    save_file(tensors, folder / f"optimizer-{index}.safetensors")


def _load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path, index: int) -> None:
    parameters = dict(model.named_parameters())
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for full_name, value in load_file(folder / f"optimizer-{index}.safetensors").items():
        name, _, key = full_name.rpartition("::")
        parameter = parameters[name]
        if id(parameter) not in known:
            raise ValueError(f"optimizer state for {name}, which this optimizer does not update")
        # AdamW counts its steps in a tensor that stays on the CPU unless fused on the parameter's device.
        optimizer.state[parameter][key] = (
            value.to(parameter.device) if value.ndim or optimizer_is_fused(optimizer) else value
        )


def optimizer_is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps its step counters on the parameters' device."""
    return any(group.get("fused") for group in optimizer.param_groups)


def _rng_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def _restore_rng(tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)


def _remove_unfinished(output_dir: Path) -> None:
    for path in (output_dir / CHECKPOINTS).glob(f"{_TEMPORARY_PREFIX}*"):
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
