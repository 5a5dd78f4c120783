"""What a norm does, told from one call of it: what it was given, what it returned, and the parameters it really has.

A name is no proof: OLMo's LayerNorm learns nothing, Gemma's RMSNorm keeps its scale as the difference from 1.

Shapes: S tokens, E width.
"""

from itertools import product

import torch
from torch import nn

from tercet.explorer.record import NormFacts

_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_USUAL_EPS = (1e-5, 1e-6, 1e-12)  # of norms that do not tell theirs
_TOLERANCE = 64  # in units of the dtype's rounding; of half precision less
_MOST = 0.03


def norm_facts(module: nn.Module, name: str, given: torch.Tensor, returned: torch.Tensor) -> NormFacts:
    """The reading of a norm that makes what it returned.

    Args:
        module: The norm.
        name: What it is called.
        given: (..., E).
        returned: (..., E).
    """
    unknown = NormFacts(name, type(module).__name__, "unknown", False)
    if given.shape != returned.shape or not given.is_floating_point():
        return unknown
    wide = given.detach().double().reshape(-1, given.shape[-1])  # (S, E)
    made = returned.detach().double().reshape(wide.shape)
    best, least = unknown, min(_TOLERANCE * torch.finfo(returned.dtype).eps, _MOST) * float(made.abs().max())
    learned = {key: value for key, value in module.named_parameters(recurse=False) if value.shape == wide.shape[-1:]}
    weight = next((learned[key].detach().double() for key in learned if key != "bias"), None)
    bias = learned["bias"].detach().double() if "bias" in learned else None
    # A weight that happens to be all ones is a weight: it is tried first, and the others have to come nearer.
    scales = ([("weight", weight), ("one_plus_weight", 1 + weight)] if weight is not None else []) + [("none", None)]
    shifts = ([bias] if bias is not None else []) + [None]
    for (label, normed), (scale, factor), shift in product(_normed(module, wide), scales, shifts):
        reading = normed if factor is None else normed * factor
        error = float((made - (reading if shift is None else reading + shift)).abs().max())
        if error < least * (1 if best is unknown else 0.5):
            best, least = NormFacts(name, label, scale, shift is not None), error
    return best


def _normed(module: nn.Module, wide: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Both normalisations, (S, E) each, with each eps that it may have."""
    told = [value for key in _EPS_NAMES if isinstance(value := getattr(module, key, None), float)]
    centred = wide - wide.mean(-1, keepdim=True)
    made = []
    for eps in told[:1] or _USUAL_EPS:
        made.append(("RMSNorm", wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + eps)))
        made.append(("LayerNorm", centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + eps)))
    return made
