"""The inside of an MLP: what its contracting matrix is given, and the numbers before the activation that made it.

Families name and arrange the expanding matrices as they like (gate and up, both in one, one alone). A reading is taken
only if the activation of what they returned is what the contracting matrix was given.

Shapes: S tokens, E hidden_size, F intermediate_size.
"""

from collections.abc import Callable, Iterator, Mapping
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
    """What the expanding matrices return, (S, F) each; `gates` is None where there is no gate.

    `activation` names the function that leads from there to what is contracted.
    """

    gates: torch.Tensor | None
    ups: torch.Tensor
    activation: str


class Expansion(NamedTuple):
    """The inside of an MLP.

    Attributes:
        activations: What its contracting matrix is given, (S, F).
        before: What `activations` is made of; None where no reading gives just it.
    """

    activations: torch.Tensor
    before: Before | None


def activations_named(name: str) -> dict[str, Activation]:
    """The activation of this name, then the usual ones; those that learn something of their own are not among them."""
    made = {known: ACT2FN[known] for known in dict.fromkeys((name, *_USUAL)) if known in ACT2FN}
    return {known: function for known, function in made.items() if not any(True for _ in function.parameters())}


def find_expansion(
    block: Block, calls: BlockCalls, additions: Additions | None, functions: Mapping[str, Activation]
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
            return Expansion(inner, _before(calls, contract, inner, functions))
    return None


def _before(
    calls: BlockCalls, contract: Call, inner: torch.Tensor, functions: Mapping[str, Activation]
) -> Before | None:
    """The reading that is nearest to `inner`, if it is that but for rounding."""
    tolerance = _TOLERANCE * torch.finfo(inner.dtype).eps * float(inner.abs().max())
    nearest, least = None, tolerance
    for gates, ups in _readings(calls, contract, inner.shape[-1]):
        for name, function in functions.items():
            distance = _distance(gates, ups, function, inner)
            if distance <= least and (nearest is None or distance < least):
                nearest, least = Before(gates, ups, name), distance
    return nearest


_Reading = tuple[torch.Tensor | None, torch.Tensor]  # gates and ups


def _readings(calls: BlockCalls, contract: Call, width: int) -> Iterator[_Reading]:
    """All of the matrices that are given what the first one is, the MLP's input, and return F numbers, or 2 F."""
    given = calls.matrices[0].given
    expanding = [
        call.value.reshape(-1, call.value.shape[-1])
        for call in calls.matrices[: calls.matrices.index(contract)]
        if call.given is given or (call.given.shape == given.shape and torch.equal(call.given, given))
    ]
    single = [value for value in expanding if value.shape[-1] == width]
    yield from ((None, value) for value in single)
    yield from permutations(single, 2)
    for value in expanding:
        if value.shape[-1] == 2 * width:
            yield from permutations(value.chunk(2, dim=-1), 2)


def _distance(gates: torch.Tensor | None, ups: torch.Tensor, function: Activation, inner: torch.Tensor) -> float:
    """How far a reading's activations are from the recorded ones at most; NaN, which is near nothing, if either is."""
    if ups.shape != inner.shape:
        return float("inf")
    made = function(ups) if gates is None else function(gates) * ups
    return float((made.float() - inner.float()).abs().max())
