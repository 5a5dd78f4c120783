"""Weights that are spread over processes (FSDP2), seen as whole ones where they are saved and loaded.

A sharded parameter is a `DTensor`: each process holds some rows of it. Everything that a checkpoint holds is whole, so
that a run goes on with another number of processes, sharded or not, and transformers loads the folder.

torch's own `fully_shard` does it, on CPUs (gloo) as on GPUs (NCCL). Accelerate gives the processes and their devices;
its FSDP plugin is not used, which on CPUs wraps nothing and says nothing (accelerate 1.15).
"""

import copy
from typing import cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel


def shard_model(model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Spread every weight over all processes, in place; call before the optimizers are made.

    A block's weights are gathered when it runs and freed behind it, forward and backward; gradients are averaged over
    processes, as DDP does. The model is then called as it is, without `accelerator.prepare`, and every process must
    call it equally often. With one process nothing is done.

    Args:
        model: With the same weights in every process; on any device.
        accelerator: Its processes share the weights; where its precision is bf16, blocks compute in it, and weights,
            gradients and sums over processes stay float32.
    """
    if accelerator.num_processes == 1:
        return
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    # Inputs stay as they are: ids need no cast, the number of tokens that the loss is divided by would be rounded.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if accelerator.mixed_precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # The root's own: embeddings, last norm, and the head, tied or not. Freed behind each forward, too, which is not
    # torch's default: outside of a forward and its backward every parameter is then a shard, after evaluations as well.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    assert blocks, f"{type(model).__name__} names no blocks in _no_split_modules"
    return blocks


def is_sharded(model: nn.Module) -> bool:
    """Whether the model's weights are spread over processes."""
    return isinstance(model, FSDPModule)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, in every process; all of them must call this, in one order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a whole tensor, laid out as `like` is, whose shape it has."""
    if isinstance(like, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor


@torch.no_grad()
def whole_model(
    model: PreTrainedModel, *, device: torch.device | str | None = None, here: bool = True
) -> PreTrainedModel | None:
    """A model of plain tensors with the weights of a sharded one; a model that is not sharded is returned as it is.

    All processes must call this. One tensor at a time is whole in those that keep nothing.

    Args:
        model: Left as it is.
        device: Where the copy goes; None is where the shards are.
        here: Whether this process keeps a copy.

    Returns:
        The copy, of the class that the model had before it was sharded; None where `here` is False.
    """
    if not is_sharded(model):
        return model if here else None
    tensors = {}
    for name, parameter in model.named_parameters():
        gathered = whole(parameter.detach())
        if here:
            tensors[name] = gathered.to(device) if device is not None else gathered
    if not here:
        return None
    plain = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):  # drawing weights here would move the random state that a resumed run goes on with
        copied = cast(type[PreTrainedModel], plain)(copy.deepcopy(model.config))
    for name, tensor in tensors.items():
        module, _, key = name.rpartition(".")
        setattr(copied.get_submodule(module), key, nn.Parameter(tensor, requires_grad=False))
    for name, buffer in model.named_buffers():
        module, _, key = name.rpartition(".")
        setattr(copied.get_submodule(module), key, buffer.to(device, copy=True))
    copied.tie_weights()
    copied.generation_config = copy.deepcopy(model.generation_config)
    return copied.train(model.training)
