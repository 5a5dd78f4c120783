"""`tercet info`: what a checkpoint is made of and what it costs, from its config alone; no weight is read.

torch and transformers are imported inside the functions: `tercet --help` must answer without them.
"""

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercet.training.errors import UserError
from tercet.units import binary_bytes, decimal_count

if TYPE_CHECKING:
    import torch
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text
    from transformers import PreTrainedModel


def describe(checkpoint: Path, *, width: int = 110) -> str:
    """The tables of `render` as plain text, `width` characters wide.

    Raises:
        UserError: One line that names the folder and the remedy, if it holds no causal language model.
    """
    from rich.console import Console

    output = io.StringIO()
    Console(file=output, width=width, color_system=None).print(render(checkpoint))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def render(checkpoint: Path) -> "Group":
    """Weights, hyperparameters, memory and FLOPs of a checkpoint folder, for `rich.console.Console.print`.

    Raises:
        UserError: One line that names the folder and the remedy, if it holds no causal language model.
    """
    from rich.console import Group
    from rich.text import Text

    from tercet.training.accounting import DecoderShape, num_non_embedding_parameters, num_parameters

    model = load_meta_model(checkpoint)
    config = model.config
    total, inner = num_parameters(model), num_non_embedding_parameters(model)
    head = Text.assemble(
        (f"{type(model).__name__}", "bold"),
        f" ({config.model_type}) in {checkpoint}\n",
        f"{total:,} parameters, {inner:,} of them outside the embeddings",
        _origin(Path(checkpoint) / "recipe.yaml"),
    )
    parts: list[Any] = [head, *_weights(model), *_hyperparameters(config)]
    try:
        DecoderShape.from_config(config)
    except ValueError as error:
        parts += ["", Text(f"Memory and FLOPs are not shown: {error}.")]
    else:
        parts += [*_memory(model), *_cache(model), *_flops(config)]
    return Group(*parts)


def _origin(recipe: Path) -> str:
    """What the run began with, where its recipe says so."""
    import yaml

    from tercet.training.from_checkpoint import FROM_CHECKPOINT, WEIGHTS_HASH

    try:
        model = yaml.safe_load(recipe.read_text("utf-8"))["model"]
        return f"\ntrained from {model[FROM_CHECKPOINT]}, whose weights have SHA-256 {model[WEIGHTS_HASH]}"
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return ""


def load_meta_model(checkpoint: Path) -> "PreTrainedModel":
    """Build the checkpoint's model on the meta device, through the Auto classes: shapes, and no memory.

    Raises:
        UserError: If the folder, its config or its family is not one that loads.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tercet.loading import check_is_causal_lm

    path = Path(checkpoint)
    check_is_causal_lm(path)
    try:
        # No code of the folder is run: Tercet's own classes are registered above, natives need none.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, OSError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path / 'config.json'} does not describe a causal language model: {reason}") from None


def _title(text: str) -> "Text":
    """A heading of its own: a rich table would wrap its title to the table's width."""
    from rich.text import Text

    return Text(f"\n{text}", style="bold")


