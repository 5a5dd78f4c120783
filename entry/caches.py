"""Which cache a command gives to `generate()`, and the one that a conversation keeps from turn to turn."""

from typing import Any, cast

import torch
import typer
from transformers import Cache, DynamicCache, PreTrainedModel

from tercet.modeling import TercetCache, TercetForCausalLM, count_common_tokens
from tercet.modeling.cache_codecs_tercet import CODECS
from tercet.training.errors import UserError, as_user_error

FULL = "full"
# These rotate all keys by frequencies that depend on how long the text has become.
_ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")


def quantization_named(kind: str) -> str | None:
    """What `TercetCache` calls the value of --cache.

    Raises:
        UserError: There is no such kind.
    """
    if kind not in (FULL, *CODECS):
        raise UserError(f"--cache is {kind!r}: choose one of {', '.join((FULL, *CODECS))}")
    return None if kind == FULL else kind


def kind_of(cache: TercetCache) -> str:
    """The value of --cache that makes such a cache."""
    return cache.quantization or FULL


def is_for_tercet(model: PreTrainedModel, option: str) -> TercetForCausalLM:
    """The model, for an option that needs a Tercet one.

    Raises:
        UserError: It is of another family; names the option and the remedy.
    """
    if isinstance(model, TercetForCausalLM):
        return model
    raise UserError(
        f"{option} needs a Tercet checkpoint, and this one is {type(model).__name__}: leave it out, or make one with "
        "`tercet import`"
    )


def make_cache(model: PreTrainedModel, quantization: str | None) -> Cache | None:
    """An empty cache, or None where the model must make its own.

    Raises:
        UserError: A quantized cache for a model of another family.
    """
    if quantization is not None:
        is_for_tercet(model, f"--cache {quantization}")
    if isinstance(model, TercetForCausalLM):
        return TercetCache(model.config, quantization=quantization)
    chosen = model.generation_config and model.generation_config.cache_implementation
    if chosen or not cast(Any, model)._supports_default_dynamic_cache():
        return None
    return DynamicCache(config=model.config)


def compile_decode(model: PreTrainedModel, cache: Cache | None) -> None:
    """What --compile does: says that the first token takes its time.

    Raises:
        UserError: The model is of another family, or has what cannot be compiled, or the cache is quantized.
    """
    tercet_model = is_for_tercet(model, "--compile")
    if isinstance(cache, TercetCache) and cache.quantization is not None:
        raise UserError(
            f"--compile works with a full cache, and this one is {cache.quantization}: leave one of both out"
        )
    with as_user_error("--compile"):
        tercet_model.compile_decode()
    typer.echo(
        "note: the first token compiles the model, for seconds to half a minute; those after it come faster", err=True
    )


def keys_depend_on_length(model: PreTrainedModel) -> bool:
    """Whether what was computed of a short text is not what a longer one that begins with it would compute."""
    rope: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    # One set for all layers, or one for each kind of layer.
    sets = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return any(parameters.get("rope_type") in _ROPE_TYPES_BY_LENGTH for parameters in sets)


def num_reusable(held_ids: torch.Tensor, ids: torch.Tensor) -> int:
    """How many of the positions held serve a prompt (1, T): the prefix in common, less the last token if it is all."""
    return min(count_common_tokens(held_ids, ids), ids.shape[1] - 1)


def crop_to(cache: Cache, length: int) -> bool:
    """Forget the positions from `length` on; False if a layer has lost what it would need, and the cache is spoilt."""
    if not cache.is_croppable:
        return False
    try:
        cache.crop(length - cache.get_seq_length())
    except (ValueError, RuntimeError):  # ours, and transformers' for a window that has moved on
        return False
    return True


class KeptCache:
    """Keys and values of a conversation so far: a turn computes only what is new in it.

    Args:
        model: What the conversation is with. Where its caches cannot be kept, every turn begins with an empty one.
        quantization: As for `TercetCache`.
    """

    def __init__(self, model: PreTrainedModel, quantization: str | None) -> None:
        self._model, self._quantization = model, quantization
        self._is_kept = not keys_depend_on_length(model)
        self._cache: Cache | None = None
        self._ids: torch.Tensor | None = None

    def begin_turn(self, ids: torch.Tensor) -> Cache | None:
        """The cache to generate after `ids` (1, T) with: it holds the longest beginning of them that is known."""
        cache, held_ids = self._cache, self._ids
        # A turn that is broken off leaves it in an unknown state.
        self.forget()
        if cache is not None and held_ids is not None and crop_to(cache, num_reusable(held_ids, ids)):
            return cache
        cache = make_cache(self._model, self._quantization)
        if cache is not None and self._is_kept:
            # The next prompt may differ from this one anywhere in the answer, which is read again as text.
            cache.activate_past_recording()
        return cache

    def end_turn(self, cache: Cache | None, ids: torch.Tensor) -> None:
        """Keep the cache of a turn that ended with `ids` (1, T), of which it holds a beginning."""
        if cache is not None and self._is_kept:
            self._cache, self._ids = cache, ids[:, : cache.get_seq_length()]

    def forget(self) -> None:
        """Begin anew."""
        self._cache, self._ids = None, None
