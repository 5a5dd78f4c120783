"""The next-token loss with the output head fused in: logits are never held whole.

Shapes: B batch, T tokens, E hidden_size, V vocab_size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Logits held at a time where the loss is computed in chunks: 64 MiB in float32, enough rows for whole products.
_CHUNK_LOGITS = 1 << 24


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

    The same number as `ForCausalLMLoss` on the logits, to floating-point noise of the logits' dtype.

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
    targets = shift_labels.reshape(-1).to(hidden_states.device)
    inputs = hidden_states.reshape(-1, hidden_states.shape[-1])
    device_type = inputs.device.type
    if torch.is_autocast_enabled(device_type):
        # The fused operator is not on autocast's list; a plain head would compute in this dtype.
        dtype = torch.get_autocast_dtype(device_type)
        inputs, head_weight = inputs.to(dtype), head_weight.to(dtype)
    arguments: dict[str, Any] = {
        "ignore_index": ignore_index,
        "options": nn.LinearCrossEntropyOptions(
            batch_chunk_size=max(1, _CHUNK_LOGITS // head_weight.shape[0]), chunking_method=None
        ),
    }
    if inputs.dtype == torch.float32:
        total = F.linear_cross_entropy(inputs, head_weight, targets, reduction="sum", **arguments)
    else:
        # Losses of single tokens are summed in float32; the operator would sum them in their own dtype.
        total = F.linear_cross_entropy(inputs, head_weight, targets, reduction="none", **arguments).float().sum()
    if num_items_in_batch is None:
        num_items_in_batch = (targets != ignore_index).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


__all__ = ["chunked_causal_lm_loss"]
