"""The Tercet decoder: embed, then blocks around a residual stream, then predict; `layers_tercet.py` has the blocks.

Shapes: B batch, T query tokens in this call, S keys visible (cached + T), E hidden_size, V vocab_size.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils import auto_docstring, can_return_tuple, is_tracing
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_tercet import decode_masks
from .cache_tercet import TercetCache
from .configuration_tercet import TercetConfig
from .decode_tercet import DecodeStep, can_ask_for_last_token, fuse_projections, is_one_token
from .generation_tercet import new_generation_cache, takes_filled_past
from .layers_tercet import (
    TercetAttention,
    TercetDecoderLayer,
    TercetMLP,
    TercetRotaryEmbedding,
    is_decode_step,
    make_norm,
)
from .linear_tercet import apply_linear, is_plain_linear
from .loss_tercet import chunked_causal_lm_loss
from .packing_tercet import may_hold_several_documents, must_not_wait, packed_mask, separate_documents

# Every saved folder names all of these: a classifier can start from the folder of a language model.
_AUTO_MAP = {
    "AutoConfig": "configuration_tercet.TercetConfig",
    "AutoModel": "modeling_tercet.TercetModel",
    "AutoModelForCausalLM": "modeling_tercet.TercetForCausalLM",
    "AutoModelForQuestionAnswering": "modeling_tercet.TercetForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_tercet.TercetForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_tercet.TercetForTokenClassification",
}


@auto_docstring
class TercetPreTrainedModel(PreTrainedModel):
    """What all Tercet models share: config, initialisation, what they support, how they are saved."""

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

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As everywhere in transformers; the folder also names the class for each Auto class, and gets the code."""
        self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **_AUTO_MAP}
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def is_remote_code(cls) -> bool:
        """Whether this very class was registered to ship the file that it stands in: no subclass inherits that."""
        return vars(cls).get("_auto_class") is not None

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Treated as custom code: then modules whose weights were all loaded are passed over, and a subclass whose
        # `_init_weights` writes through `.data` does not come back random from `from_pretrained`. Modules without
        # weights of their own would be passed over always, and with them what is set below for attention and MLP.
        owns_weights = any(True for _ in module.parameters(recurse=False))
        super()._initialize_weights(module, is_custom_code=owns_weights)


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
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        last_token_only: bool = False,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        r"""
        last_token_only (`bool`, defaults to `False`):
            Return the hidden state of the last token alone, (B, 1, E); the last block then asks, and computes, for no
            other. The cache is filled as ever. For the `sdpa` attention implementation.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        if isinstance(cache, TercetCache):
            cache.check_matches(self.config)
        mask_positions = position_ids
        if position_ids is None:
            num_seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + num_seen).unsqueeze(0)
        elif may_hold_several_documents(position_ids, attention_mask, cache):
            if cache is not None:
                raise ValueError(
                    "position_ids restart inside a row (packed documents) and a cache was given: a cache holds one "
                    "document a row. Pass use_cache=False and no cache, or one document a row."
                )
            use_cache = False
            mask_positions, attention_mask = separate_documents(position_ids, attention_mask), None
        # While weights are being trained nobody decodes; a cache would only hold memory.
        if use_cache and cache is None and not (self.training and torch.is_grad_enabled()):
            cache = TercetCache(self.config)

        hidden_states = inputs_embeds
        if self.embed_positions is not None:
            self.check_learned_positions(position_ids)
            hidden_states = hidden_states + self.embed_positions(position_ids)
        hidden_states = F.dropout(hidden_states, self.config.embedding_dropout, self.training)
        masks = self._make_masks(hidden_states, attention_mask, cache, mask_positions)
        position_embeddings = self.rotary_emb(hidden_states, position_ids) if self.rotary_emb is not None else None
        assert self.config.layer_types is not None
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=False):
            if last_token_only and layer is self.layers[-1]:
                kwargs["last_token_only"] = True
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
        assert self.config.layer_types is not None
        if isinstance(cache, TercetCache) and is_decode_step(self.config, hidden_states.shape[1], cache):
            masks = decode_masks(self.config.layer_types, attention_mask, cache)
            if masks is not None:
                return masks
        kinds = dict.fromkeys(self.config.layer_types)
        given = position_ids if attention_mask is None and cache is None else None
        if given is not None and self.config._attn_implementation == "sdpa" and must_not_wait(given):
            windows = {"full_attention": None, "sliding_attention": self.config.sliding_window}
            return {kind: packed_mask(given, windows[kind]) for kind in kinds}
        arguments: dict[str, Any] = {
            "config": self.config,
            "inputs_embeds": hidden_states,
            "attention_mask": attention_mask,
            "cache": cache,
            "position_ids": position_ids,
        }
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        return {kind: makers[kind](**arguments) for kind in kinds}

    def check_learned_positions(self, position_ids: torch.Tensor) -> None:
        """Refuse positions beyond the table of learned ones.

        Raises:
            ValueError: Names the position and the bound.
        """
        # In training on an accelerator the table's own kernel refuses them; reading one here would wait for it.
        if self.embed_positions is None or is_tracing(position_ids) or must_not_wait(position_ids):
            return
        if (last := int(position_ids.max())) >= self.config.max_position_embeddings:
            raise ValueError(
                f"position {last} is beyond max_position_embeddings={self.config.max_position_embeddings}, and learned "
                "positions end there: shorten the prompt or max_new_tokens."
            )


@auto_docstring
class TercetForCausalLM(TercetPreTrainedModel, GenerationMixin):
    """The decoder and its output head: the next token's logits at every position."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan: Any = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: TercetConfig) -> None:
        super().__init__(config)
        self.model = TercetModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.decode_step: DecodeStep | None = None
        self.post_init()

    def compile_decode(self) -> "TercetForCausalLM":
        """From now on `generate()` runs each token after the prompt as one compiled function; returns the model.

        The first token compiles it (half a minute for a small model on a CPU), growth of the cache once or twice more.
        Call it on the finished model: on its device, adapters merged. Hooks on inner modules are not called by the
        compiled step, and what it cannot do (quantized and forked caches, outputs of attentions) runs uncompiled.

        Raises:
            ValueError: Names what of the model cannot be compiled.
        """
        self.decode_step = DecodeStep(self)
        return self

    def fuse_projections(self) -> "TercetForCausalLM":
        """Run q, k, v and gate, up as one product each while gradients are off; saved folders stay as they were."""
        fuse_projections(self)
        return self

    @takes_filled_past
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        r"""
        skip_logits (`bool`, defaults to `False`):
            Compute the loss from hidden states in chunks and return no logits: the (B, T, V) logits are never held
            whole, which at a large vocabulary is most of a training step's memory. Needs `labels` or `shift_labels`.
        shift_labels (`torch.LongTensor`, *optional*):
            Labels already aligned with the inputs, (B, T): the token to predict at each position, or `ignore_index`.
        num_items_in_batch (`int` or `torch.Tensor`, *optional*):
            Divide the sum of losses by this number of tokens instead of by the number of labels in this batch.
        z_loss (`float`, *optional*):
            With `skip_logits`: see `chunked_causal_lm_loss`.
        """
        if self.decode_step is not None and input_ids is not None and isinstance(cache, TercetCache):
            others = {"inputs_embeds": inputs_embeds, "skip_logits": skip_logits, **kwargs}
            if is_one_token(self.config, input_ids, labels, others):
                step_logits = self.decode_step.logits(self, input_ids, attention_mask, position_ids, cache)
                if step_logits is not None:
                    return CausalLMOutputWithPast(logits=cast(Any, step_logits), cache=cache)
        has_labels = labels is not None or kwargs.get("shift_labels") is not None
        given = input_ids if input_ids is not None else inputs_embeds
        wants_last = isinstance(logits_to_keep, int) and logits_to_keep == 1 and not has_labels
        if wants_last and given is not None and can_ask_for_last_token(self.model, given, cache, kwargs):
            kwargs["last_token_only"] = True
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        if skip_logits and not has_labels:
            raise ValueError("skip_logits=True needs labels or shift_labels: without logits there is only a loss.")
        loss, logits = None, None
        if skip_logits and is_plain_linear(self.lm_head) and self.lm_head.bias is None:
            loss = chunked_causal_lm_loss(outputs.last_hidden_state, self.lm_head.weight, labels, **kwargs)
        else:
            hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
            logits = apply_linear(self.lm_head, hidden_states)  # (B, T, V)
            if has_labels:
                if kwargs.pop("z_loss", 0.0):
                    raise ValueError("z_loss needs skip_logits=True and a head that is a plain nn.Linear without bias.")
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            logits = None if skip_logits else logits
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Give `generate()` a [`TercetCache`] where the caller has chosen no other kind.

        `cache_config` is its arguments: `generate(ids, cache_config={"quantization": "int8"})`.
        """
        cache = new_generation_cache(self.config, generation_config, model_kwargs, generation_mode)
        if cache is not None:
            model_kwargs["cache"] = cache
            return
        # transformers types `self` by a protocol that no model class is checked against.
        super()._prepare_cache_for_generation(  # pyright: ignore
            generation_config, model_kwargs, generation_mode, *args, **kwargs
        )


# The library's generic heads, but for the decoder: theirs comes from `AutoModel.from_config`, which refuses remote code
# there even where the head itself was loaded with `trust_remote_code=True`.
class TercetForSequenceClassification(GenericForSequenceClassification, TercetPreTrainedModel):
    """A label for a whole sequence, read at its last token."""

    def __init__(self, config: TercetConfig) -> None:
        TercetPreTrainedModel.__init__(self, config)
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.model = TercetModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class TercetForTokenClassification(GenericForTokenClassification, TercetPreTrainedModel):
    """A label for every token."""

    def __init__(self, config: TercetConfig) -> None:
        TercetPreTrainedModel.__init__(self, config)
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.model = TercetModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class TercetForQuestionAnswering(GenericForQuestionAnswering, TercetPreTrainedModel):
    """Start and end of an answer inside the text."""

    def __init__(self, config: TercetConfig) -> None:
        TercetPreTrainedModel.__init__(self, config)
        self.model = TercetModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


__all__ = [
    "TercetForCausalLM",
    "TercetForQuestionAnswering",
    "TercetForSequenceClassification",
    "TercetForTokenClassification",
    "TercetModel",
    "TercetPreTrainedModel",
]
