"""What a model is, under the names that all families share: from its config, and from what a pass showed."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from tercet.explorer.anatomy import Anatomy, activation_name, list_weights, mlp_width, norm_name, text_config
from tercet.explorer.attention_probe import AttentionCall
from tercet.explorer.costs import has_experts
from tercet.explorer.record import ModelFacts
from tercet.explorer.recorder import PassRecord
from tercet.training.accounting import num_parameters
from tercet.training.hardware import processor_name

_POSITION_FIELDS = ("max_position_embeddings", "max_seq_len", "max_sequence_length")


def model_facts(model: PreTrainedModel, anatomy: Anatomy, record: PassRecord, name: str) -> ModelFacts:
    """Facts for the page; sizes as the pass had them, where it shows them."""
    config = text_config(model)
    call = next((layer.attention for layer in record.layers if layer.attention is not None), None)
    inner = next((layer.expansion for layer in record.layers if layer.expansion is not None), None)
    num_heads = call.query.shape[0] if call else config.num_attention_heads
    hidden_size = record.layers[0].hidden.shape[-1]
    own_head_dim = getattr(config, "head_dim", None) or hidden_size // num_heads
    positions = _positions(config, record)
    return ModelFacts(
        name=name,
        class_name=type(model).__name__,
        model_type=model.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=len(anatomy.blocks),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_key_value_heads=call.key.shape[0] if call else getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=call.query.shape[-1] if call else own_head_dim,
        intermediate_size=inner.activations.shape[-1] if inner else mlp_width(config),
        vocab_size=config.vocab_size,
        max_positions=max_positions(model),
        positions=positions,
        norm=norm_name(model),
        norms_first=all(layer.norms_first for layer in record.layers),
        rotated=tuple(positions == "rotary" and _rotates(config, index) for index in range(len(anatomy.blocks))),
        mlp="experts" if has_experts(model) else "gated" if inner is not None and inner.is_gated else "plain",
        activation=activation_name(config),
        attention_scales=_scales(record),
        windows=windows(config, record),
        num_parameters=num_parameters(model),
        weights=list_weights(model, anatomy),
        hyperparameters=_hyperparameters(model),
    )


def max_positions(model: PreTrainedModel) -> int | None:
    """The longest context that the config tells, in tokens."""
    config = text_config(model)
    found = (getattr(config, name, None) for name in _POSITION_FIELDS)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def _positions(config: Any, record: PassRecord) -> str:
    if record.positions is not None:
        return "learned"
    if record.angles is not None or getattr(config, "rotary_dim", None):
        return "rotary"
    is_alibi = getattr(config, "alibi", None) or config.model_type in ("bloom", "mpt")
    return "alibi" if is_alibi else "rotary" if getattr(config, "rope_parameters", None) else "unknown"


def _rotates(config: Any, index: int) -> bool:
    # In SmolLM3's, Llama 4's and Tercet's config 1 is a layer with rotation, whatever the field's name says.
    layers = getattr(config, "no_rope_layers", None)
    return not layers or bool(layers[index])


def windows(config: Any, record: PassRecord) -> tuple[int | None, ...]:
    """Of each layer how many keys a query sees: what attention was told, else as transformers makes its masks."""
    calls = [layer.attention for layer in record.layers]
    told = [None if call is None else call.window for call in calls]
    found = [_window_of_config(config, index) if window is None else window for index, window in enumerate(told)]
    return tuple(
        None if window is None or (call is not None and sees_beyond(call, window)) else window
        for window, call in zip(found, calls, strict=True)
    )


def sees_beyond(call: AttentionCall, window: int) -> bool:
    """Whether a query gave weight to a key that is further away than a window: what was told is not what was done."""
    return bool(call.weights.tril(-window).any())


def _window_of_config(config: Any, index: int) -> int | None:
    local_kinds = getattr(config, "attention_layers", None)  # GPT-Neo's
    if local_kinds is not None:
        return config.window_size if local_kinds[index] == "local" else None
    sliding, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return sliding or chunk
    return {"sliding_attention": sliding, "chunked_attention": chunk}.get(kinds[index])


def _scales(record: PassRecord) -> tuple[float, ...] | None:
    scales = [layer.attention.scale for layer in record.layers if layer.attention is not None]
    told = [scale for scale in scales if scale is not None]
    return tuple(told) if len(told) == len(record.layers) else None


def _hyperparameters(model: PreTrainedModel) -> dict[str, object]:
    # Through JSON: values as the file has them. What every config has (labels, what to return) shapes no decoder.
    fields = json.loads(model.config.to_json_string(use_diff=False))
    common = {*vars(PreTrainedConfig()), "auto_map", "_name_or_path", "transformers_version"} - {"tie_word_embeddings"}
    return {name: value for name, value in fields.items() if name not in common}


def versions() -> dict[str, str]:
    """Of what decides the numbers; and the processor."""
    import tercet

    return {
        "tercet": tercet.__version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "processor": processor_name(),
    }


def name_of(model: PreTrainedModel) -> str:
    """The last part of the folder that a model came from, or its class."""
    parts: Sequence[str] = [part for part in str(model.config.name_or_path or "").split("/") if part]
    return parts[-1] if parts else type(model).__name__
