"""The cache of a whole model: one layer of keys and values for each decoder layer."""

import copy
import os
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig

from .cache_codecs_tercet import CODECS, TercetQuantizedLayer, TercetQuantizedSlidingLayer
from .cache_files_tercet import architecture, describe_difference, read_cache_file, save_cache
from .cache_fork_tercet import TercetForkedLayer, fork_layer
from .cache_layers_tercet import Segment, Slots, TercetCacheLayer
from .cache_sliding_tercet import TercetSlidingLayer


class TercetCache(DynamicCache):
    """The cache that a Tercet model makes for itself: growing layers, and bounded ones where attention slides.

    Args:
        config: The model's config; gives the number of layers, which of them slide, and the window.
        quantization: None keeps keys and values as they come; "int8" stores them in about a quarter of float32's
            bytes, "int4" in about a seventh.

    Example:

        >>> cache = TercetCache(model.config)
        >>> outputs = model(input_ids, cache=cache)          # prefill: all positions at once
        >>> outputs = model(next_token, cache=cache)         # decode: one query reads the keys and values of the past
        >>> cache.length, cache.capacity, cache.nbytes
        >>> answers = [cache.fork() for _ in range(3)]       # three continuations of one prompt in memory
    """

    # Slots: exporters flatten `vars()` into the description of a graph's inputs.
    __slots__ = ("_config", "architecture", "quantization")
    _config: PreTrainedConfig | None
    architecture: dict[str, Any] | None
    quantization: str | None
    layers: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> "TercetCache":  # noqa: D102
        cache = super().__new__(cls)
        cache._config, cache.architecture, cache.quantization = None, None, None
        return cache

    def __init__(self, config: PreTrainedConfig, quantization: str | None = None, **kwargs: Any) -> None:
        if not isinstance(config, PreTrainedConfig):
            # torch.nn.DataParallel gathers outputs by calling their type with (keys, values, ...) of every layer.
            super().__init__(config, **kwargs)
            return
        if quantization is not None and quantization not in CODECS:
            raise ValueError(f"quantization is {quantization!r}: choose one of {', '.join(CODECS)}, or None.")
        self._config, self.architecture, self.quantization = config, architecture(config), quantization
        decoder = config.get_text_config(decoder=True)
        layers: list[Any] = [
            _make_layer(decoder.sliding_window if layer_type == "sliding_attention" else None, quantization)
            for layer_type in decoder.layer_types
        ]
        # Not DynamicCache's own __init__, which would make its own layers: only its type is wanted, by which clients
        # recognise a cache that grows.
        Cache.__init__(self, layers=layers, **kwargs)

    def __copy__(self) -> "TercetCache":
        return self._with_layers([copy.copy(layer) for layer in self.layers])

    def _with_layers(self, layers: list[Any]) -> "TercetCache":
        clone = type(self).__new__(type(self))
        vars(clone).update(vars(self))
        clone._config, clone.architecture, clone.quantization = self._config, self.architecture, self.quantization
        clone.layers = layers
        return clone

    def __getstate__(self) -> dict[str, Any]:
        # Without the config, which a copy need not carry: the architecture says what it said.
        return {**vars(self), "_architecture": self.architecture, "_quantization": self.quantization}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.architecture, self.quantization = state.pop("_architecture"), state.pop("_quantization")
        vars(self).update(state)

    def append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> list[Segment]:
        """As `update`, for an attention that reads segments: a prompt that forks share is not copied for each row.

        Args:
            key_states: (B, K, T, D).
            value_states: (B, K, T, D).
            layer_idx: The decoder layer.

        Returns:
            All visible positions in order: one segment, or several where a prefix is shared.
        """
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if self.offloading or not isinstance(layer, TercetCacheLayer | TercetForkedLayer):
            return [Segment(*self.update(key_states, value_states, layer_idx, *args, **kwargs), 1)]
        return layer.append(key_states, value_states)

    def make_room(self, num_new: int) -> list[Slots] | None:
        """Count `num_new` more positions in every layer, for a step that writes them into the buffers itself.

        Returns:
            The buffers of each layer, or None, and nothing has changed, if one has none: see `can_make_room` there.
        """
        layers = self._own_layers()
        if self.offloading or len(layers) < len(self.layers):
            return None
        if not all(layer.can_make_room(num_new) for layer in layers):
            return None
        slots = [layer.make_room(num_new) for layer in layers]
        return [slot for slot in slots if slot is not None]

    def has_shared_prefix(self, layer_idx: int) -> bool:
        """Whether `append` returns several segments for this layer: it grows, and belongs to a fork."""
        return layer_idx < len(self.layers) and getattr(self.layers[layer_idx], "has_shared_prefix", False)

    def fork(self, n: int = 1) -> "TercetCache":
        """A cache in which every row appears n times, copies adjacent, and which shares all that is held so far.

        Nothing of it is copied, now or later; the fork stores what it appends. Both go on independently, whatever is
        done to the other. Where attention slides, a fork copies the window, once.

        Raises:
            ValueError: n < 1.
        """
        if n < 1:
            raise ValueError(f"fork({n}): a fork holds every row at least once.")
        if len(self._own_layers()) < len(self.layers) or not self.layers:
            raise ValueError("this cache was not made from a config: its layers, transformers' own, cannot be forked.")
        return self._with_layers([fork_layer(layer, n) for layer in self.layers])

    def check_matches(self, config: PreTrainedConfig) -> None:
        """Refuse to serve a model of another architecture; instant for the config that the cache was made from.

        Raises:
            ValueError: Names the fields that differ.
        """
        if config is self._config or self.architecture is None:
            return
        difference = describe_difference(self.architecture, architecture(config))
        if difference is not None:
            raise ValueError(
                f"the cache was made for another model: {difference} differ. Make one with TercetCache(model.config)."
            )
        self._config = config

    def save(
        self,
        path: str | os.PathLike,
        *,
        input_ids: torch.Tensor | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        """Write a file for `load`; a file that is there stays as it was until the new one is whole.

        Args:
            path: One safetensors file. A fork is saved with all of its rows.
            input_ids: The tokens whose positions the cache holds, (B, T) with T >= `length`: the file tells them.
            model: The model that made the cache; its fingerprint goes into the file.

        Raises:
            ValueError: `input_ids` does not cover all positions, or the cache was not made from a config.
        """
        save_cache(path, self, input_ids, model)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: PreTrainedConfig,
        *,
        input_ids: torch.Tensor | None = None,
        model: torch.nn.Module | None = None,
        device: torch.device | str | None = None,
    ) -> "TercetCache":
        """Read a file that `save` wrote; quantized if it was.

        Args:
            path: The file.
            config: The config of the model that will use the cache.
            input_ids: Demand that the saved prompt is the beginning of these, (B, T).
            model: Demand that these weights made the cache.
            device: Where to put it; the CPU by default.

        Raises:
            ValueError: The file is torn or no cache, or architecture, prompt or weights are not those demanded; the
                message names the file, the difference and a remedy.
        """
        file = read_cache_file(path)
        file.check_architecture(config)
        if model is not None:
            file.check_fingerprint(model)
        if input_ids is not None:
            file.check_prompt(input_ids)
        cache = cls(config, quantization=file.state["quantization"])
        for index, (layer, state) in enumerate(zip(cache._own_layers(), file.state["layers"], strict=True)):
            if state["length"] > 0:
                parts = tuple(part.to(device or "cpu") for part in file.parts(index, layer.part_names))
                layer.restore(parts, state["head_dim"], getattr(torch, state["dtype"]), state["length"])
        return cache

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions in every layer, or in none.

        Args:
            tokens_to_remove: The number of positions as 0 or a negative number.

        Raises:
            ValueError: If positive, or if a sliding layer no longer holds positions that its window would need.
        """
        for layer in self._own_layers():
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def _own_layers(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, TercetCacheLayer | TercetForkedLayer)]

    @property
    def length(self) -> int:
        """Positions seen so far."""
        return self.get_seq_length()

    @property
    def capacity(self) -> int:
        """Positions for which memory is allocated, in the longest layer."""
        return max(layer.capacity for layer in self._own_layers())

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values in all layers; what a fork shares is counted where it was computed."""
        return sum(layer.nbytes for layer in self._own_layers())


def _make_layer(sliding_window: int | None, quantization: str | None) -> TercetCacheLayer:
    if quantization is None:
        return TercetCacheLayer() if sliding_window is None else TercetSlidingLayer(sliding_window)
    if sliding_window is None:
        return TercetQuantizedLayer(quantization=quantization)
    return TercetQuantizedSlidingLayer(sliding_window, quantization=quantization)


__all__ = ["TercetCache"]
