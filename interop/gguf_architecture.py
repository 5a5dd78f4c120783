"""A native model as llama.cpp knows it: architecture, hyperparameters and tensors, or a refusal.

llama.cpp runs a fixed graph for each architecture. It ignores a key that the graph does not use and stops at a tensor
that it does not know, so whatever a graph would compute differently is refused here, by the name of the field.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from tercet.training.errors import UserError

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "gpt2": "gpt2",
}
# Their graphs rotate pairs (2i, 2i + 1) of a head; transformers and the other graphs rotate (i, i + D/2).
_ROTATE_NEIGHBOURS = ("llama", "smollm3")
_SMOLLM3_NO_ROPE_INTERVAL = 4  # fixed in the graph; there is no key for it

_ROTARY_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_LAYER_PREFIXES = ("model.layers.", "transformer.h.")


@dataclass(frozen=True)
class GgufModel:
    """What the file says of the model.

    Attributes:
        architecture: llama.cpp's name of the graph.
        metadata: Hyperparameters by their full key; an int is written as uint32, a float as float32.
        tensors: By llama.cpp's name, in the layout it wants and the dtype of the model; not copied where possible.
    """

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def describe_model(model: PreTrainedModel) -> GgufModel:
    """Map a native causal language model.

    Args:
        model: A causal language model of transformers' own; Tercet's is made one by `to_native`.

    Raises:
        UserError: The family is not mapped, or llama.cpp has no graph that computes what this model computes.
    """
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise UserError(
            f"GGUF: model type {config.model_type!r} is not supported; {', '.join(_ARCHITECTURES)} and tercet are"
        )
    if config.model_type == "smollm3" and all(config.no_rope_layers):
        architecture = "llama"  # the same decoder once every layer rotates
    _check_graph(config, architecture)
    metadata = _gpt2_metadata(config) if architecture == "gpt2" else _rotary_metadata(config, architecture)
    tensors = _map_tensors(model, architecture)
    if _rope_type(config) == "llama3":
        tensors["rope_freqs.weight"] = _rope_divisors(model)
    return GgufModel(architecture, {f"{architecture}.{key}": value for key, value in metadata.items()}, tensors)


def _check_graph(config: Any, architecture: str) -> None:
    """Refuse what the graph would compute differently, or has no tensor for."""
    activation = config.activation_function if architecture == "gpt2" else config.hidden_act
    wanted = ("gelu_new", "gelu_pytorch_tanh") if architecture == "gpt2" else ("silu", "swish")
    if activation not in wanted:
        raise UserError(
            f"GGUF: llama.cpp computes {wanted[0]} in architecture {architecture}, and the activation is {activation}"
        )
    if architecture == "gpt2":
        if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
            raise UserError(
                "GGUF: llama.cpp scales GPT-2's attention by 1/sqrt(head size) only: scale_attn_weights must be true "
                "and scale_attn_by_inverse_layer_idx false"
            )
        return
    _check_window(config, architecture)
    _check_rope(config, architecture)
    if architecture in ("qwen3", "smollm3") and getattr(config, "attention_bias", False):
        raise UserError(f"GGUF: llama.cpp has no attention_bias in architecture {architecture}")
    if architecture == "smollm3" and getattr(config, "mlp_bias", False):
        raise UserError(f"GGUF: llama.cpp has no mlp_bias in architecture {architecture}")


def _check_window(config: Any, architecture: str) -> None:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    if window is not None and slides and window < config.max_position_embeddings:
        raise UserError(
            f"GGUF: llama.cpp has no sliding window in architecture {architecture}, and sliding_window={window} cuts "
            f"the context of max_position_embeddings={config.max_position_embeddings}"
        )


def _check_rope(config: Any, architecture: str) -> None:
    rope = dict(config.rope_parameters)
    kind = _rope_type(config)
    known = ("default", "linear", "yarn", "llama3") if architecture == "llama" else ("default", "linear", "yarn")
    if kind not in known:
        raise UserError(
            f"GGUF: llama.cpp has no RoPE of type {kind} in architecture {architecture}: {', '.join(known)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("GGUF: partial_rotary_factor is not 1, and llama.cpp rotates whole heads")
    unusual = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(key) is not None]
    if kind == "yarn" and (unusual or not rope.get("truncate", True)):
        raise UserError(f"GGUF: yarn with {', '.join(unusual) or 'truncate=false'} is more than llama.cpp computes")
    no_rope_layers = getattr(config, "no_rope_layers", None)
    if architecture == "smollm3":
        graph = [int((index + 1) % _SMOLLM3_NO_ROPE_INTERVAL != 0) for index in range(config.num_hidden_layers)]
        if [int(uses) for uses in no_rope_layers or []] != graph:
            raise UserError(
                f"GGUF: llama.cpp leaves every {_SMOLLM3_NO_ROPE_INTERVAL}th layer without RoPE in architecture "
                f"smollm3, and no_rope_layers={no_rope_layers} asks for others"
            )


def _rope_type(config: Any) -> str:
    return str(dict(getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def _gpt2_metadata(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
    }


def _rotary_metadata(config: Any, architecture: str) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    head_dim = _head_dim(config)
    metadata = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    kind = _rope_type(config)
    if kind in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        metadata |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1),
        }
    return metadata


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _map_tensors(model: PreTrainedModel, architecture: str) -> dict[str, torch.Tensor]:
    config: Any = model.config
    names = _GPT2_NAMES if architecture == "gpt2" else _ROTARY_NAMES
    input_weight = model.get_input_embeddings().weight
    assert isinstance(input_weight, torch.Tensor)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        # Without an output tensor llama.cpp uses the embedding.
        if name == "lm_head.weight" and tensor.data_ptr() == input_weight.data_ptr():
            continue
        gguf_name, module = _rename(name, names)
        # GPT-2's `Conv1D` holds (in, out), everything else (out, in).
        if architecture == "gpt2" and ".c_" in module and tensor.ndim == 2:
            tensor = tensor.t()
        if architecture in _ROTATE_NEIGHBOURS and module in ("self_attn.q_proj", "self_attn.k_proj"):
            is_query = module == "self_attn.q_proj"
            tensor = _pair_neighbours(tensor, config.num_attention_heads if is_query else config.num_key_value_heads)
        tensors[gguf_name] = tensor
    return tensors


def _rename(name: str, names: dict[str, str]) -> tuple[str, str]:
    """A tensor's name in GGUF, and its module's inside the block."""
    module, _, kind = name.rpartition(".")
    prefix = next((prefix for prefix in _LAYER_PREFIXES if name.startswith(prefix)), None)
    block = ""
    if prefix is not None:
        index, _, module = module.removeprefix(prefix).partition(".")
        block = f"blk.{index}."
    if module not in names:
        raise UserError(f"GGUF: llama.cpp has no tensor for {name}")
    return f"{block}{names[module]}.{kind}", module


def _pair_neighbours(projection: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder a projection's outputs so that pairs (i, i + D/2) of each head become (2i, 2i + 1).

    Args:
        projection: Weight (heads D, E) or bias (heads D,).
    """
    halves = projection.reshape(num_heads, 2, -1, *projection.shape[1:])  # (heads, 2, D/2, ...)
    return halves.transpose(1, 2).reshape(projection.shape)


def _rope_divisors(model: PreTrainedModel) -> torch.Tensor:
    """What llama.cpp divides the frequencies of plain RoPE by, (D/2,), from those that the model rotates with."""
    config: Any = model.config
    head_dim = _head_dim(config)
    inv_freq = model.get_submodule("model.rotary_emb").inv_freq
    assert isinstance(inv_freq, torch.Tensor)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return (dict(config.rope_parameters)["rope_theta"] ** -exponents / inv_freq.double().cpu()).float()
