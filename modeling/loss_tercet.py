"""The next-token loss with the output head fused in: of the logits a few MiB are held at a time.

Shapes: B batch, T tokens, N = B T positions, n of them at a time, E hidden_size, V vocab_size.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .kernels_tercet import matmul_transposed

# Logits held at a time: 16 MiB in float32, which later passes find in a CPU's cache.
_CHUNK_LOGITS = 1 << 22
# But at least so many positions, for a product that is more than a reading of the head.
_MIN_POSITIONS = 256


def chunked_causal_lm_loss(
    hidden_states: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor | None,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    z_loss: float = 0.0,
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
        z_loss: Gradients are those of the loss plus z_loss times the mean of log² of the softmax's denominator, which
            keeps logits from drifting (arXiv:2204.02311, section 5). The number returned is the cross entropy alone,
            so that runs with and without compare.

    Returns:
        The loss in nats, a scalar. Its gradient has no gradient: who needs one asks for logits.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden_states.device)
    inputs = hidden_states.reshape(-1, hidden_states.shape[-1])
    if num_items_in_batch is None:
        num_items_in_batch = (targets != ignore_index).sum()
    divisor = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=inputs.device)
    device_type = inputs.device.type
    if torch.is_autocast_enabled(device_type):
        # The products are no operators that autocast knows; a plain head would compute in this dtype.
        dtype = torch.get_autocast_dtype(device_type)
        inputs, head_weight = inputs.to(dtype), head_weight.to(dtype)
    if torch.compiler.is_compiling() and targets.numel() * head_weight.shape[0] <= 4 * _CHUNK_LOGITS:
        # Few enough to hold, and compilers make few passes of these by themselves.
        return _loss_of_logits(F.linear(inputs, head_weight).float(), targets, divisor, ignore_index, z_loss)
    return _ChunkedLoss.apply(inputs, head_weight, targets, divisor, ignore_index, z_loss)


def _loss_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, divisor: torch.Tensor, ignore_index: int, z_loss: float
) -> torch.Tensor:
    total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    if z_loss:
        penalty = z_loss * (torch.logsumexp(logits, -1).square() * (targets != ignore_index)).sum()
        total = total + (penalty - penalty.detach())
    return total / divisor


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made in the forward pass, while a chunk's logits are there."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        divisor: torch.Tensor,
        ignore_index: int,
        z_loss: float,
    ) -> torch.Tensor:
        wants_inputs, wants_weight = ctx.needs_input_grad[:2]
        num_positions = max(_MIN_POSITIONS, _CHUNK_LOGITS // weight.shape[0])
        for_inputs = torch.empty_like(inputs) if wants_inputs else None
        # Sums over chunks are held in float32 whatever the products' dtype.
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        total = torch.zeros((), dtype=torch.float32, device=inputs.device)
        for start in range(0, len(inputs), num_positions):
            part = inputs[start : start + num_positions]  # (n, E)
            loss, residual = _chunk(part, weight, targets[start : start + num_positions], ignore_index, z_loss)
            total += loss
            if for_inputs is None and for_weight is None:
                continue
            residual = residual.div_(divisor).to(weight.dtype)  # (n, V)
            if for_inputs is not None:
                for_inputs[start : start + num_positions] = matmul_transposed(residual, weight.t())
            if for_weight is not None and weight.dtype == torch.float32:
                for_weight.addmm_(residual.t(), part)
            elif for_weight is not None:
                for_weight += residual.t() @ part
        if for_weight is not None:
            for_weight = for_weight.to(weight.dtype)
        ctx.save_for_backward(for_inputs, for_weight)
        return total / divisor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        gradients = ctx.saved_tensors
        # Nearly always 1; a look at it costs nothing on a CPU and waits for an accelerator.
        if not (gradient.is_cpu and not torch.compiler.is_compiling() and gradient.item() == 1.0):
            gradients = [None if saved is None else saved * gradient.to(saved.dtype) for saved in gradients]
        return *gradients, None, None, None, None


def _chunk(
    part: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of losses of n positions, and its gradient for their logits, (n, V)."""
    is_label = targets != ignore_index
    safe_targets = targets.masked_fill(~is_label, 0)[:, None]
    logits = matmul_transposed(part, weight).float()  # (n, V)
    largest = logits.amax(-1, keepdim=True)
    exponentials = logits.sub_(largest)
    of_target = exponentials.gather(-1, safe_targets)
    sums = exponentials.exp_().sum(-1, keepdim=True)
    log_sums = sums.log()
    loss = (log_sums - of_target).masked_fill(~is_label[:, None], 0).sum()
    # Of the loss, for logit v: p_v - [v is the target]; of z log²Z: 2 z log Z p_v.
    factor = 1.0 if not z_loss else 1.0 + 2.0 * z_loss * (log_sums + largest)
    residual = exponentials.mul_(factor / sums * is_label[:, None])
    residual.scatter_add_(-1, safe_targets, -is_label[:, None].to(residual.dtype))
    return loss, residual


__all__ = ["chunked_causal_lm_loss"]
