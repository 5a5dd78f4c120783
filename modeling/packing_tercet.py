"""Rows that hold several documents: how they are known, and how attention is kept inside each.

Shapes: B batch, T tokens of a row, S keys (cached + T).
"""

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils import is_tracing


def must_not_wait(states: torch.Tensor) -> bool:
    """Whether a look at the values would make a training step wait for its accelerator."""
    return torch.is_grad_enabled() and not states.is_cpu and not is_tracing(states)


def may_hold_several_documents(
    position_ids: torch.Tensor, attention_mask: torch.Tensor | dict[str, Any] | None, cache: Cache | None
) -> bool:
    """Whether rows must be read as documents packed together: positions restart inside a row.

    Padding does not count: a left-padded row restarts where its text begins. Under tracing the values are unknown, and
    in training an accelerator would be waited for to see them; then any row of given positions and no cache is read so,
    which is right for single documents, too.

    Args:
        position_ids: (B, T).
        attention_mask: (B, S) with S >= T, 1 where a token is real; other forms are the caller's own masks, which say
            themselves who sees whom.
        cache: Continuous batching's paged cache, which is no `Cache`, keeps requests apart itself.
    """
    is_own_mask = attention_mask is not None and not (
        isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
    )
    if position_ids.ndim != 2 or position_ids.shape[-1] == 1 or is_own_mask:
        return False
    if cache is not None and not isinstance(cache, Cache):
        return False
    if is_tracing(position_ids):
        return cache is None
    if cache is None and must_not_wait(position_ids):
        return True
    is_real = torch.ones_like(position_ids, dtype=torch.bool)
    if isinstance(attention_mask, torch.Tensor):
        is_real = attention_mask[:, -position_ids.shape[-1] :].bool().expand_as(position_ids)
    # A document goes up by one at each of its tokens: its position less its tokens so far stays what it was.
    num_real = is_real.long().cumsum(-1)
    offset = position_ids - num_real
    first_offset = offset.gather(-1, is_real.long().argmax(-1, keepdim=True))
    return bool(((offset != first_offset) & is_real).any())


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


def packed_mask(position_ids: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Which keys each token of packed rows sees, (B, 1, T, T): earlier ones of its own document, within the window.

    The mask that transformers makes of restarting positions. It looks first whether any restart, for which the host
    waits until an accelerator has done all that it was told.

    Args:
        position_ids: (B, T), as `separate_documents` returns them.
        sliding_window: Of layers where attention slides; None where it does not.
    """
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
    document = begins.cumsum(-1)  # (B, T)
    index = torch.arange(position_ids.shape[-1], device=position_ids.device)
    distance = index[:, None] - index  # (T, T)
    is_near = distance >= 0
    if sliding_window is not None:
        is_near &= distance < sliding_window
    return (document[:, :, None] == document[:, None, :]).logical_and_(is_near).unsqueeze(1)


__all__ = ["may_hold_several_documents", "must_not_wait", "packed_mask", "separate_documents"]
