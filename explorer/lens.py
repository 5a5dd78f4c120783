"""The logit lens (nostalgebraist, 2020): what the model would say if its last block were this one.

Each layer's residual stream goes through the model's own final norm and head, softcaps and scales included.

Shapes: S tokens, L layers, E hidden_size, V vocab_size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from tercet.explorer.anatomy import Anatomy
from tercet.explorer.recorder import PassRecord

NUM_SHOWN = 5


class Top(NamedTuple):
    """The likeliest tokens at each position, (S, 5) each, on the CPU."""

    ids: torch.Tensor
    probabilities: torch.Tensor


def read_lens(
    model: PreTrainedModel, anatomy: Anatomy, record: PassRecord, ids: torch.Tensor, step: Callable[[str], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top five ids behind each block and their probabilities, (L, S, 5) each.

    Args:
        model: In evaluation mode.
        anatomy: Its parts.
        record: Of the pass over `ids`.
        ids: (1, S).
        step: Told what is done.
    """
    assert record.last is not None and record.logits is not None
    like = record.last
    tail = [call.module for call in record.tail if call.module is not anatomy.head]
    short_way = [*tail, anatomy.head] if anatomy.head is not None else []
    goes_short = bool(short_way) and _is_same_top(_run(short_way, like), record.logits)
    tops = []
    for index, layer in enumerate(record.layers):
        hidden = layer.hidden.to(like.device, like.dtype).view_as(like)
        if goes_short:
            logits = _run(short_way, hidden)
        else:
            step(f"logit lens, layer {index + 1} of {len(record.layers)}")
            logits = _run_whole(model, anatomy.blocks[-1].module, hidden, ids)
        tops.append(_top(logits))
    return torch.stack([top.ids for top in tops]), torch.stack([top.probabilities for top in tops])


def _run(modules: Sequence[nn.Module | None], hidden: torch.Tensor) -> torch.Tensor:
    for module in modules:
        assert module is not None
        hidden = module(hidden)
    return hidden


def _is_same_top(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether this way leads to the model's own logits: nothing between norm, head and output is missed."""
    if logits.shape != expected.shape:
        return False
    return torch.equal(_top(logits).ids, _top(expected).ids) and torch.allclose(
        logits.float(), expected.float(), rtol=16 * torch.finfo(expected.dtype).eps, atol=1e-5
    )


def _run_whole(model: PreTrainedModel, last: nn.Module, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The model's own way from `hidden` on: a whole pass, in which the last block returns just this."""

    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = last.register_forward_hook(replace)
    try:
        return model(input_ids=ids, use_cache=False, return_dict=True).logits
    finally:
        handle.remove()


def _top(logits: torch.Tensor) -> Top:
    """Of logits (1, S, V)."""
    logits = logits[0].float()
    # By logits: probabilities that round to 0 would be ties.
    ids = logits.topk(min(NUM_SHOWN, logits.shape[-1]), dim=-1).indices
    return Top(ids.cpu(), logits.softmax(-1).gather(-1, ids).cpu())
