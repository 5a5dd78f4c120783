"""Puts what the passes showed together into `Activations`, and says what is missing and why.

Shapes: S tokens, L layers, H query heads, K key/value heads, D head_dim, E hidden_size, F intermediate_size,
V vocab_size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from tercet.explorer.anatomy import Anatomy
from tercet.explorer.attention_probe import attention_set_to
from tercet.explorer.costs import has_experts
from tercet.explorer.lens import read_lens
from tercet.explorer.record import Activations, LeftOut
from tercet.explorer.recorder import PassRecord
from tercet.explorer.words import BilingualError

_Parts = dict[str, torch.Tensor | None]
_ROUNDING = 0.02  # of the sum of a row of bfloat16 weights


def collect_activations(
    model: PreTrainedModel, anatomy: Anatomy, record: PassRecord, ids: torch.Tensor, step: Callable[[str], None]
) -> tuple[Activations, list[LeftOut]]:
    """Everything that `record` and, where it lacks attention, the model's public outputs show.

    Args:
        model: In evaluation mode.
        anatomy: Its parts.
        record: Of the pass over `ids`.
        ids: (1, S).
        step: Told what is done.

    Raises:
        BilingualError: The logits are no numbers.
    """
    assert record.logits is not None and record.embeddings is not None and record.first is not None
    logits = record.logits[0].float().cpu()
    if not logits.isfinite().all():
        raise BilingualError("model.logits")
    lens_ids, lens_probabilities = read_lens(model, anatomy, record, ids, step)
    attention, left_out = _attention(model, record, ids)
    mlp, more = _additions(model, anatomy, record)
    left_out += more
    if not record.angles and record.positions is None:
        left_out.append(LeftOut("rotary_angles", "no_angles"))
    activations = Activations(
        embeddings=record.embeddings,
        position_embeddings=record.positions,
        rotary_angles=_angles(record),
        hidden=torch.stack([record.first, *(layer.hidden for layer in record.layers)]),
        **attention,
        **mlp,
        lens_ids=lens_ids,
        lens_probabilities=lens_probabilities,
        logits=logits,
    )
    return activations, left_out


def _angles(record: PassRecord) -> torch.Tensor | None:
    """Those that are as wide as the first layer's, (C, 2, S, R)."""
    alike = [angles for angles in record.angles if angles.shape == record.angles[0].shape]
    return torch.stack(alike) if alike else None


def _attention(model: PreTrainedModel, record: PassRecord, ids: torch.Tensor) -> tuple[_Parts, list[LeftOut]]:
    """Queries, keys, values and attentions."""
    calls = [layer.attention for layer in record.layers]
    seen = [call for call in calls if call is not None]
    if not seen:
        return _public_attention(model, ids, len(calls))
    left_out = []
    parts: _Parts = {}
    for name, field in (("queries", "query"), ("keys", "key"), ("values", "value"), ("attentions", "weights")):
        parts[name] = _stack([getattr(call, field) for call in seen]) if len(seen) == len(calls) else None
        if parts[name] is None:
            if len(seen) < len(calls):
                values = {"seen": str(len(seen)), "all": str(len(calls))}
                left_out.append(LeftOut(name, "some_attend", values))
            else:
                left_out.append(LeftOut(name, "heads_differ"))
    weights = parts["attentions"]
    if weights is not None and (weights.sum(-1) - 1).abs().max() > _ROUNDING:
        left_out.append(LeftOut("attentions", "sink"))
    return parts, left_out


