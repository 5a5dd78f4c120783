"""The cache of a whole model: one layer of keys and values for each decoder layer."""

import copy
from typing import Any

from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig

from .cache_layers_tercet import TercetCacheLayer, TercetSlidingLayer


class TercetCache(DynamicCache):
    """The cache that a Tercet model makes for itself: growing layers, and bounded ones where attention slides.

    Args:
        config: The model's config; gives the number of layers, which of them slide, and the window.

    Example:

        >>> cache = TercetCache(model.config)
        >>> outputs = model(input_ids, cache=cache)          # prefill: all positions at once
        >>> outputs = model(next_token, cache=cache)         # decode: one query reads the keys and values of the past
        >>> cache.length, cache.capacity, cache.nbytes
    """

    def __init__(self, config: PreTrainedConfig, **kwargs: Any) -> None:
        if not isinstance(config, PreTrainedConfig):
            # torch.nn.DataParallel gathers outputs by calling their type with (keys, values, ...) of every layer.
            super().__init__(config, **kwargs)
            return
        decoder = config.get_text_config(decoder=True)
        layers: list[Any] = [
            TercetSlidingLayer(decoder.sliding_window) if layer_type == "sliding_attention" else TercetCacheLayer()
            for layer_type in decoder.layer_types
        ]
        # Not DynamicCache's own __init__, which would make its own layers: only its type is wanted, by which clients
        # recognise a cache that grows.
        Cache.__init__(self, layers=layers, **kwargs)

    def __copy__(self) -> "TercetCache":
        clone: TercetCache = object.__new__(type(self))
        vars(clone).update(vars(self))
        clone.layers = [copy.copy(layer) for layer in self.layers]
        return clone

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

    def _own_layers(self) -> list[TercetCacheLayer]:
        return [layer for layer in self.layers if isinstance(layer, TercetCacheLayer)]

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
        """Bytes allocated for keys and values in all layers."""
        return sum(layer.nbytes for layer in self._own_layers())


__all__ = ["TercetCache"]
