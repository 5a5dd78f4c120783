"""One decode step of the whole decoder as one compiled function: a token in, logits out, the cache written in place.

At batch 1 a small model spends most of a token's time on dispatch. Compiled, what lies between two matrix products is
one kernel, and a product of a single row is a loop over the weight at full bandwidth.

To the graph the buffers of the cache, their capacity and the visible range are variables: it is compiled once, and once
more for padded rows, and not as the text or the buffers grow.

Shapes: B batch, C capacity of a layer's buffers, S keys visible, H query heads, K key/value heads, D head_dim,
E hidden_size, V vocab_size; one new token per row.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils.output_capturing import install_output_capuring_hook

from .attention_tercet import decode_masks
from .cache_layers_tercet import Slots, TercetCacheLayer
from .cache_tercet import TercetCache
from .configuration_tercet import TercetConfig
from .layers_tercet import TercetAttention, TercetMLP, rotate
from .linear_tercet import FusedProjections, is_plain_linear

# These change their frequencies with the length, in Python.
_CHANGING_ROPE = ("dynamic", "longrope")

# Measured on 2 cores: from 2 rows on, library kernels on the plain road are as fast as the generated ones.
_MAX_ROWS_ON_CPU = 1

# Added to the start of the visible range: compilers take the numbers 0 and 1 for constants, and others for variables.
_SHIFT = 2

_INNER_OUTPUTS = ("output_hidden_states", "output_attentions")

Weight = tuple[torch.Tensor, torch.Tensor | None]


class DecodeStep:
    """The compiled step of one model, for `generate()` to use in place of `forward` where it can.

    Args:
        model: A `TercetForCausalLM` on its device; its projections are fused.
        compiler: What makes a function fast; `torch.compile` with dynamic shapes by default.

    Raises:
        ValueError: Names what of the model cannot be compiled this way.
    """

    def __init__(self, model: Any, compiler: Callable[[Callable], Callable] | None = None) -> None:
        check_can_compile(model)
        fuse_projections(model)
        # A function of its own for each model: a compiler counts how often it compiles one.
        step = types.FunctionType(_decode.__code__.replace(), globals(), _decode.__name__)
        self._step = (compiler or _compile)(step)

    def logits(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: TercetCache,
    ) -> torch.Tensor | None:
        """Logits (B, 1, V) of one new token per row, whose keys and values go into the cache.

        None, and nothing changed, where the plain forward does it: a cache that has no buffers to write in, such as an
        empty, quantized or forked one, a mask of an unusual form, weights that are not what was compiled; and on a CPU
        several rows, whose products and attention are bound by arithmetic and memory, not by dispatch.
        """
        config: TercetConfig = model.config
        assert config.layer_types is not None
        if input_ids.is_cpu and input_ids.shape[0] > _MAX_ROWS_ON_CPU:
            return None
        first = cache.layers[0] if cache.layers else None
        # Asked before its keys: a quantized or forked layer would make them anew.
        if not isinstance(first, TercetCacheLayer) or not first.can_make_room(1):
            return None
        held = first.keys
        assert held is not None
        if (held.shape[0], held.dtype) != (input_ids.shape[0], model.lm_head.weight.dtype):
            return None
        cache.check_matches(config)
        if position_ids is None:
            position_ids = torch.full_like(input_ids[:1], cache.get_seq_length())
        model.model.check_learned_positions(position_ids)
        weights = _current_weights(model)
        masks = decode_masks(config.layer_types, attention_mask, cache)
        slots = None if weights is None or masks is None else cache.make_room(1)
        if slots is None:
            return None
        try:
            shifted = [Slots(keys, values, start + _SHIFT, end) for keys, values, start, end in slots]
            return self._step(model, input_ids, position_ids, weights, shifted, masks)
        except BaseException:
            # The room was never filled.
            cache.crop(-1)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A compiled function belongs to the very modules that it was made for; a copied model runs uncompiled.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _compile(step: Callable) -> Callable:
    # Weights are looked after here, at less cost than a compiler's guard on every attribute of every module.
    guards: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    return torch.compile(step, dynamic=True, fullgraph=True, options=guards)


def can_ask_for_last_token(model: Any, inputs: torch.Tensor, cache: Any, others: Mapping[str, Any]) -> bool:
    """Whether a forward whose last logits alone are wanted may leave out all else of the last block.

    In a prompt that is all but the keys and values of an eighth of a model of 8 layers. Not where somebody sees the
    difference: outputs of hidden states or attentions, hooks on the block, gradients.

    Args:
        model: A `TercetModel`.
        inputs: Token ids (B, T), or their embeddings (B, T, E).
        cache: What the forward is given.
        others: Further keyword arguments of the forward.
    """
    config: TercetConfig = model.config
    return (
        inputs.shape[1] > 1
        and config._attn_implementation == "sdpa"
        and not model.training
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not any(others.get(name, getattr(config, name, False)) for name in _INNER_OUTPUTS)
        and not (isinstance(cache, TercetCache) and cache.has_shared_prefix(config.num_hidden_layers - 1))
        and not any(_is_watched(module) for module in model.layers[-1].modules())
    )


def _is_watched(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # Once somebody has asked for hidden states, transformers leaves its hooks behind, which then do nothing.
    return any(getattr(hook, "__module__", "") != install_output_capuring_hook.__module__ for hook in hooks)


def is_one_token(
    config: TercetConfig, input_ids: torch.Tensor, labels: torch.Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Whether a call of `forward` asks for the next logits after one token per row, and for nothing else."""
    return (
        input_ids.shape[1] == 1
        and labels is None
        and all(value is None or value is False for value in kwargs.values())
        and not (config.output_attentions or config.output_hidden_states)
        and config._attn_implementation == "sdpa"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def check_can_compile(model: Any) -> None:
    """Refuse a model whose decode step the compiled one would not equal.

    Raises:
        ValueError: Names the part and the remedy.
    """
    rope_type = (model.config.rope_parameters or {}).get("rope_type", "default")
    if rope_type in _CHANGING_ROPE:
        raise ValueError(f"rope_type {rope_type!r} changes with the length, which a compiled step cannot: do without.")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not is_plain_linear(module):
            raise ValueError(
                f"{name} is {type(module).__name__} with hooks or weights of its own: merge adapters, or remove hooks."
            )
        if isinstance(module, TercetAttention | TercetMLP) and not all(
            isinstance(projection, nn.Linear) for projection in module.projections()
        ):
            raise ValueError(f"{name} has projections that are no linear layers: merge adapters first.")


def fuse_projections(model: nn.Module) -> None:
    """Let q, k, v and gate, up of every layer run as one product each, where gradients are off.

    Their weights become views of one tensor. State dicts and saved folders stay as they were.
    """
    for module in model.modules():
        if isinstance(module, TercetAttention | TercetMLP):
            projections = module.projections()
            is_fused = module.fused is not None and module.fused.is_current(*projections)
            if not is_fused and len(projections) > 1 and FusedProjections.can_fuse(projections):
                module.fused = FusedProjections(projections)
                # No parameter of the model, so a compiler would take its shape for variable.
                torch._dynamo.mark_static(module.fused.weight)
                if module.fused.bias is not None:
                    torch._dynamo.mark_static(module.fused.bias)


def _current_weights(model: Any) -> list[tuple[Weight, Weight]] | None:
    """For each layer the weights of q, k, v and of gate, up in one; None if they are not fused any more."""
    weights: list[tuple[Weight, Weight]] = []
    for layer in model.model.layers:
        pair: list[Weight] = []
        for module in (layer.self_attn, layer.mlp):
            projections = module.projections()
            if len(projections) == 1:
                pair.append((projections[0].weight, projections[0].bias))
            elif module.fused is None or not module.fused.is_current(*projections):
                return None
            else:
                pair.append((module.fused.weight, module.fused.bias))
        weights.append((pair[0], pair[1]))
    return weights


def _decode(
    model: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    weights: Sequence[tuple[Weight, Weight]],
    slots: Sequence[Slots],
    masks: dict[str, torch.Tensor | None],
) -> torch.Tensor:
    """The graph: `TercetForCausalLM.forward` for one token per row, (B, 1) -> logits (B, 1, V)."""
    decoder, config = model.model, model.config
    hidden_states = decoder.embed_tokens(input_ids)  # (B, 1, E)
    if decoder.embed_positions is not None:
        hidden_states = hidden_states + decoder.embed_positions(position_ids)
    rotation = None
    if decoder.rotary_emb is not None:
        cos, sin = decoder.rotary_emb(hidden_states, position_ids)
        rotation = cos.unsqueeze(1), sin.unsqueeze(1)
    for layer, (heads_weight, mlp_weight), slot, kind in zip(
        decoder.layers, weights, slots, config.layer_types, strict=True
    ):
        normed = layer.input_layernorm(hidden_states)
        hidden_states = hidden_states + _attend(layer.self_attn, normed, heads_weight, rotation, slot, masks[kind])
        normed = layer.post_attention_layernorm(hidden_states)
        hidden_states = hidden_states + _feed_forward(layer.mlp, normed, mlp_weight)
    return _product(decoder.norm(hidden_states), (model.lm_head.weight, model.lm_head.bias))


def _attend(
    attention: TercetAttention,
    hidden_states: torch.Tensor,
    weight: Weight,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    slot: Slots,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    batch_size, head_dim = hidden_states.shape[0], attention.head_dim
    key_buffer, value_buffer, start, end = slot
    start = start - _SHIFT
    num_heads, num_kv_heads = attention.q_proj.out_features // head_dim, attention.k_proj.out_features // head_dim
    # Said here, these sizes are numbers in the graph and only batch and capacity are variables.
    assert key_buffer.shape[1] == value_buffer.shape[1] == num_kv_heads
    assert key_buffer.shape[3] == value_buffer.shape[3] == head_dim
    heads = _product(hidden_states, weight).view(batch_size, -1, 1, head_dim)  # (B, H + 2 K, 1, D)
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if attention.q_norm is not None and attention.k_norm is not None:
        query, key = attention.q_norm(query), attention.k_norm(key)
    if attention.uses_rope and rotation is not None:
        query, key = rotate(query, *rotation), rotate(key, *rotation)
    key_buffer[:, :, end - 1 : end] = key
    value_buffer[:, :, end - 1 : end] = value
    # Written out: with sizes that are variables the fused operator becomes a copy of the keys.
    keys = key_buffer.view(batch_size * num_kv_heads, -1, head_dim)[:, start:end]  # (B K, S, D)
    values = value_buffer.view(batch_size * num_kv_heads, -1, head_dim)[:, start:end]
    grouped_query = query.reshape(batch_size * num_kv_heads, -1, head_dim)  # (B K, G, D)
    scores = torch.bmm(grouped_query, keys.transpose(1, 2)) * attention.scaling
    if mask is not None:
        by_row = scores.view(batch_size, num_heads, 1, -1)
        scores = by_row.masked_fill(~mask, torch.finfo(scores.dtype).min).view(scores.shape)
    output = torch.bmm(F.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype), values)
    return _product(output.view(batch_size, 1, -1), (attention.o_proj.weight, attention.o_proj.bias))


def _feed_forward(mlp: TercetMLP, hidden_states: torch.Tensor, weight: Weight) -> torch.Tensor:
    expanded = _product(hidden_states, weight)
    if mlp.gate_proj is None:
        activated = mlp.act_fn(expanded)
    else:
        gate, up = expanded.chunk(2, dim=-1)
        activated = mlp.act_fn(gate) * up
    return _product(activated, (mlp.down_proj.weight, mlp.down_proj.bias))


def _product(states: torch.Tensor, weight_and_bias: Weight) -> torch.Tensor:
    """`states weightᵀ + bias` for (B, 1, E), in the form that compiles to one read of the weight."""
    weight, bias = weight_and_bias
    assert weight.shape[1] == states.shape[-1]
    if not states.is_cpu:
        return F.linear(states, weight, bias)
    if states.shape[0] == 1:
        # Written as a sum this becomes a loop over the weight's rows on all cores; a product would be a call of BLAS.
        product = (weight * states[0]).sum(-1, dtype=torch.float32).to(states.dtype)[None, None]
    else:
        product = torch.mm(weight, states[:, 0].t()).t().unsqueeze(1)
    return product if bias is None else product + bias


__all__ = ["DecodeStep", "check_can_compile", "fuse_projections"]
