"""What a Tercet decoder is made of: norms, rotary positions, attention, feed-forward, one block.

One block, pre-norm:  x -> norm -> q, k, v -> rotate -> cache -> softmax(q kT / sqrt(D) + mask) v -> o_proj -> + x
                        -> norm -> feed-forward (expand, activate, contract) -> + x

Shapes: B batch, T query tokens in this call, S keys visible (cached + T), H query heads, K key/value heads,
G = H / K query heads a key/value head, D head_dim, E hidden_size. Under tensor parallelism H and K are those of one
rank, which is why attention takes neither from the config.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_tracing
from transformers.utils.deprecation import deprecate_kwarg

from .attention_tercet import (
    MAX_TOKENS_OVER_SEGMENTS,
    decode_attention,
    eager_attention_forward,
    segmented_attention,
)
from .cache_tercet import TercetCache
from .configuration_tercet import TercetConfig
from .kernels_tercet import gated_mlp, project, rms_norm, trains_on_cpu
from .kernels_tercet import rotate as rotate_in_training
from .linear_tercet import FusedProjections, apply_linear, are_plain_without_bias
from .training_attention_tercet import causal_attention, serves_training


class TercetRMSNorm(nn.Module):
    """Divide by the root mean square of the last dimension, then scale (arXiv:1910.07467); any shape (..., E)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., E) in and out, in the dtype of the input."""
        if trains_on_cpu(hidden_states) and type(self.weight) is nn.Parameter:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        # Statistics in float32: a bfloat16 mean of squares loses what the norm is for.
        states = hidden_states.float()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if torch.is_grad_enabled() or self.weight.dtype != hidden_states.dtype or is_tracing(states):
            return self.weight * states.to(hidden_states.dtype)
        return states.to(hidden_states.dtype).mul_(self.weight)

    def extra_repr(self) -> str:
        """What print(model) shows of this layer."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def make_norm(config: TercetConfig) -> nn.Module:
    """The norm over E that `config.norm_type` names."""
    if config.norm_type == "layer_norm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return TercetRMSNorm(config.hidden_size, config.norm_eps)


