"""One optimizer step over the global batch.

The loss is a mean per token over the whole global batch: one step of 8 rows equals 4 accumulated steps of 2 and two
processes of 4, to floating-point noise, however unequal their numbers of tokens. Averaging means of micro-batches, the
usual way, weights a token by how few others share its micro-batch.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn


class DivergedError(ArithmeticError):
    """Loss or gradient is no longer a finite number; no weight was changed by it."""


@dataclass(frozen=True)
class StepResult:
    """What a step measured, as tensors on the device."""

    loss_nats: torch.Tensor
    grad_norm: torch.Tensor
    num_tokens: torch.Tensor


def training_step(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    micro_batches: Sequence[dict[str, Any]],
    accelerator: Accelerator,
    *,
    clip_norm: float,
) -> StepResult:
    """Forward, backward and update.

    Args:
        model: Prepared by the accelerator.
        optimizers: Their learning rates are those of this step.
        micro_batches: This process's share of the global batch: `input_ids`, `shift_labels`, `position_ids`, (b, T).
        accelerator: Knows the processes and the precision.
        clip_norm: Largest norm of the gradient; a longer one is scaled down.

    Returns:
        Mean loss over all label tokens of the global batch (nats), the gradient's norm before clipping, and the number
        of label tokens.

    Raises:
        DivergedError: The gradient is not finite; weights and optimizer state are as they were before.
    """
    # Bounds of documents for varlen attention come with a length that is a plain number.
    micro_batches = [
        {key: value.to(accelerator.device) if torch.is_tensor(value) else value for key, value in batch.items()}
        for batch in micro_batches
    ]
    num_tokens = torch.stack([(batch["shift_labels"] != -100).sum() for batch in micro_batches]).sum()
    num_tokens = cast(torch.Tensor, accelerator.reduce(num_tokens, reduction="sum"))
    # Distributed training averages gradients over processes; a sum over the global batch is wanted.
    # At least one: rows of conversations may hold no label, and then nothing is learned.
    divisor = num_tokens.clamp(min=1) / accelerator.num_processes
    total_loss = torch.zeros((), device=accelerator.device)
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else accelerator.no_sync(model):
            loss = model(**batch, num_items_in_batch=divisor, skip_logits=True, use_cache=False).loss
            accelerator.backward(loss)
        total_loss += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), clip_norm)
    assert grad_norm is not None
    # The same number in every process, so that all of them stop. A NaN must not reach weights or optimizer state.
    if not torch.isfinite(grad_norm):
        raise DivergedError(f"the gradient's norm is {float(grad_norm)} and the loss {float(total_loss):.4g}")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loss_nats = cast(torch.Tensor, accelerator.reduce(total_loss, reduction="mean"))
    return StepResult(loss_nats, grad_norm.detach(), num_tokens)


def set_learning_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
