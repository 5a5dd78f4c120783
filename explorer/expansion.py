"""The inside of an MLP: what its contracting matrix is given, and the numbers before the activation that made it.

Families name and arrange the expanding matrices as they like (gate and up, both in one, one alone). A reading is taken
only if the activation of what they returned is what the contracting matrix was given.

Shapes: S tokens, E hidden_size, F intermediate_size.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from transformers.activations import ACT2FN

from tercet.explorer.anatomy import Block
from tercet.explorer.block_parts import Additions, BlockCalls, Call, call_of, is_same

_USUAL = ("silu", "gelu", "gelu_pytorch_tanh", "relu")  # of families whose config names none
_TOLERANCE = 4  # in units of the dtype's rounding: the same product, at most in another order

Activation = Callable[[torch.Tensor], torch.Tensor]


class Before(NamedTuple):
    """What the expanding matrices return, (S, F) each; `gates` is None where there is no gate."""

    gates: torch.Tensor | None
    ups: torch.Tensor


class Expansion(NamedTuple):
    """The inside of an MLP.

    Attributes:
        activations: What its contracting matrix is given, (S, F).
        is_gated: Whether a gate multiplied it.
        before: What `activations` is made of; None where no reading gives just it.
    """

    activations: torch.Tensor
    is_gated: bool
    before: Before | None


def activations_named(name: str) -> list[Activation]:
    """The activation of this name, then the usual ones; those that learn something of their own are not among them."""
    made = [ACT2FN[known] for known in dict.fromkeys((name, *_USUAL)) if known in ACT2FN]
    return [function for function in made if not any(True for _ in function.parameters())]


def find_expansion(
    block: Block, calls: BlockCalls, additions: Additions | None, functions: Sequence[Activation]
) -> Expansion | None:
    """The contracting matrix is the last one whose result the MLP returns; None with experts, which mix several.

    Args:
        block: The block.
        calls: What happened in it.
        additions: What its parts add, where that was told.
        functions: The activations that the MLP may have.
    """
    expanded = call_of(calls, block.feed_forward)
    if expanded is None:
        return None
    targets = [expanded.value] + ([additions.mlp] if additions is not None else [])
    for contract in reversed(calls.matrices):
        if any(is_same(contract.value, target) for target in targets):
            inner = contract.given.reshape(-1, contract.given.shape[-1])  # (S, F)
            before = _before(calls, contract, inner, functions)
            is_gated = _has_twice(calls, contract) if before is None else before.gates is not None
            return Expansion(inner, is_gated, before)
    return None


def _has_twice(calls: BlockCalls, contract: Call) -> bool:
    """Whether the other matrices make two numbers for each that the contracting one is given."""
    width = calls.given.shape[-1]
    others = [call for call in calls.matrices if call is not contract and call.given.shape[-1] == width]
    return sum(call.returned.shape[-1] for call in others) == 2 * contract.given.shape[-1]


def _before(calls: BlockCalls, contract: Call, inner: torch.Tensor, functions: Sequence[Activation]) -> Before | None:
    """The reading that is nearest to `inner`, if it is that but for rounding."""
    tolerance = _TOLERANCE * torch.finfo(inner.dtype).eps * float(inner.abs().max())
    nearest, least = None, tolerance
    for reading in _readings(calls, contract, inner.shape[-1]):
        for function in functions:
            distance = _distance(reading, function, inner)
            if distance <= least and (nearest is None or distance < least):
                nearest, least = reading, distance
    return nearest


def _readings(calls: BlockCalls, contract: Call, width: int) -> Iterator[Before]:
    """All of the matrices that are given what the first one is, the MLP's input, and return F numbers, or 2 F."""
    given = calls.matrices[0].given
    expanding = [
        call.value.reshape(-1, call.value.shape[-1])
        for call in calls.matrices[: calls.matrices.index(contract)]
        if call.given is given or (call.given.shape == given.shape and torch.equal(call.given, given))
    ]
    single = [value for value in expanding if value.shape[-1] == width]
    yield from (Before(None, value) for value in single)
    yield from (Before(*pair) for pair in permutations(single, 2))
    for value in expanding:
        if value.shape[-1] == 2 * width:
            yield from (Before(*pair) for pair in permutations(value.chunk(2, dim=-1)))


def _distance(reading: Before, function: Activation, inner: torch.Tensor) -> float:
    """How far a reading's activations are from the recorded ones at most; NaN, which is near nothing, if either is."""
    if reading.ups.shape != inner.shape:
        return float("inf")
    made = function(reading.ups) if reading.gates is None else function(reading.gates) * reading.ups
    return float((made.float() - inner.float()).abs().max())
