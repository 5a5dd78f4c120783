"""Which blocks turn queries and keys by their position: seen from where the angles' cosines and sines are used.

Families decide it by fields of many names (`no_rope_layers`, `layer_types`, a sliding window that is there or not), so
no field is read: a block that never lets what a rotary module returned meet another tensor does not rotate.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNKNOWN_SET = -1
"""Stands for angles that no module returned: those of a table that attention itself looks up (GPT-J)."""


class RotationWatch(TorchDispatchMode):
    """Follows the angles through every operation of a pass.

    Attributes:
        angles: cos and sin of each rotation, (2, S, R), float32 on the CPU, equal ones once.
        used: Of each block that rotates, which of `angles`, or UNKNOWN_SET.
    """

    def __init__(self, model: nn.Module, current_block: Callable[[], int | None]) -> None:
        super().__init__()
        self.angles: list[torch.Tensor] = []
        self.used: dict[int, int] = {}
        self._current_block = current_block
        self._marks: dict[int, int] = {}
        # A tensor that is gone may lend its place in memory to another one.
        self._kept: list[torch.Tensor] = []
        for name, table in model.named_buffers():
            if name.rpartition(".")[2] == "embed_positions":
                self._mark(table, UNKNOWN_SET)

    def note_angles(self, output: Any) -> None:
        """Told what a rotary module returned: cosines and sines, or both as complex numbers."""
        is_pair = isinstance(output, tuple) and len(output) == 2 and all(torch.is_tensor(part) for part in output)
        if is_pair:
            parts = output
        elif torch.is_tensor(output) and output.is_complex():
            parts = (output.real, output.imag)
        else:
            for part in tree_leaves(output):
                if _is_number_like(part):
                    self._mark(part, UNKNOWN_SET)
            return
        found = torch.stack([part.detach().reshape(-1, part.shape[-1]).to("cpu", torch.float32) for part in parts])
        index = next((i for i, known in enumerate(self.angles) if torch.equal(known, found)), None)
        if index is None:
            index = len(self.angles)
            self.angles.append(found)
        for part in tree_leaves(output):
            self._mark(part, index)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self._marks:
            return output
        given = [part for part in tree_leaves((args, kwargs)) if _is_number_like(part)]
        marks = [self._marks.get(_place(tensor)) for tensor in given]
        known = next((mark for mark in marks if mark is not None), None)
        if known is None:
            return output
        block = self._current_block()
        if None in marks and block is not None:
            self.used.setdefault(block, known)
            return output
        for part in tree_leaves(output):
            if _is_number_like(part):
                self._mark(part, known)
        return output

    def _mark(self, tensor: torch.Tensor, index: int) -> None:
        self._marks[_place(tensor)] = index
        self._kept.append(tensor)


def _is_number_like(value: Any) -> bool:
    """Positions and masks are integers, quantized weights have no memory of their own; what is turned is plain."""
    return type(value) in (torch.Tensor, nn.Parameter) and (value.is_floating_point() or value.is_complex())


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_rotary(module: nn.Module) -> bool:
    """Whether a module makes the angles, by its class's name."""
    name = type(module).__name__
    return any(word in name for word in ("Rotary", "RoPE", "Rope"))
