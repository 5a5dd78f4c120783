"""Caches as files: a prompt that was computed once is read back instead.

A file is safetensors: the parts of each layer, the token ids if they were given, and in the metadata, under
"tercet_cache" as JSON and the checksum of that, what tells whether the file is whole and belongs to a model.
"""

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.configuration_utils import PreTrainedConfig

_VERSION = 1
_METADATA_KEY = "tercet_cache"
_PROMPT_NAME = "input_ids"
_NUM_SAMPLES = 64
# What cached keys and values depend on beside the weights.
_ARCHITECTURE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "mlp_type", "mlp_bias", "norm_type", "norm_eps",
    "position_embedding_type", "rope_parameters", "no_rope_layers", "qk_norm", "attention_bias",
    "attention_output_bias", "layer_types", "sliding_window",
)  # fmt: skip


def architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """What a cache must have in common with a model, in JSON's own types."""
    decoder = config.get_text_config(decoder=True)
    fields = {name: getattr(decoder, name, None) for name in _ARCHITECTURE_FIELDS}
    return json.loads(json.dumps(fields, default=str))


def describe_difference(of_cache: dict[str, Any], of_model: dict[str, Any]) -> str | None:
    """The fields in which two architectures differ, or None."""
    differing = [name for name in of_model if of_cache.get(name) != of_model[name]]
    named = [f"{name} ({of_cache.get(name)} in the cache, {of_model[name]} in the model)" for name in differing]
    return ", ".join(named) or None


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 of every parameter's name, dtype, shape and up to 64 evenly strided values: milliseconds, not a proof.

    Training changes it, as it changes almost every number; an edit of single numbers may not.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)};".encode())
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _NUM_SAMPLES)][:_NUM_SAMPLES]
        digest.update(_to_bytes(sample))
    return digest.hexdigest()


def count_common_tokens(first: torch.Tensor, second: torch.Tensor) -> int:
    """Length of the longest prefix that two prompts (B, T) have in common in all of their rows."""
    length = min(first.shape[-1], second.shape[-1])
    differs = (first[:, :length].cpu() != second[:, :length].cpu()).any(dim=0)
    return int(differs.nonzero()[0]) if differs.any() else length


def save_cache(
    path: str | os.PathLike,
    cache: Any,
    input_ids: torch.Tensor | None = None,
    model: torch.nn.Module | None = None,
) -> None:
    """Write the file whole or not at all; see `TercetCache.save`."""
    if cache.architecture is None:
        raise ValueError("this cache was not made from a config, and a file must name the architecture it belongs to.")
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        layers.append({"length": layer.get_seq_length()})
        if layer.get_seq_length() > 0:
            layers[-1] |= {"dtype": str(layer.dtype).removeprefix("torch."), "head_dim": layer.keys.shape[-1]}
            parts = zip(layer.part_names, layer.parts, strict=True)
            tensors |= {f"layers.{index}.{name}": part.detach().cpu().contiguous() for name, part in parts}
    if input_ids is not None:
        if input_ids.ndim != 2 or input_ids.shape[-1] < cache.length:
            raise ValueError(
                f"input_ids is {tuple(input_ids.shape)} and the cache holds {cache.length} positions: give the ids of "
                "all of them, (batch, positions)."
            )
        tensors[_PROMPT_NAME] = input_ids[:, : cache.length].detach().cpu().contiguous()
    state = {
        "version": _VERSION,
        "architecture": cache.architecture,
        "quantization": cache.quantization,
        "layers": layers,
        "fingerprint": None if model is None else fingerprint(model),
        "checksums": {name: zlib.crc32(_to_bytes(tensor)) for name, tensor in tensors.items()},
    }
    text = json.dumps(state)
    _write_atomically(Path(path), tensors, {_METADATA_KEY: f"{text} {zlib.crc32(text.encode())}"})