def _table(*columns: str, right: int = 0) -> "Table":
    """A table whose last `right` columns hold numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index >= len(columns) - right else "left", overflow="fold")
    return table


def _weights(model: "PreTrainedModel") -> "tuple[RenderableType, ...]":
    from tercet.training.accounting import num_parameters, parameter_table

    table = _table("part", "shape", "copies", "parameters", "share", right=3)
    for row in parameter_table(model):
        shape = " + ".join(" × ".join(map(str, shape)) for shape in row.shapes)  # noqa: RUF001
        if row.tied_to:
            table.add_row(row.name, shape, "", f"tied to {row.tied_to}", "")
        else:
            table.add_row(row.name, shape, str(row.num_copies), f"{row.num_parameters:,}", f"{row.share:.1%}")
    table.add_section()
    table.add_row("all", "", "", f"{num_parameters(model):,}", "100.0%")
    return _title("Weights: what training changes"), table


def _hyperparameters(config: Any) -> "tuple[RenderableType, ...]":
    from tercet.training.hyperparameters import hyperparameter_table

    table = _table("name", "value", "what it shapes")
    for row in hyperparameter_table(config):
        table.add_row(row.name, _short(row.value), row.shapes)
    return _title("Hyperparameters: what you choose before training"), table


def _memory(model: "PreTrainedModel") -> "tuple[RenderableType, ...]":
    from tercet.training.accounting import inference_memory_bytes, training_memory_bytes

    context, dtype = model.config.max_position_embeddings, _dtype(model.config)
    use = inference_memory_bytes(model, dtype, context_length=context)
    adamw = training_memory_bytes(model, dtype)
    muon = training_memory_bytes(model, dtype, optimizer="muon")
    table = _table("part", "bytes", "", right=2)
    for name, size in (
        ("weights", use.weights),
        (f"cache of one sequence of {context:,} tokens", use.cache),
        ("gradients, in training", adamw.gradients),
        ("optimizer state, AdamW", adamw.optimizer_state),
        ("optimizer state, Muon on the layers' matrices", muon.optimizer_state),
    ):
        table.add_row(name, f"{size:,}", binary_bytes(size))
    return _title(f"Memory in {str(dtype).removeprefix('torch.')}, without activations"), table


def _cache(model: "PreTrainedModel") -> "tuple[RenderableType, ...]":
    from tercet.training.accounting import (
        DecoderShape,
        cache_bytes_per_token,
        cache_crossover,
        num_parameters,
    )

    config, dtype = model.config, _dtype(model.config)
    shape = DecoderShape.from_config(config)
    windows = shape.windows
    # A layer's bytes of one token, as the model computes them and as each kind of --cache holds them.
    per_layer = {str(dtype).removeprefix("torch."): cache_bytes_per_token(config, dtype) // len(windows)}
    if config.model_type == "tercet":
        per_layer |= _quantized_bytes_per_token(shape.num_key_value_heads, shape.head_dim)
    names = [f"bytes per token, {name}" for name in per_layer]
    table = _table("layers", "count", *names, right=1 + len(names))
    for window in dict.fromkeys(windows):
        count = windows.count(window)
        kind = "full attention" if window is None else f"sliding attention, up to {window:,} tokens"
        table.add_row(kind, str(count), *(f"{count * size:,}" for size in per_layer.values()))
    table.add_section()
    table.add_row("all", str(len(windows)), *(f"{len(windows) * size:,}" for size in per_layer.values()))
    crossover = cache_crossover(config, dtype, num_parameters(model) * dtype.itemsize)
    if crossover is None:
        note = "The windows keep the cache smaller than the weights at any context."
    else:
        note = f"The cache is as large as the weights at a context of {crossover:,} tokens."
    return _title("Cache: keys and values of the tokens so far"), table, note


def _quantized_bytes_per_token(num_key_value_heads: int, head_dim: int) -> dict[str, int]:
    """Bytes of one token in one layer by the codecs' own account: a token of zeros is encoded."""
    import torch

    from tercet.modeling.cache_codecs_tercet import CODECS

    states = torch.zeros(2, num_key_value_heads, 1, head_dim)  # key and value
    return {name: sum(part.nbytes for part in codec.encode(states)) for name, codec in CODECS.items()}


def _flops(config: Any) -> "tuple[RenderableType, ...]":
    from tercet.training.accounting import decode_flops_per_token, flops_per_token

    context = config.max_position_embeddings
    table = _table("when", "FLOPs", "", right=2)
    for name, count in (
        (f"prefill, mean over {context:,} tokens", flops_per_token(config, context, training=False)),
        ("decode, first token", decode_flops_per_token(config, 1)),
        (f"decode, token {context:,}", decode_flops_per_token(config, context)),
        (f"training, mean over {context:,} tokens", flops_per_token(config, context, training=True)),
    ):
        table.add_row(name, f"{count:,}", decimal_count(count))
    return _title("FLOPs per token: matrix products, causal scores, the head"), table


def _dtype(config: Any) -> "torch.dtype":
    """The dtype the weights are saved in; float32 where the config names none, as transformers reads it."""
    import torch

    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."))
    return dtype or torch.float32


def _short(value: Any) -> str:
    """A value on one line: equal neighbours of a per-layer list are counted, not repeated."""
    if isinstance(value, list | tuple) and len(value) > 2:
        runs: list[list[Any]] = []
        for item in value:
            if runs and runs[-1][0] == item:
                runs[-1][1] += 1
            else:
                runs.append([item, 1])
        if len(runs) <= 6:
            return ", ".join(f"{count} × {item}" if count > 1 else str(item) for item, count in runs)  # noqa: RUF001
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)
