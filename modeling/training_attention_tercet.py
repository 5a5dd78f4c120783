"""Causal attention of short rows with a backward pass of its own, for float32 training on a CPU.

The fused operator of PyTorch cuts its work into pieces too small for a CPU's products where rows are short: at 8 rows
of 256 tokens forward and backward take 2.5 times what the products alone would. Here scores of a block of queries are
held whole and kept for the backward pass.

Shapes: B batch, T tokens, H query heads, K key/value heads, G = H / K query heads a key/value head, D head_dim; a block
of t queries sees its own and all earlier keys, s of them. Queries lie as (B K, T G, D): the G heads of a token side by
side, so that one product serves a key/value head and any block of tokens is one piece of memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

# Scores of one layer: beyond this many they are worth more than the time, and the fused operator is at its best.
_MAX_SCORES = 1 << 24
_BLOCK = 64


def serves_training(query: torch.Tensor, attention_mask: Any, num_kv_heads: int) -> bool:
    """Whether rows are short enough, and the mask lets no token see a later one (a caller's own mask may).

    Args:
        query: (B, T, H, D).
        attention_mask: (B, 1, T, T), True where a key is visible; None: causal.
        num_kv_heads: K.
    """
    batch_size, num_tokens, num_heads, _ = query.shape
    return (
        num_heads % num_kv_heads == 0
        and batch_size * num_heads * num_tokens**2 <= _MAX_SCORES
        and (
            attention_mask is None
            or (
                isinstance(attention_mask, torch.Tensor)
                and attention_mask.dtype == torch.bool
                and attention_mask.shape == (batch_size, 1, num_tokens, num_tokens)
                and not bool(attention_mask.triu(1).any())
            )
        )
    )


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """softmax(q kT scaling + mask) v of whole rows.

    Args:
        query: (B, T, H, D).
        key: (B, T, K, D).
        value: (B, T, K, D).
        attention_mask: (B, 1, T, T), True where a key is visible, never a later one; None: all earlier ones are.

    Returns:
        (B, T, H, D).
    """
    return _CausalAttention.apply(query, key, value, attention_mask, scaling)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        shape, groups = query.shape, query.shape[2] // key.shape[2]
        keys, values = _lay_keys(key), _lay_keys(value)  # (B K, T, D)
        queries = _lay_queries(query, groups)  # (B K, T G, D)
        output = torch.empty_like(queries)
        blocks = []
        for rows, stop in _blocks(shape[1], groups):
            part = queries[:, rows]  # (B K, t G, D)
            scores = torch.baddbmm(part.new_empty(()), part, keys[:, :stop].mT, beta=0, alpha=scaling)  # (B K, t G, s)
            if attention_mask is None:
                _hide_later(scores, rows.start // groups, groups)
                weights = torch.softmax(scores, -1)
            else:
                hidden = ~attention_mask[:, :, rows.start // groups : stop, None, :stop]  # (B, 1, t, 1, s)
                weights = _masked_softmax(scores, hidden, groups)
            output[:, rows] = torch.bmm(weights, values[:, :stop])
            blocks.append(weights)
        ctx.save_for_backward(queries, keys, values, query, key, value, attention_mask, *blocks)
        ctx.scaling, ctx.groups = scaling, groups
        return _unlay_queries(output, shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        queries, keys, values, query, key, value, attention_mask, *blocks = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _second_derivative(query, key, value, attention_mask, ctx.scaling, gradient)
        outgoing = _lay_queries(gradient, ctx.groups)
        for_queries = torch.empty_like(queries)
        for_keys, for_values = torch.zeros_like(keys), torch.zeros_like(values)
        for (rows, stop), weights in zip(_blocks(query.shape[1], ctx.groups), blocks, strict=True):
            part = outgoing[:, rows]
            for_values[:, :stop].add_(torch.bmm(weights.mT, part))
            for_weights = torch.bmm(part, values[:, :stop].mT)
            for_scores = torch._softmax_backward_data(for_weights, weights, -1, torch.float32)
            for_queries[:, rows] = torch.bmm(for_scores, keys[:, :stop]).mul_(ctx.scaling)
            for_keys[:, :stop].add_(torch.bmm(for_scores.mT, queries[:, rows]), alpha=ctx.scaling)
        batch_size = query.shape[0]
        for_keys, for_values = (
            states.view(batch_size, -1, *states.shape[1:]).transpose(1, 2) for states in (for_keys, for_values)
        )
        return _unlay_queries(for_queries, query.shape), for_keys, for_values, None, None


def _blocks(num_tokens: int, groups: int) -> Iterator[tuple[slice, int]]:
    """Blocks of queries as laid, and how many keys each sees."""
    for start in range(0, num_tokens, _BLOCK):
        stop = min(start + _BLOCK, num_tokens)
        yield slice(start * groups, stop * groups), stop


def _hide_later(scores: torch.Tensor, start: int, groups: int) -> None:
    """Hide the keys behind each query of a block that begins at token `start`; scores (B K, t G, s), in place."""
    num_keys = scores.shape[-1]
    later = torch.ones(num_keys - start, num_keys - start, dtype=torch.bool).triu_(1)
    scores.unflatten(1, (-1, groups))[..., start:].masked_fill_(later[:, None, :], float("-inf"))


def _masked_softmax(scores: torch.Tensor, hidden: torch.Tensor, groups: int) -> torch.Tensor:
    """Weights (B K, t G, s) without hidden keys, (B, 1, t, 1, s); zeros where a query, one of padding, sees none."""
    by_token = (len(hidden), -1, hidden.shape[2], groups, hidden.shape[4])
    scores.view(by_token).masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, -1)
    sees_none = hidden.all(-1, keepdim=True)
    if sees_none.any():
        weights.view(by_token).masked_fill_(sees_none, 0)
    return weights


def _lay_keys(states: torch.Tensor) -> torch.Tensor:
    """(B, T, K, D) -> (B K, T, D)."""
    return states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])


def _lay_queries(states: torch.Tensor, groups: int) -> torch.Tensor:
    """(B, T, H, D) -> (B K, T G, D)."""
    batch_size, num_tokens, _, head_dim = states.shape
    by_group = states.view(batch_size, num_tokens, -1, groups, head_dim).transpose(1, 2)  # (B, K, T, G, D)
    return by_group.reshape(-1, num_tokens * groups, head_dim)


def _unlay_queries(laid: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """(B K, T G, D) -> (B, T, H, D)."""
    batch_size, num_tokens, _, head_dim = shape
    return laid.view(batch_size, -1, num_tokens, laid.shape[1] // num_tokens, head_dim).transpose(1, 2).reshape(shape)


def _second_derivative(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    gradient: torch.Tensor,
) -> tuple:
    with torch.enable_grad():
        heads = (states.transpose(1, 2) for states in (query, key, value))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            output = F.scaled_dot_product_attention(
                *heads, attn_mask=attention_mask, is_causal=attention_mask is None, scale=scaling, enable_gqa=True
            )
    inputs = [states for states in (query, key, value) if states.requires_grad]
    found = iter(torch.autograd.grad(output.transpose(1, 2), inputs, gradient, create_graph=True))
    return *(next(found) if states.requires_grad else None for states in (query, key, value)), None, None


__all__ = ["causal_attention", "serves_training"]
