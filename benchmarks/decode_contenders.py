"""Who decodes in `decode.py`: the same weights as Tercet and as Llama, each with its caches, from the same prompt.

Shapes: B batch, S positions of the prompt, L layers, K key/value heads, D head_dim.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from tercet.interop import to_native
from tercet.modeling import TercetCache, TercetConfig, TercetForCausalLM


@dataclass(frozen=True)
class Shape:
    """A decoder that Llama can express, too: no QK-norm, a head of its own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


SHAPES = {
    "32M": Shape(8192, 512, 1408, 8, 8, 4, 64),
    "1.2B": Shape(65_536, 2048, 8192, 16, 32, 8, 64),
    "tiny": Shape(512, 64, 176, 2, 4, 2, 16),
}
CONTENDERS = {
    "dynamic": "Llama DynamicCache",
    "static": "Llama StaticCache",
    "static-compiled": "Llama StaticCache compiled",
    "no-cache": "Llama no cache",
    "tercet": "Tercet",
    "tercet-compiled": "Tercet compiled",
}
REFERENCE = CONTENDERS["dynamic"]


def make_models(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[TercetForCausalLM, PreTrainedModel]:
    """A Tercet decoder with random weights, and a `LlamaForCausalLM` that holds the same ones."""
    torch.manual_seed(0)
    config = TercetConfig(
        **asdict(shape), qk_norm=False, tie_word_embeddings=False, max_position_embeddings=8192, eos_token_id=None
    )
    ours = TercetForCausalLM(config).eval()
    nn.Module.to(ours, device=device, dtype=dtype)
    return ours, to_native(ours, "llama").eval()


def same_weights(model: TercetForCausalLM) -> TercetForCausalLM:
    """A second model that shares no module with the first: one of them is going to be compiled."""
    twin = TercetForCausalLM(model.config).eval()
    nn.Module.to(twin, device=model.device, dtype=model.dtype)
    twin.load_state_dict(model.state_dict())
    return twin


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one decode step reads: all but the input embedding, of which it reads a row."""
    table = model.get_input_embeddings().weight
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight is not table)


class Prompt:
    """Token ids, and the keys and values of all but the last of them, from which a cache of any kind is filled."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.ids = ids  # (rows, S + 1)
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).cache
        self._states = [(layer.keys, layer.values) for layer in cache.layers]  # (rows, K, S, D) twice

    @property
    def length(self) -> int:
        """Positions S in the cache before the first timed step."""
        return self.ids.shape[1] - 1

    def rows(self, batch_size: int) -> torch.Tensor:
        """Which row stands where in a batch, (B,): few are computed, and repeated."""
        return torch.arange(batch_size, device=self.ids.device) % self.ids.shape[0]

    def batch(self, batch_size: int) -> torch.Tensor:
        """Token ids (B, S + 1): the whole prompt and the one token that is not in the cache yet."""
        return self.ids[self.rows(batch_size)]

    def fill(self, cache: Cache, batch_size: int) -> Any:
        """Give a new cache the prompt's positions in one update a layer, as a prefill does."""
        with torch.no_grad():
            for layer_idx, (keys, values) in enumerate(self._states):
                rows = self.rows(batch_size)
                cache.update(keys[rows], values[rows], layer_idx)
        return cache


NewCache = Callable[[Prompt, int, int], Cache | None]


@dataclass(frozen=True)
class Contender:
    """A model, the cache it starts a run with, and how `generate` is called.

    Attributes:
        new_cache: (prompt, batch size, positions needed in all) -> a filled cache, or None to go without.
        max_tokens: Takes no more than this in a run, being slow.
    """

    name: str
    model: PreTrainedModel
    new_cache: NewCache
    arguments: dict[str, Any] = field(default_factory=dict)
    is_compiled: bool = False
    max_tokens: int | None = None


def make_contender(key: str, ours: TercetForCausalLM, llama: PreTrainedModel) -> Contender:
    """One of `CONTENDERS`; a compiled one is compiled by its first run."""
    name, config = CONTENDERS[key], llama.config

    def dynamic(prompt: Prompt, batch_size: int, capacity: int) -> Cache:
        return prompt.fill(DynamicCache(config=config), batch_size)

    def static(prompt: Prompt, batch_size: int, capacity: int) -> Cache:
        return prompt.fill(StaticCache(config=config, max_cache_len=capacity), batch_size)

    if key == "dynamic":
        return Contender(name, llama, dynamic)
    if key == "static":
        # On an accelerator `generate` would compile without being asked.
        return Contender(name, llama, static, {"disable_compile": True})
    if key == "static-compiled":
        compile_config = CompileConfig()
        compile_config._compile_all_devices = True  # pyright: ignore - transformers' own switch for the CPU
        return Contender(name, llama, static, {"compile_config": compile_config}, is_compiled=True)
    if key == "no-cache":
        return Contender(name, llama, lambda *_: None, {"use_cache": False}, max_tokens=4)
    if key == "tercet":
        return Contender(name, ours, tercet_cache(ours))
    assert key == "tercet-compiled"
    twin = same_weights(ours).compile_decode()
    return Contender(name, twin, tercet_cache(twin), is_compiled=True)


def tercet_cache(model: PreTrainedModel, **arguments: Any) -> NewCache:
    """Makes the model's own cache, plain or quantized."""
    return lambda prompt, batch_size, capacity: prompt.fill(TercetCache(model.config, **arguments), batch_size)


def forked_cache(model: PreTrainedModel) -> NewCache:
    """Makes a cache of one row and forks it into the batch."""
    return lambda prompt, batch_size, capacity: prompt.fill(TercetCache(model.config), 1).fork(batch_size)


def cache_bytes(cache: Cache | None) -> tuple[int, int]:
    """What a cache holds at the end of a run, and what it takes beside that for a moment of every step.

    `DynamicCache` concatenates: while a layer's new keys are written, its old ones are still there. A growing Tercet
    layer holds its old buffers beside the new ones only at the steps where it grows, none of which is in a run.
    """
    if cache is None:
        return 0, 0
    if isinstance(cache, TercetCache):
        return cache.nbytes, 0
    layers: list[Any] = list(cache.layers)
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return sum(sizes), max(sizes) if isinstance(cache, DynamicCache) else 0
