"""ONNX: a checkpoint folder becomes a graph that onnxruntime, optimum and transformers.js decode with.

One graph reads a prompt, a part of one, or a single token, after a cache of any length, 0 included:

    input_ids (B, T) · attention_mask (B, P + T) · position_ids (B, T) · past_key_values.{i}.key / .value (B, K, P, D)
    -> logits (B, T, V) · present.{i}.key / .value (B, K, P + T, D)

Shapes: B batch, T new tokens, P cached positions, K key/value heads, D head_dim, V vocab_size, i the layer.
"""

import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

import tercet.modeling  # noqa: F401 - registers Tercet's classes with the Auto classes
from tercet.interop.exported import as_export_error, export_step
from tercet.interop.onnx_graph import name_sizes, remove_traces, share_tied_weights
from tercet.training.atomic import make_readable
from tercet.training.counts import counted
from tercet.training.errors import UserError

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

MODEL_NAME = "model.onnx"
_TEMPORARY_PREFIX = ".writing-"

# A protobuf file, which is what .onnx is, ends at 2 GiB. The graph itself is small; weights beyond this go beside it.
_MAX_INLINE_BYTES = 1_500_000_000

# What travels along: settings, tokenizer, and the code that the config of a Tercet checkpoint names.
_COPIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "*_tercet.py",
)  # fmt: skip


def write_onnx(checkpoint: Path, output_dir: Path) -> Path:
    """Write `model.onnx`, in float32, with the tokenizer and settings of the checkpoint beside it.

    Weights of more than 1.5 GB are in `model.onnx.data`, which belongs to the graph and has to stay beside it.

    Args:
        checkpoint: A folder that `AutoModelForCausalLM` loads: Tercet, or a decoder-only model of transformers.
        output_dir: Must not be there, or be empty. It appears whole or not at all.

    Returns:
        The path of the graph.

    Raises:
        UserError: The packages are not installed, the checkpoint does not load or cannot be exported, the folder
            holds something.
    """
    checkpoint, output_dir = Path(checkpoint), Path(output_dir)
    _check_packages()
    _check_destination(output_dir)
    model = _load(checkpoint)
    # The masks of "eager" are finite: a padding position, which sees nothing, gets numbers and not NaN, and NaN would
    # spread through its keys and values to all others.
    model.set_attn_implementation("eager")
    program = _convert(model)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=_TEMPORARY_PREFIX) as temporary:
        folder = Path(temporary, "onnx")
        folder.mkdir()
        for pattern in _COPIED:
            for path in sorted(checkpoint.glob(pattern)):
                shutil.copyfile(path, folder / path.name)
        program.save(folder / MODEL_NAME, external_data=_num_weight_bytes(program) > _MAX_INLINE_BYTES)
        make_readable(folder)
        os.replace(folder, output_dir)
    return output_dir / MODEL_NAME


def _check_packages() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"ONNX needs {' and '.join(missing)}: pip install 'tercet[interop]'")


def _check_destination(output_dir: Path) -> None:
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"{output_dir} is a file: choose another output folder")
    held = sorted(path.name for path in output_dir.iterdir()) if output_dir.is_dir() else []
    if held:
        raise UserError(f"{output_dir} is not empty ({', '.join(held[:3])}): choose another output folder")


def _load(checkpoint: Path) -> PreTrainedModel:
    if not (checkpoint / "config.json").is_file():
        raise UserError(f"{checkpoint} holds no checkpoint (no config.json): give a folder that from_pretrained loads")
    try:
        # float32 is what onnxruntime computes in on a CPU; half-precision kernels are few there.
        model, loading = cast(Any, AutoModelForCausalLM).from_pretrained(
            checkpoint, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{checkpoint} does not load: {reason}") from error
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"{checkpoint} lacks {counted(len(missing), 'weight')}, such as {missing[0]}: it is not a whole checkpoint"
        )
    return model.eval()


def _convert(model: PreTrainedModel) -> "ONNXProgram":
    exported = export_step(model)
    num_layers = (len(exported.graph_signature.user_inputs) - 3) // 2
    parts = [(i, part) for i in range(num_layers) for part in ("key", "value")]
    with as_export_error(model), _quiet_torch_onnx():
        program = torch.onnx.export(
            exported,
            input_names=[
                "input_ids", "attention_mask", "position_ids", *(f"past_key_values.{i}.{part}" for i, part in parts),
            ],
            output_names=["logits", *(f"present.{i}.{part}" for i, part in parts)],
            verbose=False,
        )  # fmt: skip
    assert program is not None
    name_sizes(program.model)
    share_tied_weights(program.model)
    remove_traces(program.model)
    return program


def _num_weight_bytes(program: "ONNXProgram") -> int:
    weights = (value.const_value for value in program.model.graph.initializers.values())
    return sum(weight.nbytes for weight in weights if weight is not None)


@contextmanager
def _quiet_torch_onnx() -> Iterator[None]:
    """Without torch's warnings that torchvision, which no language model needs, is not installed."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
