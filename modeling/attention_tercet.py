"""Attention as functions: written out, for one new token, and over a prompt that many rows share.

Query heads of a group are laid along the query axis in all of them, so keys and values are never repeated (GQA,
arXiv:2305.13245).

Shapes: B batch, T query tokens in this call, S keys visible (cached + T), H query heads, K key/value heads,
G = H / K query heads a key/value head, D head_dim. A segment of a shared prompt has B / R rows, each for R of the
batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache

from .cache_layers_tercet import Segment

# Scores over a shared prompt are held whole, (B, H, T, S); for more tokens than this copying the prompt is cheaper.
MAX_TOKENS_OVER_SEGMENTS = 64
# From so many numbers on, two batched products read keys and values faster than the fused operator on a CPU (measured
# on 2 cores: 24.6 against 27.6 ms for 8 layers at batch 8, context 4096; the other way round at a tenth of that).
_MANY_KEYS = 1 << 19


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


def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of one new token: the heads of a group are its queries, so keys and values are read once.

    Args:
        query: (B, H, 1, D).
        key: (B, K, S, D).
        value: (B, K, S, D).
        attention_mask: True (or 0, if added) where a key is visible, (B, 1, 1, S); None: everywhere.

    Returns:
        (B, 1, H, D).
    """
    batch_size, num_heads, _, head_dim = query.shape
    grouped_query = query.reshape(batch_size, key.shape[1], -1, head_dim)  # (B, K, G, D)
    if query.is_cpu and key.numel() >= _MANY_KEYS and query.dtype is torch.float32:
        scores = torch.matmul(key, grouped_query.transpose(2, 3)).transpose(2, 3) * scaling  # (B, K, G, S)
        if attention_mask is not None:
            scores = _apply_mask(scores, attention_mask)
        return torch.matmul(F.softmax(scores, dim=-1), value).reshape(batch_size, 1, num_heads, head_dim)
    output = F.scaled_dot_product_attention(grouped_query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch_size, 1, num_heads, head_dim)


def decode_masks(
    layer_types: Sequence[str], attention_mask: torch.Tensor | None, cache: Cache
) -> dict[str, torch.Tensor | None] | None:
    """The mask of one new token for each kind of layer: None where every key is visible, as without padding.

    Args:
        layer_types: The kind of each layer.
        attention_mask: (B, S), True or 1 where a token is real; None: everywhere.

    Returns:
        Boolean masks (B, 1, 1, keys of this kind of layer); or None altogether, if `attention_mask` is of another
        length than the cache, which is for transformers' own mask functions to read.
    """
    kinds = dict.fromkeys(layer_types)
    if attention_mask is None:
        return kinds
    if attention_mask.ndim != 2 or attention_mask.shape[1] != cache.get_seq_length() + 1:
        return None
    is_real = attention_mask.bool()
    if is_real.all():
        return kinds
    masks: dict[str, torch.Tensor | None] = {}
    for kind in kinds:
        num_keys, offset = cache.get_mask_sizes(1, layer_types.index(kind))
        masks[kind] = is_real[:, None, None, offset : offset + num_keys]
    return masks


def segmented_attention(
    query: torch.Tensor,
    segments: Sequence[Segment],
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kT scaling + mask) v over keys that lie in several places, the first of them shared by rows.

    A shared segment is read once for all rows that share it, whose queries lie side by side along the query axis. One
    softmax runs over the scores of all segments, so the result is that of attention over the copied prompt.

    Args:
        query: (B, H, T, D).
        segments: Keys and values (B / R, K, P, D) in the order of positions; together S of them.
        attention_mask: Boolean (True: visible) or added, broadcastable to (B, H, T, S); None: causal.

    Returns:
        The output (B, T, H, D) and the attention weights (B, H, T, S).
    """
    batch_size, num_heads, num_tokens, head_dim = query.shape
    scores = torch.cat([_segment_scores(query, segment) for segment in segments], dim=-1) * scaling
    if attention_mask is None and num_tokens > 1:
        ones = scores.new_ones((num_tokens, scores.shape[-1]), dtype=torch.bool)
        attention_mask = ones.tril(scores.shape[-1] - num_tokens)
    if attention_mask is not None:
        scores = _apply_mask(scores, attention_mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    parts = weights.split([segment.keys.shape[-2] for segment in segments], dim=-1)
    output = query.new_zeros((batch_size, num_heads, num_tokens, head_dim))
    for part, segment in zip(parts, segments, strict=True):
        output += _segment_output(part, segment)
    return output.transpose(1, 2).contiguous(), weights


def _apply_mask(scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    if attention_mask.dtype == torch.bool:
        return scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    return scores + attention_mask


def _segment_scores(query: torch.Tensor, segment: Segment) -> torch.Tensor:
    """(B, H, T, D) against (B / R, K, P, D) -> (B, H, T, P)."""
    laid = _lay_rows_side_by_side(query, segment)  # (B / R, K, R G T, D)
    return _lay_rows_apart(torch.matmul(laid, segment.keys.transpose(2, 3)), query.shape[:3])


def _segment_output(weights: torch.Tensor, segment: Segment) -> torch.Tensor:
    """(B, H, T, P) and (B / R, K, P, D) -> (B, H, T, D)."""
    laid = _lay_rows_side_by_side(weights, segment)  # (B / R, K, R G T, P)
    return _lay_rows_apart(torch.matmul(laid, segment.values), weights.shape[:3])


def _lay_rows_side_by_side(states: torch.Tensor, segment: Segment) -> torch.Tensor:
    batch_size, _, num_tokens, width = states.shape
    num_kv_heads = segment.keys.shape[1]
    states = states.reshape(batch_size // segment.repeats, segment.repeats, num_kv_heads, -1, num_tokens, width)
    return states.transpose(1, 2).reshape(batch_size // segment.repeats, num_kv_heads, -1, width)


def _lay_rows_apart(laid: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    batch_size, num_heads, num_tokens = shape
    num_groups, num_kv_heads, _, width = laid.shape
    states = laid.view(num_groups, num_kv_heads, batch_size // num_groups, -1, num_tokens, width)
    return states.transpose(1, 2).reshape(batch_size, num_heads, num_tokens, width)


__all__ = [
    "MAX_TOKENS_OVER_SEGMENTS",
    "decode_attention",
    "decode_masks",
    "eager_attention_forward",
    "segmented_attention",
]
