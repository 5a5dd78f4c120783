"""Muon for matrices, AdamW for the rest.

A matrix's update is orthogonalised, so that every direction of it moves alike; embeddings, the head, norms and biases,
whose rows or entries mean something one by one, are AdamW's.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from tercet.training.recipe import OptimizerSection

# Coefficients of the quintic iteration of Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): they
# bring singular values into about [0.7, 1.2] in five steps rather than to 1, which is enough and faster.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# From so many columns a row on, the iteration costs less in x xᵀ than in x.
_WIDE = 1.5


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
    if x.dtype == torch.float32 and x.shape[-1] >= _WIDE * x.shape[-2]:
        x = _polynomial(x @ x.mT, num_iterations) @ x
    else:
        for _ in range(num_iterations):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


def _polynomial(gram: torch.Tensor, num_iterations: int) -> torch.Tensor:
    """What the iteration multiplies x by, (n, rows, rows), of x xᵀ alone: all its factors are polynomials in that.

    x is B x after an iteration and x xᵀ is B² x xᵀ, with B = a + b x xᵀ + c (x xᵀ)². For a wide x this takes two
    thirds of the arithmetic, and float32: squared singular values need the digits.
    """
    a, b, c = _NEWTON_SCHULZ
    product = None
    for iteration in range(num_iterations):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if iteration < num_iterations - 1:
            gram = factor @ (factor @ gram)
    assert product is not None
    return product


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

    # `grad_scale` and `found_inf`, tensors on the device, may be set before `step()`, as for fused optimizers.
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; none, and no momentum either, where `found_inf` is 1."""
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
        """Update matrices of one shape on one device."""
        weights = [self._local(parameter) for parameter in parameters]
        gradients, keep = self._usable_gradients(parameters)
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(self._local(state["momentum_buffer"]))
        momentum, lr = group["momentum"], group["lr"]
        # buffer += (1 - momentum) (gradient - buffer), or nothing where `keep` is 0 and gradients are 0, too.
        torch._foreach_mul_(buffers, 1 - (1 - momentum) * keep)
        torch._foreach_add_(buffers, gradients, alpha=1 - momentum)
        directions = torch._foreach_lerp(gradients, buffers, momentum)
        updates = self._orthogonalized(list(directions), parameters)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"] * keep)
        torch._foreach_mul_(updates, lr * 0.2 * max(parameters[0].shape) ** 0.5 * keep)
        torch._foreach_sub_(weights, updates)

    def _usable_gradients(self, parameters: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | float]:
        """Gradients unscaled, zeros where `found_inf` is 1; and 0 there, else 1."""
        gradients = [self._local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scale is not None:
            torch._foreach_mul_(gradients, grad_scale.to(gradients[0].device).reciprocal())
        if found_inf is None:
            return gradients, 1.0
        found_inf = found_inf.to(gradients[0].device)
        for gradient in gradients:
            # Not a product with 0, which keeps what is not a number.
            gradient.masked_fill_(found_inf.bool(), 0)
        return gradients, 1 - found_inf

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of a parameter, gradient or buffer lies in this process; a subclass knows other kinds of tensors."""
        return tensor

    def _orthogonalized(self, directions: list[torch.Tensor], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Orthogonal updates for the local parts of matrices of one shape; new tensors.

        Args:
            directions: One for each parameter, its local part.
            parameters: As a subclass may need to know how they are spread.
        """
        return list(orthogonalize(torch.stack(directions)).unbind(0))


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
    embedding_weight_decay: float = 0.0,
) -> list[torch.optim.Optimizer]:
    """The optimizers of a run. Vectors (norms, biases) have no weight decay.

    Args:
        model: Parameters must be where they will be trained.
        name: `muon` (Muon and AdamW) or `adamw` (AdamW for all).
        learning_rate: AdamW's peak.
        matrix_learning_rate: Muon's peak.
        weight_decay: Decoupled decay of the blocks' matrices.
        betas: AdamW's.
        embedding_weight_decay: Decoupled decay of embeddings and head.
    """
    matrices, tables, vectors = split_parameters(model)
    groups: list[dict[str, Any]] = [
        {"params": tables, "weight_decay": embedding_weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if name == "muon":
        muon = Muon
        if any(isinstance(matrix, DTensor) for matrix in matrices):
            from tercet.training.sharded_muon import ShardedMuon

            muon = ShardedMuon
        optimizers.append(muon(matrices, lr=matrix_learning_rate, weight_decay=weight_decay))
    else:
        groups.append({"params": matrices, "weight_decay": weight_decay})
    groups = [group for group in groups if group["params"]]
    optimizers.append(torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=1e-10, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def optimizers_of_recipe(settings: "OptimizerSection", model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers that a recipe's section `optimizer` asks for."""
    return make_optimizers(
        model,
        name=settings.name,
        learning_rate=settings.learning_rate,
        matrix_learning_rate=settings.matrix_learning_rate,
        weight_decay=settings.weight_decay,
        embedding_weight_decay=settings.embedding_weight_decay,
        betas=settings.betas,
    )
