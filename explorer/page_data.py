"""What the page holds of a trace: facts as JSON, and arrays packed as precisely as the size limit lets them be.

Shapes: S tokens in all, L layers, H query heads, K key/value heads, D head_dim, E hidden_size, F intermediate_size,
V vocab_size, N steps (the prefill and each decode), W the numbers of an E-wide vector that are shown.
"""

import dataclasses
import json
import math

import numpy as np
import torch

from tercet.explorer.packing import (
    PackedArray,
    pack_descending,
    pack_float32,
    pack_fractions,
    pack_scaled,
    pack_unsigned,
)
from tercet.explorer.reach import Reach, visible
from tercet.explorer.record import StepFacts, Trace

NUM_EXACT_LOGITS = 512
NUM_NEURONS = 12
NUM_PROFILE_CELLS = 128


@dataclasses.dataclass(frozen=True)
class Precision:
    """How much of each array a page holds.

    Attributes:
        heads_bits: Of queries, keys and values; 0 leaves them out.
        attention_bits: Of attention weights; 0 leaves them out.
        vector_width: How many numbers of each E-wide vector; None is all.
    """

    heads_bits: int
    attention_bits: int
    vector_width: int | None


PRECISIONS = (
    Precision(16, 16, None),
    Precision(16, 16, 64),
    Precision(8, 16, 64),
    Precision(8, 16, 16),
    Precision(0, 16, 16),
    Precision(0, 8, 16),
    Precision(0, 0, 16),
)


def facts(trace: Trace, precision: Precision) -> dict[str, object]:
    """Everything that is no large array, under the names of the trace."""
    acts, model = trace.activations, dataclasses.asdict(trace.model)
    model["hyperparameters"] = [[name, _plain(value)] for name, value in trace.model.hyperparameters.items()]
    left_out = [dataclasses.asdict(item) for item in trace.left_out]
    for parts, bits in (
        (("queries", "keys", "values"), precision.heads_bits),
        (("attentions",), precision.attention_bits),
    ):
        left_out += [
            {"part": part, "reason": "size", "values": {}}
            for part in parts
            if bits == 0 and getattr(acts, part) is not None
        ]
    steps = _steps(trace)
    candidates = _candidates(trace)
    return {
        "model": model,
        "prompt": trace.prompt,
        "sampling": None if trace.sampling is None else dataclasses.asdict(trace.sampling),
        "num_prompt_tokens": trace.num_prompt_tokens,
        "tokens": [dataclasses.asdict(token) for token in trace.tokens],
        "vocabulary": {str(index): text for index, text in trace.vocabulary.items()},
        "steps": [dataclasses.asdict(step) for step in steps],
        "has_cache": _has_cache(trace),
        "uncached": [dataclasses.asdict(step) for step in trace.uncached],
        "cache_bytes_per_token": list(trace.cache_bytes_per_token),
        "losses": list(trace.losses),
        "bits_per_byte": trace.bits_per_byte,
        "lens": {
            "ids": acts.lens_ids.tolist(),
            "probabilities": [[_short(row) for row in layer] for layer in acts.lens_probabilities.tolist()],
        },
        "candidates": candidates,
        "vector_width": precision.vector_width or trace.model.hidden_size,
        "precision": dataclasses.asdict(precision),
        "score_error": _score_error(trace, precision.heads_bits),
        "left_out": left_out,
        "versions": trace.versions,
    }


