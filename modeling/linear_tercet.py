"""Linear layers that cost one read of their weight, also for a single token, and projections fused into one product.

Shapes: N rows (tokens of the whole batch), E input features, O output features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .kernels_tercet import linear as linear_in_training
from .kernels_tercet import trains_on_cpu

# Above this, one product of E x O is bound by arithmetic whichever way its operands lie.
_FEW_ROWS = 64
# The weight is cut into this many blocks of rows, more than most CPUs have idle cores to read them with.
_BLOCKS = (8, 4, 2)


def apply_linear(layer: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """`layer(states)`, (..., E) -> (..., O), by `linear` where the layer is its weight and bias and nothing else.

    Adapters and quantization put modules of their own in its place, which are called as they are.

    No subclass of `nn.Linear` does this: bitsandbytes and FP8 quantize the layers whose type is `nn.Linear` itself, and
    leave the others as they are without a word.
    """
    if torch.compiler.is_compiling() or not is_plain_linear(layer):
        return layer(states)
    return linear(states, layer.weight, layer.bias)


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`states weightᵀ + bias`, by the fastest road for this number of rows.

    BLAS computes y = W x for one x on a single core, and for a few with weight and states in the slow order: measured
    on 2 cores, 10 ms for the 111 MB of weights of a 28 M parameter decoder, where the batched product below takes 3.

    Args:
        states: (..., E).
        weight: (O, E).
        bias: (O,).

    Returns:
        (..., O), contiguous.
    """
    if trains_on_cpu(states) and type(weight) is nn.Parameter:
        return linear_in_training(states, weight, bias)
    if not _is_bound_by_reading(states, weight):
        return F.linear(states, weight, bias)
    num_out = weight.shape[0]
    num_blocks = next((blocks for blocks in _BLOCKS if num_out % blocks == 0), 1)
    rows = states.reshape(-1, states.shape[-1])  # (N, E)
    blocks = torch.bmm(weight.view(num_blocks, -1, weight.shape[1]), rows.t().expand(num_blocks, -1, -1))
    product = blocks.view(num_out, -1).t().contiguous().view(*states.shape[:-1], num_out)
    return product if bias is None else product + bias


def _is_bound_by_reading(states: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        # Compilers choose the road themselves, and a graph must hold for other numbers of rows; quantized and sharded
        # weights are subclasses with their own operators.
        not torch.compiler.is_compiling()
        and type(states) is torch.Tensor
        and type(weight) in (nn.Parameter, torch.Tensor)
        and states.is_cpu
        and 0 < states.numel() <= _FEW_ROWS * states.shape[-1]
        and states.dtype is torch.float32
        and not torch.is_grad_enabled()
        and weight.is_contiguous()
    )


class FusedProjections:
    """One weight (O1 + O2 + ..., E) for projections of the same input, whose own weights become views of its rows.

    State dicts, optimizers and adapters see what they saw before; an update of a view is an update of the whole.
    Whatever gives a projection another weight (`.to()`, quantization, an adapter, sharding) makes `is_current` false,
    and the projections run one by one again.
    """

    def __init__(self, projections: Sequence[nn.Linear]) -> None:
        self.weight = torch.cat([projection.weight.detach() for projection in projections])
        biases = [projection.bias.detach() for projection in projections if projection.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.sizes = [projection.out_features for projection in projections]
        start = 0
        for projection, size in zip(projections, self.sizes, strict=True):
            projection.weight.data = self.weight[start : start + size]
            if self.bias is not None:
                projection.bias.data = self.bias[start : start + size]
            start += size
        self._projections = tuple(projections)
        self._addresses = [_addresses(projection) for projection in projections]

    @staticmethod
    def can_fuse(projections: Sequence[nn.Module]) -> bool:
        """Whether these are plain linear layers on one device, all with a bias or none, and not fused already."""
        return (
            all(is_plain_linear(projection) for projection in projections)
            and len({projection.bias is None for projection in projections}) == 1
            and len({(projection.weight.dtype, projection.weight.device) for projection in projections}) == 1
            and projections[0].weight.device.type != "meta"
        )

    def is_current(self, *projections: nn.Module) -> bool:
        """Whether these are the fused layers, still with views as weights and without hooks."""
        for projection, fused, addresses in zip(projections, self._projections, self._addresses, strict=True):
            if projection is not fused or _addresses(fused) != addresses or _has_hooks(fused):
                return False
        return True

    def serves(self, states: torch.Tensor, *projections: nn.Module) -> bool:
        """Whether these states are better multiplied at once: no gradient is wanted, and there are few of them.

        For many rows the products are as fast one by one, and their results lie together.
        """
        return (
            not torch.is_grad_enabled()
            and states.numel() <= _FEW_ROWS * states.shape[-1]
            and self.is_current(*projections)
        )

    def __call__(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(..., E) -> one (..., O) for each projection."""
        return linear(states, self.weight, self.bias).split(self.sizes, dim=-1)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy's weights are its own tensors; the copied model is not fused.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a layer is its weight and bias and nothing else: no adapter, quantization, hook or sharding between."""
    return type(module) is nn.Linear and not _has_hooks(module) and type(module.weight) is nn.Parameter


def are_plain_without_bias(*modules: nn.Module) -> bool:
    """Whether these layers are their weights and nothing else."""
    return all(is_plain_linear(module) and module.bias is None for module in modules)


def _addresses(linear_layer: nn.Linear) -> tuple[int, int]:
    # Straight from the dict: an attribute of a module costs a search, and this runs at every token.
    weight, bias = linear_layer._parameters["weight"], linear_layer._parameters["bias"]
    return 0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr()


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # as accelerate does, to bring weights from where they are offloaded
    )


__all__ = ["FusedProjections", "apply_linear", "are_plain_without_bias", "is_plain_linear", "linear"]
