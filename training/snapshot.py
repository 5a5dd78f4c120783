"""All that decides how a run goes on, copied out of the model in one moment: it is written while the model changes.

Every tensor is whole, whatever part of it each process holds, and lies in the main process's memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn

from tercet.training.ema import WeightAverage
from tercet.training.run_state import RunState
from tercet.training.sharding import whole


@dataclass(frozen=True)
class Snapshot:
    """A run at one step; tensors on the CPU.

    Attributes:
        state: Where the run stands.
        weights: As the model's `state_dict` names them; tied ones are one tensor.
        optimizers: State of each, under `name::key` of the parameter's name and the state's.
        random_states: Of each process, by device type.
        averages: Of the weights by parameter name, None if the run keeps none.
        positions: Of each process in its stream, for JSON; None where the data was prepared.
    """

    state: RunState
    weights: dict[str, torch.Tensor]
    optimizers: list[dict[str, torch.Tensor]]
    random_states: list[dict[str, torch.Tensor]]
    averages: dict[str, torch.Tensor] | None
    positions: list[dict[str, Any]] | None = None


class SnapshotTaker:
    """Takes snapshots of a run, all into the same memory: the one before must have been written.

    Args:
        model: Unwrapped.
        optimizers: Of its parameters.
        accelerator: Knows the processes.
        average: Of the weights, if the run keeps one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        accelerator: Accelerator,
        average: WeightAverage | None = None,
    ) -> None:
        self._model, self._optimizers, self._accelerator, self._average = model, optimizers, accelerator, average
        # New memory for every snapshot would cost more time than the copying; on a GPU it is pinned, for speed.
        self._memory: dict[tuple[str, str], torch.Tensor] = {}

    def take(self, state: RunState, positions: list[dict[str, Any]] | None = None) -> Snapshot | None:
        """Copy everything. All processes call this; the main one gets the snapshot, the others None."""
        random_states = self._random_states()
        weights = self._weights()
        optimizers = [self._optimizer_state(index) for index in range(len(self._optimizers))]
        averages = None
        if self._average is not None:
            averages = {name: self._copy("average", name, tensor) for name, tensor in self._average.averages.items()}
        if self._accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        if not self._accelerator.is_main_process:
            return None
        return Snapshot(state, weights, optimizers, random_states, averages, positions)

    def _weights(self) -> dict[str, torch.Tensor]:
        copies: dict[int, torch.Tensor] = {}
        weights = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            # The very parameter under both names if it is tied: one copy, so that it is stored once.
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copy("weight", name, tensor)
            weights[name] = copies[id(tensor)]
        return weights

    def _optimizer_state(self, index: int) -> dict[str, torch.Tensor]:
        optimizer, tensors = self._optimizers[index], {}
        # In the model's order and not the state's, which may differ between processes.
        for name, parameter in self._model.named_parameters():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                assert isinstance(value, torch.Tensor), f"optimizer state {key} is no tensor"
                full_name = f"{name}::{key}"
                tensors[full_name] = self._copy(f"optimizer-{index}", full_name, value)
        return tensors

    def _random_states(self) -> list[dict[str, torch.Tensor]]:
        gathered: dict[str, torch.Tensor] = {}
        for kind, tensor in random_state(self._accelerator.device).items():
            here = tensor.to(self._accelerator.device)[None]
            gathered[kind] = cast(torch.Tensor, self._accelerator.gather(here)).cpu()
        return [
            {kind: tensors[rank].clone() for kind, tensors in gathered.items()}
            for rank in range(self._accelerator.num_processes)
        ]

    def _copy(self, kind: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the main process; the others take part in making the tensor whole."""
        full = whole(tensor.detach())
        if not self._accelerator.is_main_process:
            return full
        memory = self._memory.get((kind, name))
        if memory is None or memory.shape != full.shape or memory.dtype != full.dtype:
            memory = torch.empty(full.shape, dtype=full.dtype, pin_memory=full.device.type == "cuda")
            self._memory[kind, name] = memory
        return memory.copy_(full, non_blocking=True)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """This process's random states that training draws from, by device type, uint8 (n,)."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_random_state(tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """Undo what was drawn since `random_state`."""
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
