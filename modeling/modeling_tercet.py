"""The Tercet decoder: embed, then blocks of attention and feed-forward around a residual stream, then predict.

One layer, pre-norm:  x -> norm -> q, k, v -> rotate -> cache -> softmax(q kT / sqrt(D) + mask) v -> o_proj -> + x
                        -> norm -> feed-forward (expand, activate, contract) -> + x

Shapes: B batch, T query tokens in this call, S keys visible (cached + T), H query heads, K key/value heads,
G = H / K query heads a key/value head, D head_dim, E hidden_size, V vocab_size. Under tensor parallelism H and K are
those of one rank, which is why no shape below is taken from the config.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple, is_tracing
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_tercet import TercetCache
from .configuration_tercet import TercetConfig


class TercetRMSNorm(nn.Module):
    """Divide by the root mean square of the last dimension, then scale (arXiv:1910.07467); any shape (..., E)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Statistics in float32: a bfloat16 mean of squares loses what the norm is for.
        states = hidden_states.float()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * states.to(hidden_states.dtype)

    def extra_repr(self) -> str:
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
        assert config.rope_parameters is not None
        self.rope_type = config.rope_parameters["rope_type"]
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
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kT scaling + mask) v, written out; the reference for every other implementation.

    The G query heads of a group are laid along the query axis, so keys and values are never repeated (GQA).

    Args:
        query: (B, H, T, D).
        key: (B, K, S, D).
        value: (B, K, S, D).
        attention_mask: Added to the scores, broadcastable to (B, H, T, S), or None for no mask at all.

    Returns:
        The output (B, T, H, D) and the attention weights (B, H, T, S).
    """
    batch_size, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped_query = query.reshape(batch_size, num_kv_heads, -1, head_dim)  # (B, K, G T, D)
    scores = torch.matmul(grouped_query, key.transpose(2, 3)) * scaling  # (B, K, G T, S)
    scores = scores.view(batch_size, num_heads, num_tokens, -1)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    grouped_weights = weights.reshape(batch_size, num_kv_heads, -1, weights.shape[-1])  # (B, K, G T, S)
    output = torch.matmul(grouped_weights, value).view(batch_size, num_heads, num_tokens, -1)
    return output.transpose(1, 2).contiguous(), weights


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

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix information between positions.

        Args:
            hidden_states: (B, T, E), normalised.
            position_embeddings: Cosines and sines, (B, T, D) each; None with learned positions.
            attention_mask: What the attention implementation wants: (B, 1, T, S), a flex block mask, or None.
            cache: Gets the new keys and values and returns all visible ones.

        Returns:
            The output (B, T, E), and the weights (B, H, T, S) where the implementation has them.
        """
        batch_size, num_tokens, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(batch_size, num_tokens, -1, self.head_dim)  # (B, T, H, D)
        key = self.k_proj(hidden_states).view(batch_size, num_tokens, -1, self.head_dim)  # (B, T, K, D)
        value = self.v_proj(hidden_states).view(batch_size, num_tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # (B, heads, T, D)
        if self.uses_rope and position_embeddings is not None:
            cos, sin = position_embeddings[0].unsqueeze(1), position_embeddings[1].unsqueeze(1)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if cache is not None:
            # Continuous batching edits `kwargs` in place, so it gets the dict itself.
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)  # (B, K, S, D)

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
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
        return self.o_proj(output.reshape(batch_size, num_tokens, -1)), weights


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

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(hidden_states)))
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


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
        # Gradient checkpointing replays positional tensors and blanks `cache` and `use_cache` among the keywords.
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + F.dropout(attended, self.hidden_dropout, self.training)
        expanded = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + F.dropout(expanded, self.hidden_dropout, self.training)


