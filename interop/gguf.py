"""Writes a checkpoint as one GGUF file, which llama.cpp, Ollama and others run with no custom code."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tercet.interop.families import to_native
from tercet.interop.folders import load_model
from tercet.interop.gguf_architecture import GgufModel, describe_model
from tercet.interop.gguf_tokenizer import describe_tokenizer
from tercet.interop.tokenizer_files import load_tokenizer
from tercet.training.atomic import write_atomically
from tercet.training.errors import UserError, as_user_error

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

TYPES = ("f32", "f16", "q8_0")
"""How matrices are stored; norms and biases are float32 in every file."""

_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # llama.cpp's LLAMA_FTYPE
_QUANTIZATION_VERSION = 2
_BLOCK_SIZE = 32  # values that share a scale in q8_0
_LARGEST = {"F16": 65504.0, "Q8_0": 65504.0 * 127}  # a block's scale, its largest value / 127, is a float16


def write_gguf(checkpoint: Path, output: Path, type: str = "f16") -> Path:
    """Write a checkpoint folder, model and tokenizer, as a GGUF file.

    Args:
        checkpoint: A folder of Tercet's or of a native family.
        output: The file to write; it appears whole or not at all. Its folder is made.
        type: One of `TYPES`.

    Returns:
        `output`.

    Raises:
        UserError: The type is unknown, the folder does not load, or llama.cpp could not run the model as it is; one
            line that names the reason.
    """
    if type not in TYPES:
        raise UserError(f"GGUF: type {type!r} is not supported: choose one of {', '.join(TYPES)}")
    _check_installed()
    checkpoint, output = Path(checkpoint), Path(output)
    if output.is_dir():
        raise UserError(f"{output} is a folder: give the name of a file, such as {output / 'model.gguf'}")
    model, tokenizer = _load(checkpoint)
    description = describe_model(model)
    metadata: dict[str, Any] = {
        "general.type": "model",
        "general.name": checkpoint.resolve().name,
        "general.file_type": _FILE_TYPES[type],
        "general.quantization_version": _QUANTIZATION_VERSION,
        **description.metadata,
        **describe_tokenizer(tokenizer, model),
    }
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from error
    write_atomically(output, _content(description, metadata, type))
    return output


def _check_installed() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError("GGUF needs the package gguf: pip install 'tercet[interop]'") from error


def _load(checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A native model, in the dtype it was saved in, and its tokenizer."""
    model = load_model(checkpoint)
    if model.config.model_type == "tercet":
        with as_user_error(f"GGUF: {checkpoint}"):
            model = to_native(model)
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise UserError(f"GGUF: {checkpoint} has no tokenizer, and llama.cpp runs no model without one")
    return model, tokenizer


def _content(description: GgufModel, metadata: dict[str, Any], type: str) -> Callable[[BinaryIO], None]:
    """A function that writes the file; one tensor at a time is converted, so that no second copy of all is held."""
    from gguf import GGUFWriter
    from gguf.gguf_writer import WriterState

    writer = GGUFWriter(None, description.architecture)
    _add_metadata(writer, metadata)
    for name, tensor in description.tensors.items():
        storage = _storage(name, tensor, type)
        dtype = np.dtype(np.float32 if storage.name == "F32" else np.float16)
        writer.add_tensor_info(name, tensor.shape, dtype, _num_bytes(tensor, storage), raw_dtype=storage)

    def write(file: BinaryIO) -> None:
        # The writer opens files by name; this one is open already, and renamed when it is whole.
        writer.fout, writer.state = [cast(Any, file)], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in description.tensors.items():
            writer.write_tensor_data(_convert(name, tensor, _storage(name, tensor, type)))

    return write


def _add_metadata(writer: "GGUFWriter", metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _storage(name: str, tensor: torch.Tensor, type: str) -> "GGMLQuantizationType":
    """llama.cpp's own choice: vectors and positions in float32, rows that are no whole blocks in float16."""
    from gguf import GGMLQuantizationType

    if type == "f32" or tensor.ndim == 1 or name == "position_embd.weight":
        return GGMLQuantizationType.F32
    if type == "f16" or tensor.shape[-1] % _BLOCK_SIZE != 0:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType.Q8_0


def _num_bytes(tensor: torch.Tensor, storage: "GGMLQuantizationType") -> int:
    from gguf.constants import GGML_QUANT_SIZES

    block_size, block_bytes = GGML_QUANT_SIZES[storage]
    return tensor.numel() // block_size * block_bytes


def _convert(name: str, tensor: torch.Tensor, storage: "GGMLQuantizationType") -> np.ndarray:
    from gguf.quants import quantize

    values = tensor.detach().float().contiguous().numpy()
    largest = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(largest):
        raise UserError(f"GGUF: {name} holds values that are not finite")
    if largest > _LARGEST.get(storage.name, largest):
        raise UserError(f"GGUF: {name} holds {largest:.3g}, beyond {storage.name.lower()}: choose type f32")
    return quantize(values, storage)