class TercetRotaryEmbedding(nn.Module):
    """Cosines and sines of every position's rotation angles (RoPE, arXiv:2104.09864)."""

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: TercetConfig) -> None:
        super().__init__()
        # These names are a contract: transformers rebuilds the buffers after meta-device loading, and its
        # `dynamic_rope_update` changes them, by name.
        self.config = config
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = str(dict(config.rope_parameters or {})["rope_type"])
        rope_init_fn = self.compute_default_rope_parameters
        if self.rope_type != "default":
            rope_init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = rope_init_fn(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: PreTrainedConfig, **kwargs: Any) -> tuple[torch.Tensor, float]:
        """Inverse frequencies theta^(-2i/D), (D/2,), and the scale of the result, 1."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    def _apply(self, fn: Callable, recurse: bool = True) -> "TercetRotaryEmbedding":
        """Keep the frequencies in float32 through `.half()` and `.to(dtype)`: rounded ones turn far positions wrong."""
        exact = {name: getattr(self, name) for name in ("inv_freq", "original_inv_freq")}
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            if getattr(self, name).dtype != frequencies.dtype:
                setattr(self, name, frequencies.to(getattr(self, name).device))
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (B, T, D) each, in the dtype of `x`, for positions (B, T)."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of each head by its position's angles.

    Args:
        states: Queries or keys, (B, heads, T, D).
        cos: (B, 1, T, D).
        sin: (B, 1, T, D).

    Returns:
        (B, heads, T, D).
    """
    first, second = states.chunk(2, dim=-1)
    if not torch.is_grad_enabled() and not is_tracing(states):
        # One new tensor instead of five: on a CPU most of a long prompt's rotation is the memory for them.
        half = first.shape[-1]
        rotated = states * cos
        rotated[..., :half].addcmul_(second, sin[..., :half], value=-1)
        rotated[..., half:].addcmul_(first, sin[..., half:])
        return rotated
    if trains_on_cpu(states):
        return rotate_in_training(states, cos, sin)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class TercetAttention(nn.Module):
    """Masked multi-head attention with grouped key/value heads and an optional cache."""

    def __init__(self, config: TercetConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        assert config.layer_types is not None
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.uses_rope = config.uses_rope(layer_idx)
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None

        query_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        self.q_norm = TercetRMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = TercetRMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.fused: FusedProjections | None = None

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        last_token_only: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix information between positions.

        Args:
            hidden_states: (B, T, E), normalised.
            position_embeddings: Cosines and sines, (B, T, D) each; None with learned positions.
            attention_mask: What the attention implementation wants: (B, 1, T, S), a flex block mask, or None.
            cache: Gets the new keys and values and returns all visible ones.
            last_token_only: Keys and values are made of all T tokens, a query of the last alone; the mask is a tensor
                or None.

        Returns:
            The output (B, T, E), or (B, 1, E) of the last token, and the weights (B, H, T, S) where the implementation
            has them.
        """
        batch_size, num_tokens, _ = hidden_states.shape
        if last_token_only:
            query, key, value = self.make_heads(hidden_states, position_embeddings, num_queries=1)
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
            if attention_mask is not None:
                attention_mask = attention_mask[..., -1:, :]
            output = decode_attention(query, key, value, attention_mask, self.scaling)
            return apply_linear(self.o_proj, output.reshape(batch_size, 1, -1)), None
        query, key, value = self.make_heads(hidden_states, position_embeddings)
        if isinstance(cache, TercetCache) and self._reads_segments(cache, num_tokens):
            segments = cache.append(key, value, self.layer_idx)
            output, weights = segmented_attention(query, segments, attention_mask, self.scaling)
            return apply_linear(self.o_proj, output.reshape(batch_size, num_tokens, -1)), weights
        if cache is not None:
            # Continuous batching edits `kwargs` in place, so it gets the dict itself.
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)  # (B, K, S, D)

        drops_weights = self.training and self.attention_dropout > 0
        if is_decode_step(self.config, num_tokens, cache) and not drops_weights:
            output = decode_attention(query, key, value, attention_mask, self.scaling)
            return apply_linear(self.o_proj, output.reshape(batch_size, num_tokens, -1)), None
        if cache is None and not drops_weights and self._trains_short_rows(query, attention_mask, kwargs):
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # (B, T, heads, D)
            output = causal_attention(query, key, value, attention_mask, self.scaling)
            return apply_linear(self.o_proj, output.reshape(batch_size, num_tokens, -1)), None
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation or "eager", eager_attention_forward
        )
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return apply_linear(self.o_proj, output.reshape(batch_size, num_tokens, -1)), weights

    def make_heads(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        num_queries: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, H, T, D), or those of the last `num_queries` tokens; keys and values (B, K, T, D), normalised
        and rotated.
        """
        if num_queries is None and self.fused is not None and self.fused.serves(hidden_states, *self.projections()):
            query, key, value = self.fused(hidden_states)
        elif num_queries is None and trains_on_cpu(hidden_states) and are_plain_without_bias(*self.projections()):
            query, key, value = project(hidden_states, [projection.weight for projection in self.projections()])
        else:
            asking = hidden_states if num_queries is None else hidden_states[:, -num_queries:]
            query = apply_linear(self.q_proj, asking)
            key, value = apply_linear(self.k_proj, hidden_states), apply_linear(self.v_proj, hidden_states)
        query, key, value = (states.unflatten(-1, (-1, self.head_dim)) for states in (query, key, value))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # (B, heads, T, D)
        if self.uses_rope and position_embeddings is not None:
            cos, sin = position_embeddings[0].unsqueeze(1), position_embeddings[1].unsqueeze(1)
            first = cos.shape[2] - query.shape[2]
            query = rotate(query, cos[:, :, first:], sin[:, :, first:])
            key = rotate(key, cos, sin)
        return query, key, value

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """The projections of the layer's input, in the order in which they are fused."""
        return self.q_proj, self.k_proj, self.v_proj

    def _trains_short_rows(self, query: torch.Tensor, attention_mask: Any, others: dict[str, Any]) -> bool:
        """Whether whole rows are trained on that `causal_attention` is faster for than the fused operator."""
        return (
            self.config._attn_implementation == "sdpa"
            and trains_on_cpu(query)
            # Without a mask a sliding layer's window covers the row.
            and not others.keys() & {"is_causal", "position_bias", "softcap"}
            and serves_training(query.transpose(1, 2), attention_mask, query.shape[1] // self.num_key_value_groups)
        )

    def _reads_segments(self, cache: TercetCache, num_tokens: int) -> bool:
        """Whether the layer's keys lie in several places, and are better read there than copied together."""
        return (
            num_tokens <= MAX_TOKENS_OVER_SEGMENTS
            and cache.has_shared_prefix(self.layer_idx)
            and self.config._attn_implementation in ("sdpa", "eager")
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )


def is_decode_step(config: TercetConfig, num_tokens: int, cache: Cache | None) -> bool:
    """Whether a call adds one token to a cache of ours, and attention and its mask can be the short ones."""
    return (
        num_tokens == 1
        and isinstance(cache, TercetCache)
        and config._attn_implementation == "sdpa"
        and not torch.compiler.is_compiling()
    )


class TercetMLP(nn.Module):
    """Feed-forward layer, each position by itself: expand, activate, contract; (B, T, E) in and out."""

    def __init__(self, config: TercetConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        is_gated = config.mlp_type == "gated"
        sizes = (config.hidden_size, config.intermediate_size)
        self.gate_proj = nn.Linear(*sizes, bias=config.mlp_bias) if is_gated else None
        self.up_proj = nn.Linear(*sizes, bias=config.mlp_bias)
        self.down_proj = nn.Linear(*reversed(sizes), bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.is_swiglu = is_gated and config.hidden_act in ("silu", "swish")
        self.fused: FusedProjections | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, E) -> (B, T, intermediate_size) -> (B, T, E)."""
        if self.gate_proj is None:
            return apply_linear(self.down_proj, self.act_fn(apply_linear(self.up_proj, hidden_states)))
        if self.fused is not None and self.fused.serves(hidden_states, *self.projections()):
            gate, up = self.fused(hidden_states)
        elif self.is_swiglu and trains_on_cpu(hidden_states):
            layers = (self.gate_proj, self.up_proj, self.down_proj)
            if are_plain_without_bias(*layers):
                return gated_mlp(hidden_states, *(layer.weight for layer in layers))
            gate, up = (apply_linear(layer, hidden_states) for layer in self.projections())
        else:
            gate, up = (apply_linear(layer, hidden_states) for layer in self.projections())
        return apply_linear(self.down_proj, self.act_fn(gate) * up)

    def projections(self) -> tuple[nn.Linear, ...]:
        """The projections of the layer's input, in the order in which they are fused."""
        return (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)


class TercetDecoderLayer(GradientCheckpointingLayer):
    """One block: attention, then feed-forward, each added to the residual stream; (B, T, E) in and out."""

    def __init__(self, config: TercetConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = TercetAttention(config, layer_idx)
        self.mlp = TercetMLP(config)
        self.input_layernorm = make_norm(config)
        self.post_attention_layernorm = make_norm(config)
        self.hidden_dropout = config.hidden_dropout

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The residual stream after this block, (B, T, E), or (B, 1, E) with `last_token_only`.

        `kwargs` are attention's.
        """
        # Gradient checkpointing replays positional tensors and blanks `cache` and `use_cache` among the keywords.
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        if kwargs.get("last_token_only"):
            hidden_states = hidden_states[:, -1:]
        hidden_states = hidden_states + F.dropout(attended, self.hidden_dropout, self.training)
        expanded = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + F.dropout(expanded, self.hidden_dropout, self.training)


__all__ = [
    "TercetAttention",
    "TercetDecoderLayer",
    "TercetMLP",
    "TercetRMSNorm",
    "TercetRotaryEmbedding",
    "is_decode_step",
    "make_norm",
    "rotate",
]
