"""Which cache `generate()` begins with: a new one, the caller's, or one that adapters fill in passing."""

import functools
from collections.abc import Callable
from typing import Any

from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMode

from .cache_tercet import TercetCache


def new_generation_cache(
    config: PreTrainedConfig, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: GenerationMode
) -> TercetCache | None:
    """The cache for a generation whose caller has chosen no other kind; None where the caller has.

    Raises:
        ValueError: `cache_config` holds what a TercetCache does not take, or a filled cache meets assisted decoding.
    """
    given = model_kwargs.get("cache")
    if given is not None and given.get_seq_length() > 0 and generation_mode == GenerationMode.ASSISTED_GENERATION:
        # transformers 5.24 then feeds the whole prompt again, behind what is held: other tokens, and no word.
        raise ValueError(
            f"assisted and prompt-lookup decoding begin with an empty cache, and the one given holds "
            f"{given.get_seq_length()} positions: give none, or generate without an assistant."
        )
    if given is not None or generation_config.use_cache is False or generation_config.cache_implementation is not None:
        return None
    arguments = dict(generation_config.cache_config or {})
    if arguments.keys() - {"quantization"}:
        raise ValueError(f"cache_config is {arguments}: a TercetCache takes quantization, 'int8' or 'int4', only.")
    cache = TercetCache(config, **arguments)
    if generation_config.is_assistant:
        cache.activate_past_recording()
    return cache


def takes_filled_past(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a filled `past_key_values` fill the empty `cache` beside it.

    Prefix tuning hands its prefix to `forward` so (peft 0.21) while `generate()` hands over the cache that it keeps;
    transformers 5.24 then drops the prefix, and the text is that of the model without it.

    Raises:
        ValueError: A sliding layer of `past_key_values` has forgotten positions.
    """

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache, past = kwargs.get("cache"), kwargs.get("past_key_values")
        if isinstance(cache, Cache) and isinstance(past, Cache):
            del kwargs["past_key_values"]  # it comes again with every token: then the cache holds it already
            if cache is not past and cache.get_seq_length() == 0:
                _fill(cache, past)
        return forward(self, *args, **kwargs)

    return wrapper


def _fill(cache: Cache, past: Cache) -> None:
    layers: list[Any] = past.layers
    for layer_idx, layer in enumerate(layers):
        length = layer.get_seq_length()
        if length == 0:
            continue
        if layer.keys.shape[-2] < length:
            raise ValueError(
                f"past_key_values holds {length} positions, of which layer {layer_idx}, where attention slides, has "
                f"kept the last {layer.keys.shape[-2]}: a prefix must be shorter than sliding_window."
            )
        cache.update(layer.keys, layer.values, layer_idx)


__all__ = ["new_generation_cache", "takes_filled_past"]