def _public_attention(model: PreTrainedModel, ids: torch.Tensor, num_layers: int) -> tuple[_Parts, list[LeftOut]]:
    """Of a family without the attention interface: weights from its outputs, keys and values from its cache."""
    with attention_set_to(model, "eager"):
        output = _ask(model, ids)
        weights = _public_stack(output.get("attentions") or (), num_layers)
        if weights is not None and weights.triu(1).any():
            # Falcon leaves the mask to a kernel that is not run when weights are asked for; so it is given one.
            output = _ask(model, ids, attention_mask=_causal_mask(ids.shape[1], model))
            weights = _public_stack(output.get("attentions") or (), num_layers)
    if weights is not None and weights.triu(1).any():
        weights = None
    held = [layer for layer in getattr(output.get("cache"), "layers", ()) if getattr(layer, "keys", None) is not None]
    parts: _Parts = {
        "queries": None,
        "keys": _public_stack([layer.keys for layer in held], num_layers),
        "values": _public_stack([layer.values for layer in held], num_layers),
        "attentions": weights,
    }
    reasons = {"queries": "no_queries", "keys": "no_states", "values": "no_states", "attentions": "no_attention"}
    name = {"model": type(model).__name__}
    return parts, [LeftOut(part, reasons[part], name) for part, value in parts.items() if value is None]


def _ask(model: PreTrainedModel, ids: torch.Tensor, **more: torch.Tensor) -> Mapping[str, Any]:
    try:
        return model(input_ids=ids, use_cache=True, output_attentions=True, return_dict=True, **more)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # not every family takes these arguments
        return {}


def _causal_mask(num_tokens: int, model: PreTrainedModel) -> torch.Tensor:
    """To be added to scores, (1, 1, S, S)."""
    lowest = torch.full((1, 1, num_tokens, num_tokens), torch.finfo(model.dtype).min, dtype=model.dtype)
    return lowest.triu(1).to(model.device)


def _public_stack(tensors: Sequence[Any], num_layers: int) -> torch.Tensor | None:
    usable = [tensor[0].float().cpu() for tensor in tensors if torch.is_tensor(tensor) and tensor.ndim == 4]
    return _stack(usable) if len(usable) == num_layers else None


def _additions(model: PreTrainedModel, anatomy: Anatomy, record: PassRecord) -> tuple[_Parts, list[LeftOut]]:
    """What attention and MLP add, and the MLP's inside."""
    left_out = []
    added = [layer.additions for layer in record.layers if layer.additions is not None]
    inner = [layer.expansion.activations for layer in record.layers if layer.expansion is not None]
    parts: _Parts = {"attention_outputs": None, "mlp_activations": None, "mlp_outputs": None}
    if len(added) == len(record.layers):
        parts["attention_outputs"] = torch.stack([part.attention for part in added])
        parts["mlp_outputs"] = torch.stack([part.mlp for part in added])
    else:
        name = {"model": type(model).__name__}
        left_out += [LeftOut(part, "no_sum", name) for part in ("attention_outputs", "mlp_outputs")]
    if len(inner) == len(record.layers):
        parts["mlp_activations"] = _stack(inner)
    if parts["mlp_activations"] is None:
        left_out.append(LeftOut("mlp_activations", _experts_reason(anatomy) or "no_contraction"))
    before, more = _before_activation(anatomy, record)
    return parts | before, left_out + more


def _before_activation(anatomy: Anatomy, record: PassRecord) -> tuple[_Parts, list[LeftOut]]:
    """What the MLP's expanding matrices give."""
    seen = [layer.expansion.before for layer in record.layers if layer.expansion and layer.expansion.before]
    gates = [before.gates for before in seen if before.gates is not None]
    parts: _Parts = {"mlp_gates": None, "mlp_ups": None}
    if len(seen) == len(record.layers) and len(gates) in (0, len(seen)):
        parts["mlp_ups"] = _stack([before.ups for before in seen])
        parts["mlp_gates"] = _stack(gates)
    if parts["mlp_ups"] is not None:
        return parts, []
    return parts, [LeftOut("mlp_ups", _experts_reason(anatomy) or "no_activation")]


def _experts_reason(anatomy: Anatomy) -> str | None:
    """Why the inside of the MLPs is not there, if experts are why."""
    found = [any(has_experts(part) for part in block.feed_forward) for block in anatomy.blocks]
    return "experts" if all(found) else "some_experts" if any(found) else None


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.stack(list(tensors)) if len({tensor.shape for tensor in tensors}) == 1 else None
