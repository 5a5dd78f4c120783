"""What each native family can express, and its config written as ours and back.

A family is described by our own fields: those that have one value in it, and those that it leaves free. Whatever a
family cannot express is refused by the name of the field; nothing is dropped or approximated.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tercet.modeling import TercetConfig


@dataclass(frozen=True)
class Family:
    """A native architecture, as a set of the decoders that our config can describe.

    Attributes:
        name: `model_type` in transformers.
        fixed: Our fields that have one value in this family.
        layer_kinds: Which layers may slide: none, all or none, any.
        one_attention_bias: One switch for the biases of q, k, v and the output projection.
        can_skip_rope: Single layers may go without rotary positions.
        native_only: Fields of the native config that we have no counterpart for, with the value that means "off".
    """

    name: str
    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    fixed: Mapping[str, Any]
    layer_kinds: Literal["full", "uniform", "any"] = "full"
    one_attention_bias: bool = False
    can_skip_rope: bool = False
    native_only: Mapping[str, Any] = field(default_factory=dict)


_ROTARY = {
    "norm_type": "rms_norm",
    "position_embedding_type": "rope",
    "mlp_type": "gated",
    "hidden_dropout": 0.0,
    "embedding_dropout": 0.0,
}

# The order is that of `narrowest_family`: the first that fits is taken.
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "gpt2",
            GPT2Config,
            GPT2LMHeadModel,
            {
                "norm_type": "layer_norm",
                "position_embedding_type": "learned",
                "mlp_type": "plain",
                "qk_norm": False,
                "attention_bias": True,
                "attention_output_bias": True,
                "mlp_bias": True,
            },
            native_only={
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                "add_cross_attention": False,
            },
        ),
        Family("llama", LlamaConfig, LlamaForCausalLM, {**_ROTARY, "qk_norm": False}, one_attention_bias=True),
        Family(
            "mistral",
            MistralConfig,
            MistralForCausalLM,
            {**_ROTARY, "qk_norm": False, "attention_bias": False, "attention_output_bias": False, "mlp_bias": False},
            layer_kinds="uniform",
        ),
        Family(
            "qwen2",
            Qwen2Config,
            Qwen2ForCausalLM,
            {**_ROTARY, "qk_norm": False, "attention_bias": True, "attention_output_bias": False, "mlp_bias": False},
            layer_kinds="any",
        ),
        Family(
            "qwen3",
            Qwen3Config,
            Qwen3ForCausalLM,
            {**_ROTARY, "qk_norm": True, "mlp_bias": False},
            layer_kinds="any",
            one_attention_bias=True,
        ),
        Family(
            "smollm3",
            SmolLM3Config,
            SmolLM3ForCausalLM,
            {**_ROTARY, "qk_norm": False},
            layer_kinds="any",
            one_attention_bias=True,
            can_skip_rope=True,
        ),
    )
}

# Fields of one name and one meaning on both sides; GPT-2 calls some of them otherwise.
_SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "attention_dropout": "attn_pdrop",
    "hidden_dropout": "resid_pdrop",
    "embedding_dropout": "embd_pdrop",
}


def family_obstacles(config: TercetConfig, family: Family) -> list[str]:
    """Why a family cannot express a decoder: one phrase for each field, none where it can."""
    found = [
        f"{name} is {getattr(config, name)!r} and {family.name} has only {value!r}"
        for name, value in family.fixed.items()
        if getattr(config, name) != value
    ]
    if family.one_attention_bias and config.attention_output_bias != config.attention_bias:
        found.append(
            f"attention_output_bias is {config.attention_output_bias} and attention_bias {config.attention_bias}, and "
            f"{family.name} has one switch for both"
        )
    kinds = sorted(set(config.layer_types or []))
    if family.layer_kinds == "full" and "sliding_attention" in kinds:
        found.append(
            f"layer_types has sliding layers (sliding_window {config.sliding_window}) and {family.name} has none"
        )
    if family.layer_kinds == "uniform" and len(kinds) > 1:
        found.append(f"layer_types mixes {' and '.join(kinds)} and {family.name} has one kind for all layers")
    if not family.can_skip_rope and config.no_rope_layers is not None and not all(config.no_rope_layers):
        found.append(f"no_rope_layers is {config.no_rope_layers} and {family.name} rotates in every layer")
    return found + _head_obstacles(config, family)


def _head_obstacles(config: TercetConfig, family: Family) -> list[str]:
    found = []
    num_heads, hidden_size = config.num_attention_heads, config.hidden_size
    if family.name == "gpt2":
        if config.num_key_value_heads != num_heads:
            found.append(f"num_key_value_heads is {config.num_key_value_heads} and gpt2 has one for each query head")
        if config.head_dim is not None and config.head_dim * num_heads != hidden_size:
            found.append(f"head_dim is {config.head_dim} and gpt2 has only hidden_size / num_attention_heads")
    elif family.name == "llama" and hidden_size % num_heads != 0:
        found.append(f"num_attention_heads is {num_heads} and llama needs a divisor of hidden_size ({hidden_size})")
    return found


def narrowest_family(config: TercetConfig) -> Family:
    """The first family that can express a decoder: GPT-2, Llama, Mistral, Qwen2, Qwen3, SmolLM3.

    In that order a family comes before those that can do more: what Llama expresses, SmolLM3 does too, but fewer
    runtimes know it.

    Raises:
        ValueError: None can; says what stands in the way of each.
    """
    reasons = {name: family_obstacles(config, family) for name, family in FAMILIES.items()}
    for name, family in FAMILIES.items():
        if not reasons[name]:
            return family
    listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
    raise ValueError(f"no native family can express this model ({listed}).")


def to_native_config(config: TercetConfig, family: Family, *, has_tied_head: bool) -> PreTrainedConfig:
    """A decoder's config in a family's own words.

    Raises:
        ValueError: The family cannot express it; names the fields.
    """
    if obstacles := family_obstacles(config, family):
        raise ValueError(f"{family.name} cannot express this model: {'; '.join(obstacles)}.")
    fields: dict[str, Any] = {name: getattr(config, name) for name in _SHARED}
    fields |= {"tie_word_embeddings": has_tied_head}
    fields |= {name: getattr(config, name) for name in ("intermediate_size", "hidden_act", "attention_dropout")}
    if family.name == "gpt2":
        fields |= {name: getattr(config, name) for name in ("norm_eps", "hidden_dropout", "embedding_dropout")}
        return family.config_class(**{_GPT2_NAMES.get(name, name): value for name, value in fields.items()})
    fields |= {
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": copy.deepcopy(config.rope_parameters),
    }
    assert config.head_dim is not None
    # Qwen2 and SmolLM3 have no such field, and yet their classes follow one where it is given.
    if hasattr(family.config_class, "head_dim") or config.head_dim * config.num_attention_heads != config.hidden_size:
        fields["head_dim"] = config.head_dim
    fields |= {
        name: getattr(config, name) for name in ("attention_bias", "mlp_bias") if name not in family.fixed
    } | _native_layer_fields(config, family)
    return family.config_class(**fields)


def _native_layer_fields(config: TercetConfig, family: Family) -> dict[str, Any]:
    """Which layers slide and which rotate."""
    assert config.layer_types is not None
    is_sliding = "sliding_attention" in config.layer_types
    window = config.sliding_window if is_sliding else None
    if family.layer_kinds == "full":
        return {}
    if family.layer_kinds == "uniform":
        return {"sliding_window": window}
    fields: dict[str, Any] = {
        "use_sliding_window": is_sliding,
        "sliding_window": window,
        "layer_types": list(config.layer_types),
    }
    if family.can_skip_rope:
        fields["no_rope_layers"] = list(config.no_rope_layers or [1] * config.num_hidden_layers)
    return fields


def from_native_config(config: PreTrainedConfig, family: Family, *, has_tied_head: bool) -> TercetConfig:
    """A native config in our words.

    Raises:
        ValueError: It uses something that we have not; names the field.
    """
    native: Any = config
    for name, off in family.native_only.items():
        if getattr(native, name) != off:
            raise ValueError(f"{name} is {getattr(native, name)!r} and Tercet has only {off!r}.")
    if getattr(native, "quantization_config", None) is not None:
        raise ValueError("quantization_config: the weights are quantized; import the model that they were made from.")
    pad = native.pad_token_id
    if pad is not None and not -native.vocab_size <= pad < native.vocab_size:
        raise ValueError(f"pad_token_id is {pad} and the embedding has {native.vocab_size} rows.")
    fields: dict[str, Any] = {name: getattr(native, name) for name in _SHARED}
    fields |= {**family.fixed, "tie_word_embeddings": has_tied_head}
    if family.name == "gpt2":
        inner = native.n_inner if native.n_inner is not None else 4 * native.n_embd
        fields |= {ours: getattr(native, theirs) for ours, theirs in _GPT2_NAMES.items()}
        return TercetConfig(**{**fields, "intermediate_size": inner})
    fields |= {
        "intermediate_size": native.intermediate_size,
        "hidden_act": native.hidden_act,
        "attention_dropout": native.attention_dropout or 0.0,
        "num_key_value_heads": native.num_key_value_heads,
        "head_dim": getattr(native, "head_dim", None) or native.hidden_size // native.num_attention_heads,
        "norm_eps": native.rms_norm_eps,
        "rope_parameters": copy.deepcopy(native.rope_parameters),
    }
    if "attention_bias" not in family.fixed:
        fields |= {"attention_bias": native.attention_bias, "attention_output_bias": native.attention_bias}
    if "mlp_bias" not in family.fixed:
        fields["mlp_bias"] = native.mlp_bias
    return TercetConfig(**fields, **_layer_fields(native, family))


def _layer_fields(native: Any, family: Family) -> dict[str, Any]:
    num_layers = native.num_hidden_layers
    if family.layer_kinds == "full":
        return {}
    if family.layer_kinds == "uniform":
        return {"sliding_window": native.sliding_window}
    layer_types = list(native.layer_types)[:num_layers]
    fields = {
        "layer_types": layer_types,
        "sliding_window": native.sliding_window if "sliding_attention" in layer_types else None,
    }
    if family.can_skip_rope:
        # One entry a layer; the native list may be longer.
        fields["no_rope_layers"] = [int(bool(uses)) for uses in native.no_rope_layers[:num_layers]]
    return fields