def arrays(trace: Trace, precision: Precision) -> dict[str, PackedArray]:
    """The page's arrays; those that the trace or the precision leaves out are not there."""
    acts, width = trace.activations, precision.vector_width
    packed = {
        "embeddings": pack_scaled(_array(acts.embeddings)[:, :width], 16),
        "hidden": pack_scaled(_array(acts.hidden)[..., :width], 16),
        "hidden_stats": pack_float32(_stats(_array(acts.hidden))),
    }
    if acts.position_embeddings is not None:
        packed["positions"] = pack_scaled(_array(acts.position_embeddings)[:, :width], 16)
    if acts.rotary_angles is not None:
        packed["rotary"] = pack_float32(np.stack([_pair_angles(_array(turn)) for turn in acts.rotary_angles]))
    if precision.heads_bits:
        for name in ("queries", "keys", "values"):
            states = getattr(acts, name)
            if states is not None:
                packed[name] = pack_scaled(_array(states), precision.heads_bits)
    if acts.attentions is not None and precision.attention_bits:
        packed["attentions"] = pack_fractions(_array(acts.attentions), precision.attention_bits)
    if acts.attention_outputs is not None:
        outputs = _array(acts.attention_outputs)
        packed["attention_outputs"] = pack_scaled(outputs[..., :width], 16)
        packed["attention_output_stats"] = pack_float32(_stats(outputs))
        if any(layer.order == "sequential" for layer in trace.model.layers):
            packed["middle_stats"] = pack_float32(_stats(_array(acts.hidden)[:-1] + outputs))
    if acts.mlp_outputs is not None:
        packed["mlp_outputs"] = pack_scaled(_array(acts.mlp_outputs)[..., :width], 16)
        packed["mlp_output_stats"] = pack_float32(_stats(_array(acts.mlp_outputs)))
    if acts.mlp_activations is not None:
        order, neurons = _neurons(_array(acts.mlp_activations))
        packed |= neurons
        for name, before in (("neuron_gates", acts.mlp_gates), ("neuron_ups", acts.mlp_ups)):
            if before is not None:
                packed[name] = pack_float32(np.take_along_axis(_array(before), order, axis=-1))
    packed |= _logits(trace)
    return packed


def least_bytes(trace: Trace, precision: Precision) -> int:
    """Below what no page of this precision will be, told from shapes: saves packing what cannot fit."""
    acts = trace.activations
    heads = sum(states.numel() for states in (acts.queries, acts.keys, acts.values) if states is not None)
    weights = 0 if acts.attentions is None else acts.attentions.numel()
    # Deflated, heads keep over 0.8 of their bytes and attention, half of it zeros, over 0.2; base64 adds a third.
    return int((heads * precision.heads_bits * 0.8 + weights * precision.attention_bits * 0.2) / 8 * 4 / 3)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


