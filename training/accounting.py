"""What a model costs, counted from its config: parameters, FLOPs, bytes. Nothing is loaded and nothing is run.

Shapes: E hidden_size, H query heads, K key/value heads, D head_dim, I intermediate_size, V vocab_size, T tokens.
A multiply-add is two FLOPs; only matrix products are counted (norms, softmax, activations and rotations are not).
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Families whose every matrix we know. Another one is refused: a guessed count would look like a measured one.
_GATED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
_PLAIN_FAMILIES = frozenset({"gpt2"})


@dataclass(frozen=True)
class ParameterRow:
    """A tensor, or the same module's tensors in every layer.

    `shapes` are those of one copy (weight, then bias), so `num_parameters` is `num_copies` times their sizes, or 0
    where the tensor is `tied_to` another, which counts it. `share` is of the whole model, from 0 to 1.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    num_copies: int
    num_parameters: int
    share: float
    tied_to: str | None = None


@dataclass(frozen=True)
class DecoderShape:
    """The numbers that decide a decoder's cost. `windows` has one entry per layer: None sees everything before it."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_mlp_matrices: int
    windows: tuple[int | None, ...]

    @classmethod
    def from_config(cls, config: "PreTrainedConfig") -> "DecoderShape":
        """Read the shape by transformers' usual names.

        Raises:
            ValueError: If the family is one whose matrices we do not know.
        """
        family = config.model_type
        if family == "tercet":
            num_mlp_matrices = 3 if getattr(config, "mlp_type", "gated") == "gated" else 2
        elif family in _GATED_FAMILIES:
            num_mlp_matrices = 3
        elif family in _PLAIN_FAMILIES:
            num_mlp_matrices = 2
        else:
            known = ", ".join(sorted({"tercet", *_GATED_FAMILIES, *_PLAIN_FAMILIES}))
            raise ValueError(f"model_type {family!r} cannot be accounted for: known are {known}")
        heads = config.num_attention_heads
        # GPT-2 spells "four times the hidden size" as n_inner=None.
        intermediate = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=intermediate or 4 * config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            num_mlp_matrices=num_mlp_matrices,
            windows=_layer_windows(config),
        )


def _layer_windows(config: "PreTrainedConfig") -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        # Mistral has no layer_types: a window, where there is one, holds for every layer.
        every = "sliding_attention" if config.model_type == "mistral" and window else "full_attention"
        layer_types = [every] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def parameter_table(model: "PreTrainedModel") -> list[ParameterRow]:
    """Every parameter once, in the model's own order, the same module of all layers in one row.

    Works on the meta device. A tied tensor (the head, as a rule) has its own row, which counts nothing.
    """
    first_name: dict[int, str] = {}
    modules: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        if id(parameter) in first_name:
            tied[module] = first_name[id(parameter)]
        first_name.setdefault(id(parameter), _group_name(module))
        modules[module].append(parameter)
    groups: dict[tuple[str, tuple[tuple[int, ...], ...], str | None], int] = defaultdict(int)
    for module, parameters in modules.items():
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        groups[_group_name(module), shapes, tied.get(module)] += 1
    total = num_parameters(model)
    rows = []
    for (name, shapes, tied_to), num_copies in groups.items():
        count = 0 if tied_to else num_copies * sum(math.prod(shape) for shape in shapes)
        rows.append(ParameterRow(name, shapes, num_copies, count, count / total, tied_to))
    return rows


def _group_name(module: str) -> str:
    """`model.layers.3.self_attn.q_proj` → `self_attn.q_proj`; what is outside the layers loses only its prefix."""
    inside = re.sub(r"^.*?\.(?:layers|h)\.\d+\.", "", module)
    return inside if inside != module else re.sub(r"^(?:model|transformer)\.", "", module)


def num_parameters(model: torch.nn.Module) -> int:
    """Trainable numbers, a tied tensor once."""
    return sum(parameter.numel() for parameter in model.parameters())


def num_non_embedding_parameters(model: torch.nn.Module) -> int:
    """Without the lookup tables (tokens, learned positions): those cost no FLOPs on the way in.

    A head of its own stays counted, as in `PreTrainedModel.num_parameters(exclude_embeddings=True)`; a tied one is
    the token table and goes with it.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in tables)