@auto_docstring
class TercetPreTrainedModel(PreTrainedModel):
    config_class = TercetConfig
    config: TercetConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TercetDecoderLayer"]  # noqa: RUF012 - transformers' own protocol
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": TercetDecoderLayer, "attentions": TercetAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """New weights; `transformers.initialization` leaves those alone that a checkpoint has filled."""
        super()._init_weights(module)
        residual_std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
        # A parent is visited after its children, so this overrules what they got.
        if isinstance(module, TercetAttention):
            init.normal_(module.o_proj.weight, mean=0.0, std=residual_std)
        elif isinstance(module, TercetMLP):
            init.normal_(module.down_proj.weight, mean=0.0, std=residual_std)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Treated as custom code in any case: then modules whose weights were all loaded are passed over, and a subclass
        # whose `_init_weights` writes through `.data` does not come back random from `from_pretrained`.
        super()._initialize_weights(module, is_custom_code=True)


@auto_docstring
class TercetModel(TercetPreTrainedModel):
    """The decoder without a head: token ids in, hidden states (B, T, E) out."""

    def __init__(self, config: TercetConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.embed_positions = None
        self.rotary_emb = None
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif any(config.uses_rope(layer_idx) for layer_idx in range(config.num_hidden_layers)):
            self.rotary_emb = TercetRotaryEmbedding(config)
        self.layers = nn.ModuleList(
            [TercetDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        num_seen = cache.get_seq_length() if cache is not None else 0
        mask_positions = position_ids
        if position_ids is None:
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + num_seen).unsqueeze(0)
        elif holds_several_documents(position_ids, attention_mask):
            if cache is not None:
                raise ValueError(
                    "position_ids restart inside a row (packed documents) and a cache was given: a cache holds one "
                    "document a row. Pass use_cache=False and no cache, or one document a row."
                )
            use_cache = False
            mask_positions, attention_mask = separate_documents(position_ids, attention_mask), None
        # While weights are being trained nobody decodes; a cache would only hold memory and hide packed documents.
        if use_cache and cache is None and not (self.training and torch.is_grad_enabled()):
            cache = TercetCache(self.config)

        hidden_states = inputs_embeds
        if self.embed_positions is not None:
            self._check_learned_positions(position_ids)
            hidden_states = hidden_states + self.embed_positions(position_ids)
        hidden_states = F.dropout(hidden_states, self.config.embedding_dropout, self.training)
        masks = self._make_masks(hidden_states, attention_mask, cache, mask_positions)
        position_embeddings = self.rotary_emb(hidden_states, position_ids) if self.rotary_emb is not None else None
        assert self.config.layer_types is not None
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=False):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _make_masks(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, Any] | None,
        cache: Cache | None,
        position_ids: torch.Tensor | None,
    ) -> dict[str, Any]:
        """One mask for each kind of layer that the model has, in the form its attention implementation wants."""
        if isinstance(attention_mask, dict):  # `generate()` makes them itself for static caches
            return attention_mask
        arguments: dict[str, Any] = {
            "config": self.config,
            "inputs_embeds": hidden_states,
            "attention_mask": attention_mask,
            "cache": cache,
            "position_ids": position_ids,
        }
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        assert self.config.layer_types is not None
        return {kind: makers[kind](**arguments) for kind in dict.fromkeys(self.config.layer_types)}

    def _check_learned_positions(self, position_ids: torch.Tensor) -> None:
        if not is_tracing(position_ids) and (last := int(position_ids.max())) >= self.config.max_position_embeddings:
            raise ValueError(
                f"position {last} is beyond max_position_embeddings={self.config.max_position_embeddings}, and learned "
                "positions end there: shorten the prompt or max_new_tokens."
            )


def holds_several_documents(position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    """Whether positions restart inside a row, so that the row is several documents packed together.

    Steps inside padding do not count: left-padded rows restart where their text begins. Under tracing the answer is
    unknown and False is returned; the mask functions then isolate documents wherever there is no cache.

    Args:
        position_ids: (B, T).
        attention_mask: (B, S) with S >= T, 1 where a token is real; other shapes are the caller's own masks, which
            say themselves who sees whom.
    """
    if position_ids.shape[-1] == 1 or is_tracing(position_ids):
        return False
    if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2):
        return False
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1  # (B, T - 1)
    if attention_mask is not None:
        is_real = attention_mask[:, -position_ids.shape[-1] :].bool()
        restarts = restarts & is_real[:, 1:] & is_real[:, :-1]
    return bool(restarts.any())


def separate_documents(position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Positions for the mask functions, (B, T), in which padding, too, is a document of its own at every token.

    transformers isolates packed documents by their restarting positions, and only where no attention mask is given;
    this folds the mask into the positions.
    """
    if attention_mask is None:
        return position_ids
    is_real = attention_mask[:, -position_ids.shape[-1] :].bool()
    # Any step other than +1 starts a document: -2 is never followed by its successor, as positions are >= 0.
    return position_ids.masked_fill(~is_real, -2)


