"""The config of a GGUF file: transformers' reader leaves out keys that decide what the model computes."""

from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, PreTrainedConfig

_ROPE_TYPES = ("linear", "yarn")
_ROPE_DIVISORS = "rope_freqs.weight"


def read_config(path: Path) -> PreTrainedConfig:
    """The config that transformers reads, with the size of heads and the RoPE scaling that the file names.

    Raises:
        ValueError: The file asks for what the config cannot say.
    """
    from gguf import GGUFReader

    config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    reader = GGUFReader(path)
    architecture = cast(Any, reader.fields["general.architecture"]).contents()

    def value(key: str) -> Any:
        field = reader.fields.get(f"{architecture}.{key}")
        return None if field is None else field.contents()

    if config.model_type == "gpt2":
        config.n_positions = value("context_length") or config.n_positions
        return config
    _set_head_dim(config, value("attention.key_length"), value("attention.value_length"))
    kind = value("rope.scaling.type")
    if any(tensor.name == _ROPE_DIVISORS for tensor in reader.tensors):
        # They were computed from settings that cannot be had back from them.
        raise ValueError(
            f"{_ROPE_DIVISORS}, the scaled frequencies of Llama 3's RoPE, cannot be read from a GGUF file: import the "
            "folder that the file was made from"
        )
    if kind is not None and kind != "none":
        if kind not in _ROPE_TYPES:
            raise ValueError(f"rope.scaling.type is {kind!r}, and of a GGUF file {' and '.join(_ROPE_TYPES)} are read")
        config.rope_parameters |= {"rope_type": kind, "factor": value("rope.scaling.factor")}
        if kind == "yarn":
            length = value("rope.scaling.original_context_length")
            config.rope_parameters["original_max_position_embeddings"] = length or config.max_position_embeddings
    return config


def _set_head_dim(config: Any, key_length: int | None, value_length: int | None) -> None:
    # What llama.cpp takes where the file is silent; Qwen3's class would take 128.
    usual = config.hidden_size // config.num_attention_heads
    head_dim = key_length or usual
    if (value_length or usual) != head_dim:
        raise ValueError(f"attention.value_length is {value_length or usual} and attention.key_length is {head_dim}")
    # Some classes have no such field and follow it all the same; it is not written where it says nothing.
    if getattr(config, "head_dim", None) is not None or head_dim != usual:
        config.head_dim = head_dim
