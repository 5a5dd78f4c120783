"""What a pass costs: FLOPs as torch counts them, bytes of weights that it reads, bytes of the cache.

Shapes: B batch, H query heads, T queries, D head_dim, E and F widths of a matrix.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedModel

from tercet.explorer.anatomy import Anatomy, is_position_table


def _grouped_mm_flop(left: tuple[int, ...], right: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """Rows (T, E), each times one of the matrices (experts, E, F)."""
    return 2 * left[0] * left[1] * right[-1]


def _attention_flop(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


# Kernels that torch 2.13's counter passes over: attention on a CPU, and experts.
_FURTHER_FORMULAS: dict[Any, Callable] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
    torch.ops.aten._grouped_mm: _grouped_mm_flop,
}


@contextmanager
def counted_flops() -> Iterator[FlopCounterMode]:
    """Counts the FLOPs of all matrix products inside; `get_total_flops()` of the result tells them."""
    with FlopCounterMode(display=False, custom_mapping=_FURTHER_FORMULAS) as counter:
        yield counter


class WeightBytes(NamedTuple):
    """Bytes of a model's weights, as a pass reads them: `matrices` whole, of the tables a row for each token."""

    matrices: int
    rows: int

    def of_pass(self, num_queries: int) -> int:
        """Bytes that a pass over so many tokens must read once."""
        return self.matrices + num_queries * self.rows


def weight_bytes(model: PreTrainedModel, anatomy: Anatomy) -> WeightBytes:
    """Of all weights, tied ones once; a token table that is the head, too, is read whole as the head."""
    head = getattr(anatomy.head, "weight", None)
    tables = {}
    for name, module in model.named_modules():
        if module is anatomy.embedding or is_position_table(module, name):
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            tables[id(weight)] = weight
    rows = sum(table[0].nbytes for table in tables.values())
    matrices = sum(weight.nbytes for weight in model.parameters() if weight is head or id(weight) not in tables)
    return WeightBytes(matrices, rows)


class LayerBytes(NamedTuple):
    """Bytes of one layer's keys and values.

    Attributes:
        held: Those of the positions that the layer holds.
        allocated: The memory that they lie in.
        visible: Those of the past that one more query would read.
        column: Those of one position; 0 in a layer whose state has none.
    """

    held: int
    allocated: int
    visible: int
    column: int


def cache_layers(cache: Any) -> list[LayerBytes]:
    """Of each layer of a cache; nothing where there is none, or of a kind that is not known."""
    return [_layer_bytes(layer) for layer in getattr(cache, "layers", None) or []]


def _layer_bytes(layer: Any) -> LayerBytes:
    tensors = _tensors_of(layer)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    # What a layer says of itself; else the memory behind its tensors, which may be views of more.
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    allocated = getattr(layer, "nbytes", None)
    allocated = sum(storages.values()) if allocated is None else allocated
    positions = tensors[0].shape[-2] if tensors and tensors[0].ndim == 4 else 0
    is_attention = positions > 0 and hasattr(layer, "get_mask_sizes")
    visible = held * (layer.get_mask_sizes(1)[0] - 1) // positions if is_attention else held
    return LayerBytes(held, allocated, min(visible, held), held // positions if positions else 0)


def _tensors_of(layer: Any) -> list[torch.Tensor]:
    """What a layer holds: a Tercet layer's parts, keys and values, or the states of another kind of layer."""
    if hasattr(layer, "parts"):
        return list(layer.parts)
    if getattr(layer, "keys", None) is not None:
        return [layer.keys, layer.values]
    states = [getattr(layer, name, None) for name in ("conv_states", "recurrent_states")]
    flat = [part for state in states for part in (state.values() if isinstance(state, dict) else [state])]
    return [part for part in flat if isinstance(part, torch.Tensor)]


def has_experts(model: nn.Module) -> bool:
    """Whether some MLPs are several, of which each token takes a few.

    Told by modules called experts: a family with "Moe" in the names of its classes may have dense layers, too.
    """
    return any(
        name.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__
        for name, module in model.named_modules()
    )
