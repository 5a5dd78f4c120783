"""Muon for matrices, AdamW for the rest.

A matrix's update is orthogonalised, so that every direction of it moves alike; embeddings, the head, norms and biases,
whose rows or entries mean something one by one, are AdamW's.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

# Coefficients of the quintic iteration of Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): they
# bring singular values into about [0.7, 1.2] in five steps rather than to 1, which is enough and faster.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """Replace each matrix's singular values by about 1, by Newton-Schulz iteration.

    In float32 on CPUs, where bfloat16 products are emulated and slower by an order of magnitude; in bfloat16 elsewhere.

    Args:
        matrices: (n, rows, columns); n matrices of one shape share each product.
        num_iterations: 5 is enough for an update.

    Returns:
        (n, rows, columns), in the dtype of `matrices`.
    """
    a, b, c = _NEWTON_SCHULZ
    x = matrices if matrices.device.type == "cpu" else matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024), scaled to AdamW's update size (arXiv:2502.16982, eq. 4).

    Args:
        params: Matrices, (rows, columns).
        lr: Learning rate; the update is multiplied by 0.2 sqrt(max(rows, columns)).
        momentum: Decay of the running gradient, used as Nesterov's.
        weight_decay: Decoupled, as in AdamW.

    Raises:
        ValueError: A parameter that is not a matrix.
    """

    def __init__(
        self, params: Iterable[torch.Tensor] | list[dict[str, Any]], lr: float = 0.02, momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon takes matrices and got a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[tuple[torch.Size, torch.device], list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault((parameter.shape, parameter.device), []).append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = orthogonalize(torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"])))
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        scale = 0.2 * max(parameters[0].shape) ** 0.5
        torch._foreach_add_(parameters, list(updates.unbind(0)), alpha=-group["lr"] * scale)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """The model's trainable parameters as (matrices of the blocks, embeddings and head, vectors).

    A tied head counts once, as an embedding.
    """
    embeddings = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or name.endswith("lm_head")
    }
    matrices, tables, vectors = [], [], []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            tables.append(parameter)
        elif parameter.ndim == 2:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    return matrices, tables, vectors


def make_optimizers(
    model: nn.Module,
    *,
    name: str,
    learning_rate: float,
    matrix_learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> list[torch.optim.Optimizer]:
    """The optimizers of a run. Weight decay acts on the blocks' matrices only.

    Args:
        model: Parameters must be where they will be trained.
        name: `muon` (Muon and AdamW) or `adamw` (AdamW for all).
        learning_rate: AdamW's peak.
        matrix_learning_rate: Muon's peak.
        weight_decay: Decoupled decay.
        betas: AdamW's.
    """
    matrices, tables, vectors = split_parameters(model)
    groups: list[dict[str, Any]] = [{"params": tables + vectors, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = []
    if name == "muon":
        optimizers.append(Muon(matrices, lr=matrix_learning_rate, weight_decay=weight_decay))
    else:
        groups.append({"params": matrices, "weight_decay": weight_decay})
    optimizers.append(torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=1e-10, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers
