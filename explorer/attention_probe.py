"""An attention function that writes down what it is given and computes what the model's own would.

`transformers.AttentionInterface` is the public place where attention is exchanged: a registered function gets queries,
keys and values as the dot products see them (normalised, rotated), the mask and the scale, and returns output and
weights. So weights can be seen of models that are usually run by fused kernels, which have none to show.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, D head_dim.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.utils import logging

PROBE = "tercet_explorer"
"""Name of the attention implementation."""


@dataclass(frozen=True)
class AttentionCall:
    """One call: tensors of the first row of the batch, float32 on the CPU.

    Attributes:
        module: The attention that called.
        query: (H, T, D).
        key: (K, S, D).
        value: (K, S, D).
        weights: (H, T, S).
        scale: What q·k is multiplied by.
        window: Keys that a query sees at most; None is all, or not told.
        softcap: What bounds the scores, if it was told.
        seen: Which keys the mask lets each query see, (T, S); None where there was no mask.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: torch.Tensor
    scale: float | None
    window: int | None
    softcap: float | None
    seen: torch.Tensor | None


# Of a context, so that two threads that record two models do not write into one list.
_calls: ContextVar[list[AttentionCall] | None] = ContextVar("calls", default=None)


def probing_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own eager attention, which knows its family's ways (softcaps, sinks); and a note of the call."""
    output, weights = _eager_attention_of(module)(module, query, key, value, attention_mask, **kwargs)
    calls = _calls.get()
    if calls is not None and weights is not None:
        scale = kwargs.get("scaling", getattr(module, "scaling", None))
        calls.append(
            AttentionCall(
                module, _first_row(query), _first_row(key), _first_row(value), _first_row(weights), _number(scale),
                kwargs.get("sliding_window"), _number(kwargs.get("softcap")), _seen(attention_mask),
            )
        )  # fmt: skip
    return output, weights


def _first_row(tensor: torch.Tensor) -> torch.Tensor:
    # A clone: a model may change its tensors in place behind the call.
    return tensor[0].detach().to("cpu", torch.float32, copy=True)


def _seen(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Of a mask that is added to scores, in whatever head: a bias as ALiBi's hides nothing, the lowest number does."""
    if mask is None or mask.ndim != 4 or not mask.is_floating_point():
        return None
    return (mask[0] > torch.finfo(mask.dtype).min / 2).any(0).cpu()


def _number(scale: Any) -> float | None:
    return None if scale is None else float(scale)


def _eager_attention_of(module: nn.Module) -> Callable:
    """`eager_attention_forward` of the file that the module's forward stands in."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    names = vars(sys.modules[owner.__module__])
    if "eager_attention_forward" not in names:
        # A decorated forward may live elsewhere than its class.
        names = getattr(inspect.unwrap(owner.forward), "__globals__", {})
    return names["eager_attention_forward"]


AttentionInterface.register(PROBE, probing_attention)
# Always a mask that can be added, never None for "causal, as the kernel knows".
AttentionMaskInterface.register(PROBE, eager_mask)


@contextmanager
def attention_set_to(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model with an attention implementation, and leave it with those that it had."""
    before = _implementations(model)
    verbosity = logging.get_verbosity()
    try:
        # A family that cannot be set says so in a warning; that nothing was noted then says it, too.
        logging.set_verbosity_error()
        model.set_attn_implementation(dict.fromkeys(before, name))
        yield
    finally:
        model.set_attn_implementation(before)
        logging.set_verbosity(verbosity)


def _implementations(model: PreTrainedModel) -> dict[str, str]:
    """Of the model ("") and of those of its parts that have one."""
    config = model.config
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    found = {name: getattr(part, "_attn_implementation", None) for name, part in {"": config, **parts}.items()}
    return {name: implementation for name, implementation in found.items() if implementation is not None}


@contextmanager
def noted_calls() -> Iterator[list[AttentionCall]]:
    """Collects the calls of `probing_attention` in this context."""
    calls: list[AttentionCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)