def flops_per_token(config: "PreTrainedConfig", context_length: int, *, training: bool) -> int:
    """Mean FLOPs per token of a row of `context_length` tokens, the head and the attention scores included.

    As PaLM's appendix B counts (arXiv:2204.02311), with one deliberate difference: a causal model needs only the
    scores of what a token can see, so token t of a row costs t keys (at most its window), (T + 1) / 2 on average, and
    not T. MFU by this count is therefore the lower, stricter one. Training is three times the forward pass: the
    backward pass has two products for each one; recomputation under gradient checkpointing is not useful work.
    """
    _positive("context_length", context_length)
    shape = DecoderShape.from_config(config)
    scores = 0
    for window in shape.windows:
        seen = min(window or context_length, context_length)
        visible_in_row = seen * (seen + 1) // 2 + (context_length - seen) * seen
        scores += _score_flops(shape) * visible_in_row
    forward = _matrix_flops(shape) + round(scores / context_length)
    return 3 * forward if training else forward


def decode_flops_per_token(config: "PreTrainedConfig", context_length: int) -> int:
    """FLOPs of one token that sees `context_length` keys, itself among them: what a decode step costs there."""
    _positive("context_length", context_length)
    shape = DecoderShape.from_config(config)
    visible = sum(min(window or context_length, context_length) for window in shape.windows)
    return _matrix_flops(shape) + _score_flops(shape) * visible


def _matrix_flops(shape: DecoderShape) -> int:
    """Products with weights, for one token: q, k, v, o and the MLP in each layer, then the head."""
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    attention = 2 * shape.hidden_size * (2 * queries + 2 * keys)
    mlp = 2 * shape.hidden_size * shape.intermediate_size * shape.num_mlp_matrices
    return len(shape.windows) * (attention + mlp) + 2 * shape.hidden_size * shape.vocab_size


def _score_flops(shape: DecoderShape) -> int:
    """q·k and weight·v of every head of one layer, for one query and one key."""
    return 4 * shape.num_attention_heads * shape.head_dim


def cache_bytes_per_token(config: "PreTrainedConfig", dtype: torch.dtype) -> int:
    """Bytes that one more token adds to the cache while no window is full; a full window adds none."""
    shape = DecoderShape.from_config(config)
    return len(shape.windows) * _layer_cache_bytes(shape, dtype)


def cache_bytes(config: "PreTrainedConfig", dtype: torch.dtype, context_length: int, *, batch_size: int = 1) -> int:
    """Keys and values of `context_length` tokens; a sliding layer stops at its window."""
    shape = DecoderShape.from_config(config)
    held = sum(min(window or context_length, context_length) for window in shape.windows)
    return batch_size * held * _layer_cache_bytes(shape, dtype)


def cache_crossover(config: "PreTrainedConfig", dtype: torch.dtype, weight_bytes: int) -> int | None:
    """The shortest context whose cache is no smaller than the weights; None if full windows stop it before."""
    shape = DecoderShape.from_config(config)
    windows = [window for window in shape.windows if window is not None]
    growing = len(shape.windows) - len(windows)
    upper = max(windows, default=1)
    if growing:
        upper += math.ceil(weight_bytes / (growing * _layer_cache_bytes(shape, dtype)))
    if cache_bytes(config, dtype, upper) < weight_bytes:
        return None
    lower = 1
    while lower < upper:
        middle = (lower + upper) // 2
        if cache_bytes(config, dtype, middle) >= weight_bytes:
            upper = middle
        else:
            lower = middle + 1
    return lower


def _layer_cache_bytes(shape: DecoderShape, dtype: torch.dtype) -> int:
    return 2 * shape.num_key_value_heads * shape.head_dim * dtype.itemsize


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by part. Activations are not in it: they depend on kernels and checkpointing, and are to be measured."""

    weights: int
    gradients: int = 0
    optimizer_state: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.gradients + self.optimizer_state + self.cache


def inference_memory_bytes(
    model: "PreTrainedModel", dtype: torch.dtype, *, context_length: int, batch_size: int = 1
) -> MemoryUse:
    """Weights, and a cache full to `context_length`, both in `dtype`. `model` may be on the meta device."""
    cache = cache_bytes(model.config, dtype, context_length, batch_size=batch_size)
    return MemoryUse(weights=num_parameters(model) * dtype.itemsize, cache=cache)


def training_memory_bytes(
    model: "PreTrainedModel", dtype: torch.dtype, *, optimizer: Literal["adamw", "muon"] = "adamw"
) -> MemoryUse:
    """Weights, gradients and optimizer state, all in the weights' own `dtype` (float32 under autocast).

    AdamW keeps two numbers per parameter. Muon keeps one for the matrices of the layers, AdamW's two for the rest.
    """
    total = num_parameters(model)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    outside = tables | ({id(head.weight)} if head is not None else set())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in outside)
    numbers = 2 * total - (matrices if optimizer == "muon" else 0)
    size = dtype.itemsize
    return MemoryUse(weights=total * size, gradients=total * size, optimizer_state=numbers * size)


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}: give at least 1")
