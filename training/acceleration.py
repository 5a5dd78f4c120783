"""Less memory for more time, or less time for a wait at the start: gradient checkpointing and compilation."""

import shutil
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from tercet.training.errors import UserError


def checkpoint_blocks(model: PreTrainedModel, every: bool | int) -> int:
    """Keep no activations of some blocks: the backward pass computes them again (arXiv:1604.06174).

    Args:
        model: Its blocks are `model.model.layers`.
        every: False: of none; True: of every block; n: of every n-th block.

    Returns:
        Number of blocks that are computed again.
    """
    if every is False:
        return 0
    # Not reentrant: the other kind needs an input with a gradient, and cannot be compiled or sharded.
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=int(every))
    return sum(layer.gradient_checkpointing for layer in model.model.layers)


def compile_model(model: PreTrainedModel, say: Callable[[str], None]) -> torch.nn.Module:
    """`torch.compile` for one shape of batches; the first step compiles, and takes a minute or more.

    Args:
        model: Shares its weights with what is returned, and stays as it is for evaluation and saving.
        say: Gets a line for the user.

    Raises:
        UserError: No C++ compiler for a model on a CPU.
    """
    if model.device.type == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise UserError(
            "training.compile needs a C++ compiler on a CPU, and none was found: "
            "install g++ or use --set training.compile=false"
        )
    say("Compiling  the model for batches of this shape; the first step takes a minute or so, and more if it is large")
    return torch.compile(model, dynamic=False)  # type: ignore[return-value]
