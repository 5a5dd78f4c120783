"""One optimizer step over the global batch.

The loss is a mean per token over the whole global batch: one step of 8 rows equals 4 accumulated steps of 2 and two
processes of 4, to floating-point noise, however unequal their numbers of tokens. Averaging means of micro-batches, the
usual way, weights a token by how few others share its micro-batch.

Nothing here waits for an accelerator: what decides whether weights change is decided there, and what was measured
stays there until somebody reads it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn


@dataclass(frozen=True)
class StepResult:
    """What a step measured, as tensors on the device.

    Attributes:
        loss_nats: Cross entropy per label token of the global batch, without what z-loss adds.
        grad_norm: Norm of the gradient before clipping.
        num_tokens: Label tokens of the global batch.
        is_finite: Whether loss and gradient were finite. If not, no weight and no optimizer state has changed.
    """

    loss_nats: torch.Tensor
    grad_norm: torch.Tensor
    num_tokens: torch.Tensor
    is_finite: torch.Tensor


def training_step(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    micro_batches: Sequence[dict[str, Any]],
    accelerator: Accelerator,
    *,
    clip_norm: float,
    z_loss: float = 0.0,
) -> StepResult:
    """Forward, backward and update.

    Args:
        model: Prepared by the accelerator.
        optimizers: Their learning rates are those of this step. AdamW's must be fused.
        micro_batches: This process's share of the global batch: `input_ids`, `shift_labels`, `position_ids`, (b, T).
        accelerator: Knows the processes and the precision.
        clip_norm: Largest norm of the gradient; a longer one is scaled down.
        z_loss: Weight of the squared log of the softmax's denominator in what is minimised, per token.

    Returns:
        What was measured; the same in every process.
    """
    num_labels = torch.stack([(batch["shift_labels"] != -100).sum() for batch in micro_batches]).sum()
    num_labels = num_labels.to(accelerator.device, non_blocking=True)
    num_tokens = cast(torch.Tensor, accelerator.reduce(num_labels, reduction="sum"))
    # Distributed training averages gradients over processes; a sum over the global batch is wanted.
    # At least one: rows of conversations may hold no label, and then nothing is learned.
    divisor = num_tokens.clamp(min=1) / accelerator.num_processes
    arguments = {"num_items_in_batch": divisor, "skip_logits": True, "use_cache": False}
    if z_loss:
        arguments["z_loss"] = z_loss
    total_loss = torch.zeros((), device=accelerator.device)
    for index, batch in enumerate(micro_batches):
        # Bounds of documents for varlen attention come with a length that is a plain number.
        batch = {
            key: value.to(accelerator.device, non_blocking=True) if torch.is_tensor(value) else value
            for key, value in batch.items()
        }
        with gradients_stay_here(model, accelerator, index < len(micro_batches) - 1):
            loss = model(**batch, **arguments).loss
            accelerator.backward(loss)
        total_loss += loss.detach()
    loss_nats = cast(torch.Tensor, accelerator.reduce(total_loss, reduction="mean"))
    grad_norm = gradient_norm(model.parameters())
    is_finite = torch.isfinite(grad_norm) & torch.isfinite(loss_nats)
    # Gradients are divided by this. One that is not finite must not reach even a product whose other factor is 0.
    grad_scale = torch.where(is_finite, (grad_norm / clip_norm).clamp(min=1.0), 1.0)
    for optimizer in optimizers:
        step_if(optimizer, is_finite, grad_scale)
        optimizer.zero_grad(set_to_none=True)
    return StepResult(loss_nats, grad_norm, num_tokens, is_finite)


def step_if(optimizer: torch.optim.Optimizer, is_finite: torch.Tensor, grad_scale: torch.Tensor) -> None:
    """Update with gradients divided by `grad_scale`, unless `is_finite` says no; nobody waits for its value.

    Fused optimizers of PyTorch, and Muon here, take both as gradient scaling hands them over: attributes that their
    kernels read. Clipping so saves a pass over all gradients, too.

    Args:
        is_finite: A bool on the device.
        grad_scale: A float on the device, at least 1.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(f"{type(optimizer).__name__} cannot leave a step out on the device; use fused=True.")
    taker: Any = optimizer
    taker.grad_scale, taker.found_inf = grad_scale.float(), (~is_finite).float()
    try:
        optimizer.step()
    finally:
        # They hold for this step alone; whoever else calls `step()` has its own.
        del taker.grad_scale, taker.found_inf


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of all gradients as one vector, over the processes where they are sharded; a scalar."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            # Sharded gradients (DTensor) know their devices; norms of one mesh are combined by themselves.
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    norms = [torch.nn.utils.get_total_norm(gradients) for gradients in groups.values()]
    norms = [cast(Any, norm).full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


@contextmanager
def gradients_stay_here(model: nn.Module, accelerator: Accelerator, staying: bool) -> Iterator[None]:
    """Within, a backward pass leaves gradients unreduced over the processes if `staying`: more of them will be added.

    For DDP and for models sharded by `fully_shard`, with or without Accelerate's plugin.
    """
    if not staying:
        yield
        return
    set_sync = getattr(model, "set_requires_gradient_sync", None)
    if set_sync is None:
        with accelerator.no_sync(model):
            yield
        return
    set_sync(False)
    try:
        yield
    finally:
        set_sync(True)


def set_learning_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