def _plain(value: object) -> object:
    """As JSON can hold it: infinities, which some configs have, become their names."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


def _short(probabilities: list[float]) -> list[float]:
    return [float(f"{probability:.6g}") for probability in probabilities]


def _has_cache(trace: Trace) -> bool:
    return trace.prefill.cache_bytes > 0


def _steps(trace: Trace) -> tuple[StepFacts, ...]:
    """A pass for each new token: prefill and decode, or, of a model without a cache, all tokens again each time."""
    return (trace.prefill, *trace.decode) if _has_cache(trace) else (trace.prefill, *trace.uncached[1:])


def _num_predictions(trace: Trace) -> int:
    """Positions whose logits chose a token: from the prompt's last on. Without any new token, the prompt's last."""
    return max(len(trace.tokens) - trace.num_prompt_tokens, 1)


def _predicting_logits(trace: Trace) -> np.ndarray:
    start = trace.num_prompt_tokens - 1
    return _array(trace.activations.logits)[start : start + _num_predictions(trace)]


def _candidates(trace: Trace) -> list[list[int]]:
    """Of each step the ids of the likeliest tokens, as far as the vocabulary has their text."""
    rows = []
    for logits in _predicting_logits(trace):
        order = np.argsort(-logits, kind="stable")[:NUM_EXACT_LOGITS].tolist()
        known = next((i for i, index in enumerate(order) if index not in trace.vocabulary), len(order))
        rows.append(order[:known])
    return rows


def _logits(trace: Trace) -> dict[str, PackedArray]:
    """All V logits of each step, descending: the first as they are, the rest rounded and without their ids."""
    ordered = -np.sort(-_predicting_logits(trace), axis=-1)
    exact = min(NUM_EXACT_LOGITS, ordered.shape[-1])
    packed = {"logits": pack_float32(np.maximum(ordered[:, :exact], -1e30))}
    if exact < ordered.shape[-1]:
        packed["logits_tail"] = pack_descending(ordered[:, exact:])
    return packed


def _stats(vectors: np.ndarray) -> np.ndarray:
    """Mean, standard deviation and root mean square of whole vectors, (..., E) to (..., 3)."""
    wide = vectors.astype(np.float64)
    return np.stack([wide.mean(-1), wide.std(-1), np.sqrt((wide**2).mean(-1))], axis=-1)


def _pair_angles(rotation: np.ndarray) -> np.ndarray:
    """Angle of each rotated pair, in (-pi, pi], from cos and sin (2, S, R) to (S, R / 2).

    Families write each angle twice: in both halves (Llama), side by side (GPT-J), or once already (R is R / 2 then).
    """
    cosines, sines = rotation
    half = cosines.shape[-1] // 2
    angles = np.arctan2(sines, cosines)
    if half and np.allclose(angles[:, :half], angles[:, half:]):
        return angles[:, :half]
    if half and np.allclose(angles[:, 0::2], angles[:, 1::2]):
        return angles[:, 0::2]
    return angles


def _score_error(trace: Trace, bits: int) -> float | None:
    """How far softmax of the masked q·k, from what the page holds, is from the model's own attention at most.

    None where either is not there. Large where a model does more to scores than to scale and mask them (ALiBi, soft
    caps, sinks): the page then says so beside the scores.
    """
    acts = trace.activations
    scales = [layer.attention_scale for layer in trace.model.layers]
    if acts.queries is None or acts.keys is None or acts.attentions is None or not bits:
        return None
    group = acts.queries.shape[1] // acts.keys.shape[1]
    worst = 0.0
    for index, scale in enumerate(scales):
        if scale is None:
            return None
        q, k = _rounded(acts.queries[index], bits), _rounded(acts.keys[index], bits)
        scores = q @ k.repeat_interleave(group, dim=0).transpose(-1, -2) * scale  # (H, S, S)
        layer = trace.model.layers[index]
        seen = visible(scores.shape[-1], Reach(layer.window, layer.chunk))
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        worst = max(worst, (weights - acts.attentions[index]).abs().amax().item())
    return worst


def _rounded(states: torch.Tensor, bits: int) -> torch.Tensor:
    maximum = 2 ** (bits - 1) - 1
    scales = states.abs().amax(-1, keepdim=True).clamp_min(1e-30) / maximum
    return (states / scales).round() * scales


def _neurons(activations: np.ndarray) -> tuple[np.ndarray, dict[str, PackedArray]]:
    """The most active neurons of each token, all neurons as a profile of cells, and how few carry half.

    Args:
        activations: (L, S, F).

    Returns:
        Ids of the most active neurons, (L, S, NUM_NEURONS), and the arrays.
    """
    size = np.abs(activations)
    count = min(NUM_NEURONS, size.shape[-1])
    order = np.argsort(-size, axis=-1, kind="stable")[..., :count]
    energy = np.sort(size.astype(np.float64) ** 2, axis=-1)[..., ::-1].cumsum(-1)
    half = (energy < energy[..., -1:] / 2).sum(-1) + 1
    bounds = np.linspace(0, size.shape[-1], min(NUM_PROFILE_CELLS, size.shape[-1]) + 1).astype(int)[:-1]
    profile = np.maximum.reduceat(size, bounds, axis=-1)
    return order, {
        "neuron_ids": pack_unsigned(order),
        "neuron_values": pack_float32(np.take_along_axis(activations, order, axis=-1)),
        "neuron_half": pack_unsigned(half),
        "neuron_profile": pack_scaled(profile, 8),
    }