def _write_atomically(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":
        # The rename itself must reach the disk, too.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@dataclass(frozen=True)
class CacheFile:
    """What a cache file holds, known to be whole."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def parts(self, layer_idx: int, part_names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """The parts of one layer, in order."""
        return tuple(self.tensors[f"layers.{layer_idx}.{name}"] for name in part_names)

    def check_architecture(self, config: PreTrainedConfig) -> None:
        """Raise a ValueError that names the fields in which file and config differ."""
        difference = describe_difference(self.state["architecture"], architecture(config))
        if difference is not None:
            raise ValueError(
                f"{self.path} is the cache of another model: {difference} differ. Load it with the model that made it, "
                "or make it again with this one."
            )

    def check_fingerprint(self, model: torch.nn.Module) -> None:
        """Raise a ValueError if other weights made the cache, or if the file does not know."""
        saved = self.state["fingerprint"]
        if saved is None:
            raise ValueError(
                f"{self.path} was saved without a fingerprint of the weights: save it with `model`, or load it without."
            )
        if saved != fingerprint(model):
            raise ValueError(
                f"{self.path} was made by other weights (or the same in another dtype): make it again with this model."
            )

    def check_prompt(self, input_ids: torch.Tensor) -> None:
        """Raise a ValueError if the saved prompt is not the beginning of `input_ids`, (B, T)."""
        saved = self.tensors.get(_PROMPT_NAME)
        if saved is None:
            raise ValueError(f"{self.path} was saved without its prompt: save it with `input_ids`, or load it without.")
        if input_ids.ndim != 2 or len(input_ids) != len(saved):
            raise ValueError(
                f"{self.path} holds a prompt of shape {tuple(saved.shape)} and input_ids is {tuple(input_ids.shape)}: "
                "both must have the same number of rows."
            )
        num_common = count_common_tokens(saved, input_ids)
        if num_common == saved.shape[-1]:
            return
        there, here = saved[:, num_common].tolist(), input_ids[:, num_common : num_common + 1].flatten().tolist()
        raise ValueError(
            f"{self.path} holds a prompt of {saved.shape[-1]} tokens that input_ids does not begin with: at token "
            f"{num_common} the file has {there} and input_ids {here or 'ends'}. Load it without `input_ids` and crop "
            f"the cache to the {num_common} tokens in common, or make it again."
        )


def read_cache_file(path: str | os.PathLike, names: Sequence[str] | None = None) -> CacheFile:
    """Read a file onto the CPU and check that it is whole.

    Args:
        path: The file.
        names: Read these tensors only, as far as they are there.

    Raises:
        ValueError: Torn, damaged, of a later version, or no cache file.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            state = _read_state(path, file.metadata() or {})
            held = set(file.keys())
            wanted = held if names is None else held.intersection(names)
            tensors = {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as error:
        raise ValueError(f"{path} is torn, or no cache file ({error}): make it again.") from error
    checksums = state["checksums"]
    if held != checksums.keys() or any(checksums[name] != zlib.crc32(_to_bytes(tensors[name])) for name in tensors):
        raise ValueError(f"{path} is damaged: its content does not match its checksums. Make it again.")
    return CacheFile(path, state, tensors)


def _read_state(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    if _METADATA_KEY not in metadata:
        raise ValueError(f"{path} is no cache file: it is safetensors of something else.")
    text, _, checksum = metadata[_METADATA_KEY].rpartition(" ")
    if checksum != str(zlib.crc32(text.encode())):
        raise ValueError(f"{path} is damaged: its description does not match its checksum. Make it again.")
    state = json.loads(text)
    if state["version"] != _VERSION:
        raise ValueError(f"{path} has format version {state['version']} and this code reads {_VERSION}: make it again.")
    return state


def read_prompt_ids(path: str | os.PathLike) -> torch.Tensor | None:
    """Token ids of the positions that a cache file holds, (B, length), or None if it was saved without.

    Raises:
        ValueError: As `read_cache_file`.
    """
    return read_cache_file(path, [_PROMPT_NAME]).tensors.get(_PROMPT_NAME)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


__all__ = ["CacheFile", "architecture", "count_common_tokens", "fingerprint", "read_cache_file", "read_prompt_ids"]
