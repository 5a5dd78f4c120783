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

_SAME = 32  # in units of the dtype's rounding; of half precision less
_MOST = 0.03


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
    """One pass through a block: its input and output, calls of its children and of the MLP's matrices, in order.

    Attributes:
        given: The block's input.
        given_value: A copy of it, which the block's own code may change in place.
    """

    given: torch.Tensor
    given_value: torch.Tensor
    children: list[Call] = field(default_factory=list)
    matrices: list[Call] = field(default_factory=list)


class Additions(NamedTuple):
    """What attention and MLP add, each in the shape of the block's input, and what each was multiplied by for that."""

    attention: torch.Tensor
    mlp: torch.Tensor
    scale: float


class Source(NamedTuple):
    """What a part is given.

    Attributes:
        stream: "input" of the block, "middle" (with attention's result in it), or "unknown".
        norm: The call that normed it; None where it is given as it is, or that is unknown, too.
    """

    stream: str
    norm: Call | None


class Wiring(NamedTuple):
    """How a block's parts are joined; norms behind them are those of what they return, before it is added."""

    attention_source: Source
    mlp_source: Source
    attention_norm: Call | None
    mlp_norm: Call | None


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
    attention, mlp = _followed(calls, attended)[0], _followed(calls, expanded)[0]
    if mlp.numel() != attention.numel():
        return None
    mlp = mlp.view_as(attended.returned)
    for scale in dict.fromkeys((1.0, multiplier)):
        if are_close(calls.given + scale * attention + scale * mlp, output):
            return Additions(scale * attention, scale * mlp, scale)
    middle = _middle(calls, attended)
    if middle is None:
        return None
    apart = Additions(middle - calls.given, output - middle, 1.0)
    attention_is_told = middle is attended.returned or are_close(apart.attention, attention)
    mlp_is_told = output is expanded.returned or are_close(apart.mlp, mlp)
    return apart if attention_is_told and mlp_is_told else None


def find_wiring(block: Block, calls: BlockCalls, additions: Additions | None) -> Wiring:
    """What attention and MLP are given, and what becomes of their results."""
    attended, expanded = call_of(calls, [block.attention]), call_of(calls, block.feed_forward)
    fed = next((call for call in calls.children if any(call.module is part for part in block.feed_forward)), None)
    middle = None if additions is None else calls.given_value + additions.attention
    unknown = Source("unknown", None)
    mixed = attended or next((call for call in calls.children if _mixes(block, call)), None)
    attention_source = unknown if mixed is None else _source(calls, mixed.given, None)
    after_attention = after_mlp = None
    if additions is not None and attended is not None and expanded is not None:
        after_attention = _norm_of(calls, attended, additions.attention / additions.scale)
        after_mlp = _norm_of(calls, expanded, additions.mlp / additions.scale)
    return Wiring(
        attention_source if attention_source.stream == "input" else unknown,
        unknown if fed is None else _known(_source(calls, fed.given, middle), attended),
        after_attention,
        after_mlp,
    )


def _known(source: Source, attended: Call | None) -> Source:
    """Of a norm whose input is unknown nothing is told where attention may have its result normed with the stream."""
    return source if source.stream != "unknown" or attended is None else Source("unknown", None)


def _mixes(block: Block, call: Call) -> bool:
    """Whether a child stands in attention's place, where there is none."""
    return not is_norm(call.module) and all(call.module is not part for part in block.feed_forward)


def _source(calls: BlockCalls, given: torch.Tensor, middle: torch.Tensor | None) -> Source:
    norms = [call for call in calls.children if is_norm(call.module)]
    norm = next((call for call in norms if call.returned is given), None)
    norm = norm or next((call for call in norms if _is_equal(call.value, given)), None)  # OPT flattens what it gives
    read = given if norm is None else norm.given
    if read is calls.given:
        return Source("input", norm)
    # By what is nearer: an addition may be so small that both are close.
    streams = [("input", calls.given_value), *([("middle", middle)] if middle is not None else [])]
    distance, name = min((_distance(read, stream), name) for name, stream in streams if read.numel() == stream.numel())
    most = min(_SAME * torch.finfo(read.dtype).eps, _MOST) * float(read.abs().max())
    return Source(name if distance <= most else "unknown", norm)


def _is_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.numel() == right.numel() and torch.equal(left.reshape(right.shape), right)


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.reshape(right.shape).float() - right.float()).abs().max())


def _norm_of(calls: BlockCalls, call: Call, added: torch.Tensor) -> Call | None:
    """The norm of a part's result, if what it gave is what is added.

    Bloom's attention returns the sum already, and the next norm takes it.
    """
    norms = [later for later in _followed(calls, call)[1] if is_norm(later.module)]
    return next((norm for norm in norms if is_same(norm.value, added)), None)


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


def _followed(calls: BlockCalls, call: Call) -> tuple[torch.Tensor, list[Call]]:
    """What becomes of a result on its way to the residual stream, and through which children that take just it.

    Those are norms and dropouts.
    """
    result, value, followers = call.returned, call.value, []
    for later in calls.children[calls.children.index(call) + 1 :]:
        if later.given is result and later.returned.shape == result.shape:
            result, value = later.returned, later.value
            followers.append(later)
    return value, followers


def _middle(calls: BlockCalls, attended: Call) -> torch.Tensor | None:
    """The residual stream between attention and MLP: what the norm between them is given."""
    later = calls.children[calls.children.index(attended) + 1 :]
    norms = (call.given for call in later if is_norm(call.module))
    return next((given for given in norms if given.shape == calls.given.shape and given is not calls.given), None)