@auto_docstring
class TercetForCausalLM(TercetPreTrainedModel, GenerationMixin):
    """The decoder and its output head: the next token's logits at every position."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: TercetConfig) -> None:
        super().__init__(config)
        self.model = TercetModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        r"""
        skip_logits (`bool`, defaults to `False`):
            Compute the loss from hidden states in chunks and return no logits: the (B, T, V) logits are never held
            whole, which at a large vocabulary is most of a training step's memory. Needs `labels` or `shift_labels`.
        shift_labels (`torch.LongTensor`, *optional*):
            Labels already aligned with the inputs, (B, T): the token to predict at each position, or `ignore_index`.
        num_items_in_batch (`int` or `torch.Tensor`, *optional*):
            Divide the sum of losses by this number of tokens instead of by the number of labels in this batch.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        has_labels = labels is not None or kwargs.get("shift_labels") is not None
        if skip_logits and not has_labels:
            raise ValueError("skip_logits=True needs labels or shift_labels: without logits there is only a loss.")
        loss, logits = None, None
        if skip_logits:
            loss = chunked_causal_lm_loss(outputs.last_hidden_state, self.lm_head.weight, labels, **kwargs)
        else:
            logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))  # (B, T, V)
            if has_labels:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Give `generate()` a [`TercetCache`] where the caller has chosen nothing else."""
        caller_chose = (
            model_kwargs.get("cache") is not None
            or generation_config.use_cache is False
            or generation_config.cache_implementation is not None
        )
        if caller_chose:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
            return
        cache = TercetCache(self.config)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["cache"] = cache


def chunked_causal_lm_loss(
    hidden_states: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor | None,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Next-token cross entropy with the head fused in, a chunk of positions at a time.

    The same number as `ForCausalLMLoss` on the logits, to floating-point noise.

    Args:
        hidden_states: (B, T, E).
        head_weight: (V, E).
        labels: Token ids (B, T), not shifted; `ignore_index` is no label.
        num_items_in_batch: Divide the sum of losses by this; None gives the mean over this batch's labels.
        shift_labels: Labels already aligned with the inputs, instead of `labels`.

    Returns:
        The loss in nats, a scalar.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    summed = num_items_in_batch is not None
    loss = F.linear_cross_entropy(
        hidden_states.reshape(-1, hidden_states.shape[-1]),
        head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        reduction="sum" if summed else "mean",
        ignore_index=ignore_index,
        options=nn.LinearCrossEntropyOptions(),
    )
    if not summed:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


class TercetForSequenceClassification(GenericForSequenceClassification, TercetPreTrainedModel):
    """A label for a whole sequence, read at its last token."""


class TercetForTokenClassification(GenericForTokenClassification, TercetPreTrainedModel):
    """A label for every token."""


class TercetForQuestionAnswering(GenericForQuestionAnswering, TercetPreTrainedModel):
    """Start and end of an answer inside the text."""


__all__ = [
    "TercetForCausalLM",
    "TercetForQuestionAnswering",
    "TercetForSequenceClassification",
    "TercetForTokenClassification",
    "TercetModel",
    "TercetPreTrainedModel",
]
