"""Parts of a block with a backward pass of their own, for float32 training on a CPU.

There a step is bound by products and by passes over memory. Written as single operators, autograd makes a pass and a
tensor of each, forward and backward, and keeps most of them; these make a few, and keep what cannot be made again
quickly. Elsewhere (accelerators, other dtypes, compilers, exports, function transforms) the operators themselves run,
which are also the reference that tests compare with, and what a second derivative goes through.

Shapes: N rows (tokens of the whole batch), E input features, O output features, I intermediate_size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.utils import is_tracing

# Below this many multiplications autograd's call of Python costs more than the faster product gives.
_MIN_PRODUCT = 1 << 27


def trains_on_cpu(states: torch.Tensor) -> bool:
    """Whether these functions may serve: plain float32 on a CPU under ordinary reverse-mode differentiation."""
    return (
        torch.is_grad_enabled()
        and type(states) is torch.Tensor
        and states.is_cpu
        and states.dtype is torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not is_tracing(states)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, (..., E) -> (..., O), with products by whichever library has the faster ones."""
    if _onednn_linear is None or states.numel() * weight.shape[0] < _MIN_PRODUCT:
        return F.linear(states, weight, bias)
    product = _Linear.apply(states, weight)
    return product if bias is None else product + bias


def project(states: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Several projections without bias of the same states, (..., E) -> (..., O1), (..., O2), ..."""
    return _Projections.apply(states, *weights)


def gated_mlp(
    states: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor
) -> torch.Tensor:
    """SwiGLU feed-forward (arXiv:2002.05202), `(silu(x Wgᵀ) * x Wuᵀ) Wdᵀ`, (..., E) in and out; keeps two (N, I)."""
    return _GatedMLP.apply(states, gate_weight, up_weight, down_weight)


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square of the last dimension, then scale; keeps the input and one number a row."""
    return _RMSNorm.apply(states, weight, eps)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotate` of layers_tercet.py; keeps nothing of the states. `cos` and `sin` get no gradient."""
    return _Rotation.apply(states, cos, sin)


def matmul_transposed(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`states weightᵀ` of matrices (N, E) and (O, E), without a graph.

    oneDNN has an operator for it that takes either in any order of memory. On AMD's processors it is 7 % faster than
    the BLAS that PyTorch calls, and 12 % for `states weight`, the gradient of the states (measured from 1024 rows on).
    """
    if _onednn_linear is not None and states.dtype is torch.float32 and states.is_cpu and len(states) >= 256:
        return _onednn_linear(states, weight, None, "none", [], "")
    return F.linear(states, weight)


def _find_onednn_linear() -> Callable | None:
    # Private to PyTorch (its compiler emits calls of it), so it may go or change: then F.linear serves.
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        operator = torch.ops.mkldnn._linear_pointwise.default
        states, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
        right = torch.equal(operator(states, weight.t(), None, "none", [], ""), states @ weight)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return operator if right else None


_onednn_linear = _find_onednn_linear()


def _rows(states: torch.Tensor) -> torch.Tensor:
    return states.reshape(-1, states.shape[-1])


def _second_derivative(reference: Callable, inputs: Sequence[Any], gradients: Sequence[torch.Tensor]) -> tuple:
    """Gradients of `reference` as a graph, for callers that differentiate a gradient."""
    with torch.enable_grad():
        outputs = reference(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
    return tuple(
        next(found) if isinstance(value, torch.Tensor) and value.requires_grad else None for value in inputs
    )  # fmt: skip


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(states, weight)
        return matmul_transposed(_rows(states), weight).view(*states.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        states, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _second_derivative(F.linear, (states, weight), (gradient,))
        rows = _rows(gradient)
        for_states = for_weight = None
        if ctx.needs_input_grad[0]:
            for_states = matmul_transposed(rows, weight.t()).view_as(states)
        if ctx.needs_input_grad[1]:
            for_weight = rows.t() @ _rows(states)
        return for_states, for_weight


class _Projections(torch.autograd.Function):
    @staticmethod
    def reference(states: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(F.linear(states, weight) for weight in weights)

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.save_for_backward(states, *weights)
        rows = _rows(states)
        return tuple(matmul_transposed(rows, weight).view(*states.shape[:-1], -1) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:  # type: ignore[override]
        states, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _second_derivative(_Projections.reference, (states, *weights), gradients)
        inputs, rows = _rows(states), [_rows(gradient) for gradient in gradients]
        for_states = None
        if ctx.needs_input_grad[0]:
            for_states = _sum_of_products(rows, weights).view_as(states)
        for_weights = [
            row.t() @ inputs if needed else None for row, needed in zip(rows, ctx.needs_input_grad[1:], strict=True)
        ]
        return for_states, *for_weights


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def reference(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor
    ) -> torch.Tensor:
        rows = _rows(states)
        gate, up = matmul_transposed(rows, gate_weight), matmul_transposed(rows, up_weight)  # (N, I)
        ctx.save_for_backward(states, gate_weight, up_weight, down_weight, gate, up)
        return matmul_transposed(F.silu(gate).mul_(up), down_weight).view(*states.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        states, gate_weight, up_weight, down_weight, gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = (states, gate_weight, up_weight, down_weight)
            return _second_derivative(_GatedMLP.reference, inputs, (gradient,))
        inputs, outgoing = _rows(states), _rows(gradient)
        active = F.silu(gate)
        for_down = outgoing.t() @ (active * up) if ctx.needs_input_grad[3] else None
        for_hidden = matmul_transposed(outgoing, down_weight.t())  # (N, I)
        for_up_states = active.mul_(for_hidden)
        for_gate_states = torch.ops.aten.silu_backward.grad_input(
            for_hidden.mul_(up), gate, grad_input=for_hidden
        )  # fmt: skip
        for_states = None
        if ctx.needs_input_grad[0]:
            products = _sum_of_products([for_gate_states, for_up_states], [gate_weight, up_weight])
            for_states = products.view_as(states)
        for_gate = for_gate_states.t() @ inputs if ctx.needs_input_grad[1] else None
        for_up = for_up_states.t() @ inputs if ctx.needs_input_grad[2] else None
        return for_states, for_gate, for_up, for_down


def _sum_of_products(rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    total = matmul_transposed(rows[0], weights[0].t())
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total.add_(matmul_transposed(row, weight.t()))
    return total


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def reference(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return weight * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps))

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # type: ignore[override]
        size = states.shape[-1]
        inverse = torch.linalg.vector_norm(states, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(states, weight, inverse)
        ctx.eps = eps
        return (states * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        states, weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _second_derivative(_RMSNorm.reference, (states, weight, ctx.eps), (gradient,))
        size = states.shape[-1]
        # y = w x r with r = (mean x² + eps)^-1/2:  dx = r (g w - x r² mean(g w x)),  dw = Σ g x r.
        products = (gradient * states).reshape(-1, size)
        for_weight = products.t() @ inverse.view(-1) if ctx.needs_input_grad[1] else None
        for_states = None
        if ctx.needs_input_grad[0]:
            slope = (products @ weight).view_as(inverse).mul_(inverse.pow(3)).div_(size)
            for_states = (gradient * weight).mul_(inverse).addcmul_(states, slope, value=-1)
        return for_states, for_weight, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def reference(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, dim=-1)
        return states * cos + torch.cat((-second, first), dim=-1) * sin

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        first, second = states.chunk(2, dim=-1)
        half = first.shape[-1]
        rotated = states * cos
        rotated[..., :half].addcmul_(second, sin[..., :half], value=-1)
        rotated[..., half:].addcmul_(first, sin[..., half:])
        return rotated

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        first, second = gradient.chunk(2, dim=-1)
        half = first.shape[-1]
        if torch.is_grad_enabled():
            turned = torch.cat((second * sin[..., half:], -first * sin[..., :half]), dim=-1)
            return gradient * cos + turned, None, None
        rotated = gradient * cos
        rotated[..., :half].addcmul_(second, sin[..., half:])
        rotated[..., half:].addcmul_(first, sin[..., :half], value=-1)
        return rotated, None, None


__all__ = ["gated_mlp", "linear", "matmul_transposed", "project", "rms_norm", "rotate", "trains_on_cpu"]
