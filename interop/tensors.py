"""The table of tensor names of a native family beside ours, and state dicts turned by it, strictly.

The rotary families use our names, which are Llama's. GPT-2 stores its matrices the other way round (`Conv1D`), and
query, key and value as one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from tercet.interop.configs import Family
from tercet.modeling import TercetConfig

_LISTED = 12


@dataclass(frozen=True)
class TensorRow:
    """One native tensor and what it is here.

    Attributes:
        native: Its name in the family.
        ours: Our names; several where the native tensor holds them one after another, in this order.
        is_transposed: The native matrix is (in, out) where ours is (out, in).
    """

    native: str
    ours: tuple[str, ...]
    is_transposed: bool = False


def tensor_table(config: TercetConfig, family: Family, *, has_tied_head: bool) -> list[TensorRow]:
    """Every tensor of a model, by its native name and ours."""
    rows = _gpt2_rows(config) if family.name == "gpt2" else _rotary_rows(config)
    if not has_tied_head:
        rows.append(TensorRow("lm_head.weight", ("lm_head.weight",)))
    return rows


def _rotary_rows(config: TercetConfig) -> list[TensorRow]:
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    parts += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    if config.attention_bias:
        parts += [f"self_attn.{name}_proj.bias" for name in "qkv"]
    if config.attention_output_bias:
        parts.append("self_attn.o_proj.bias")
    if config.mlp_bias:
        parts += [f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")]
    if config.qk_norm:
        parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    names = [f"model.layers.{layer_idx}.{part}" for layer_idx in range(config.num_hidden_layers) for part in parts]
    return [TensorRow(name, (name,)) for name in ("model.embed_tokens.weight", "model.norm.weight", *names)]


def _gpt2_rows(config: TercetConfig) -> list[TensorRow]:
    rows = [
        TensorRow("transformer.wte.weight", ("model.embed_tokens.weight",)),
        TensorRow("transformer.wpe.weight", ("model.embed_positions.weight",)),
    ]
    modules = {
        "ln_1": ("input_layernorm",),
        "ln_2": ("post_attention_layernorm",),
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.c_proj": ("self_attn.o_proj",),
        "mlp.c_fc": ("mlp.up_proj",),
        "mlp.c_proj": ("mlp.down_proj",),
    }
    for layer_idx in range(config.num_hidden_layers):
        for theirs, ours in modules.items():
            native, names = f"transformer.h.{layer_idx}.{theirs}", [f"model.layers.{layer_idx}.{name}" for name in ours]
            is_matrix = not theirs.startswith("ln_")
            rows.append(TensorRow(f"{native}.weight", tuple(f"{name}.weight" for name in names), is_matrix))
            rows.append(TensorRow(f"{native}.bias", tuple(f"{name}.bias" for name in names)))
    for kind in ("weight", "bias"):
        rows.append(TensorRow(f"transformer.ln_f.{kind}", (f"model.norm.{kind}",)))
    return rows


def ours_from_native(
    tensors: Mapping[str, torch.Tensor], rows: Iterable[TensorRow], shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Native tensors under our names and in our layout; views where that is possible.

    Args:
        shapes: What our model wants, by our names.

    Raises:
        ValueError: Tensors are missing, left over or of another shape; lists them by their native names.
    """
    rows = list(rows)
    assert {name for row in rows for name in row.ours} == set(shapes), "the table does not cover our model"
    expected = {}
    for row in rows:
        first, *rest = shapes[row.ours[0]]
        joined = (first * len(row.ours), *rest)
        expected[row.native] = joined[::-1] if row.is_transposed else joined
    _check(tensors, expected)
    converted = {}
    for row in rows:
        tensor = tensors[row.native].t() if row.is_transposed else tensors[row.native]
        converted.update(zip(row.ours, tensor.chunk(len(row.ours), dim=0), strict=True))
    return converted


def native_from_ours(
    tensors: Mapping[str, torch.Tensor], rows: Iterable[TensorRow], shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Our tensors under native names and in the native layout; the opposite of `ours_from_native`.

    Args:
        shapes: What the native model wants, by native names.

    Raises:
        ValueError: Tensors are missing, left over or of another shape; lists them by our names.
    """
    rows = list(rows)
    assert {row.native for row in rows} == set(shapes), "the table does not cover the native model"
    expected = {}
    for row in rows:
        first, *rest = reversed(shapes[row.native]) if row.is_transposed else shapes[row.native]
        expected.update(dict.fromkeys(row.ours, (first // len(row.ours), *rest)))
    _check(tensors, expected)
    converted = {}
    for row in rows:
        parts = [tensors[name] for name in row.ours]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=0)
        converted[row.native] = tensor.t() if row.is_transposed else tensor
    return converted


def _check(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    check_tensor_names(
        missing=expected.keys() - tensors.keys(),
        left_over=tensors.keys() - expected.keys(),
        wrong_shape=[
            (name, tuple(tensors[name].shape), shape)
            for name, shape in expected.items()
            if name in tensors and tuple(tensors[name].shape) != tuple(shape)
        ],
    )


def check_tensor_names(
    missing: Iterable[str], left_over: Iterable[str], wrong_shape: Iterable[tuple[str, tuple, tuple]]
) -> None:
    """Refuse a set of tensors that is not exactly the one that its config describes.

    Args:
        wrong_shape: Name, the shape found, the shape that the config asks for.

    Raises:
        ValueError: Lists them all in one line.
    """
    kinds = {
        "missing": sorted(missing),
        "left over": sorted(left_over),
        "of another shape": [
            f"{name} {list(found)} instead of {list(wanted)}" for name, found, wanted in sorted(wrong_shape)
        ],
    }
    parts = []
    for kind, names in kinds.items():
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            parts.append(f"{len(names)} {kind}: {', '.join(names[:_LISTED])}{more}")
    if parts:
        raise ValueError(f"tensors do not fit the config ({'; '.join(parts)}).")
