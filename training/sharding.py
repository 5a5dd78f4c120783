"""Weights that are spread over processes, seen as whole ones where they are saved and loaded.

A sharded parameter is a `DTensor`: each process holds some rows of it. Everything that a checkpoint holds is whole, so
that a run goes on with another number of processes, sharded or not, and transformers loads the folder.
"""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, in every process; all of them must call this, in one order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a whole tensor, laid out as `like` is, whose shape it has."""
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements)
    return tensor
