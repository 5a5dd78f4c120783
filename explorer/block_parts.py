"""What attention and MLP of one block add to the residual stream, from what its children were given and returned.

Families differ in where the additions happen: in the block, inside attention and MLP (Bloom), behind a norm of the
output (Gemma 2), scaled (Granite), side by side (GPT-NeoX). A reading is taken only if its parts sum up to the block's
output.

Shapes: S tokens, E hidden_size.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from tercet.explorer.anatomy import Block, is_norm


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
        given: The first tensor among its arguments.
        returned: The first tensor of its result.
        value: A copy of `returned`, which later code may change in place (Falcon adds to it).
    """

    module: nn.Module
    given: torch.Tensor
    returned: torch.Tensor
    value: torch.Tensor


@dataclass
class BlockCalls:
    """One pass through a block: its input and output, calls of its children and of the MLP's matrices, in order."""

    given: torch.Tensor
    children: list[Call] = field(default_factory=list)
    matrices: list[Call] = field(default_factory=list)


class Additions(NamedTuple):
    """What attention and MLP add, each in the shape of the block's input."""

    attention: torch.Tensor
    mlp: torch.Tensor


def find_additions(block: Block, calls: BlockCalls, output: torch.Tensor, multiplier: float) -> Additions | None:
    """The reading of a block whose parts sum up to its output.

    Args:
        block: The block.
        calls: What happened in it.
        output: What it returned.
        multiplier: Of the config: what each addition is scaled by.

    Returns:
        None if no reading does.
    """
    attended, expanded = call_of(calls, [block.attention]), call_of(calls, block.feed_forward)
    if attended is None or expanded is None or attended.returned.shape != calls.given.shape:
        return None
    attention, mlp = _followed(calls, attended), _followed(calls, expanded).view_as(attended.returned)
    for scale in dict.fromkeys((1.0, multiplier)):
        if are_close(calls.given + scale * attention + scale * mlp, output):
            return Additions(scale * attention, scale * mlp)
    middle = _middle(calls, attended)
    if middle is None:
        return None
    apart = Additions(middle - calls.given, output - middle)
    attention_is_told = middle is attended.returned or are_close(apart.attention, attention)
    mlp_is_told = output is expanded.returned or are_close(apart.mlp, mlp)
    return apart if attention_is_told and mlp_is_told else None


def are_close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for rounding in their dtype."""
    if left.shape != right.shape:
        return False
    tolerance = 32 * torch.finfo(right.dtype).eps * max(float(right.abs().max()), 1e-6)
    return bool((left.float() - right.float()).abs().max() <= tolerance)


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same numbers in the same order but for rounding, whatever the shapes."""
    return left.numel() == right.numel() and are_close(left.reshape(right.shape), right)


def call_of(calls: BlockCalls, modules: Iterable[nn.Module | None]) -> Call | None:
    """The last call of one of these."""
    return next((call for call in reversed(calls.children) if any(call.module is module for module in modules)), None)


def _followed(calls: BlockCalls, call: Call) -> torch.Tensor:
    """What becomes of a result on its way to the residual stream: children that take just it (norm, dropout) go on."""
    result, value = call.returned, call.value
    for later in calls.children[calls.children.index(call) + 1 :]:
        if later.given is result and later.returned.shape == result.shape:
            result, value = later.returned, later.value
    return value


def _middle(calls: BlockCalls, attended: Call) -> torch.Tensor | None:
    """The residual stream between attention and MLP: what the norm between them is given."""
    later = calls.children[calls.children.index(attended) + 1 :]
    norms = (call.given for call in later if is_norm(call.module))
    return next((given for given in norms if given.shape == calls.given.shape and given is not calls.given), None)
