"""One step of a decoder as a graph of plain tensors: `torch.export` of new tokens and a cache in, logits and cache out.

    program = export_decode_step(model)
    logits, cache = program.module()(input_ids, attention_mask, position_ids, cache)

Shapes: B batch, T new tokens, P cached positions, K key/value heads of a layer, D its head_dim, V vocab_size. A cache
is a list with one pair of keys and values a layer, (B, K, P, D) each, and holds every position, in sliding layers too:
there the mask alone keeps what has left the window from being seen.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes_config
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from tercet.training.errors import UserError

KeysAndValues = list[tuple[torch.Tensor, torch.Tensor]]

# "dynamic" and "longrope" choose their frequencies by the length at hand, in Python or in a buffer that is overwritten.
_FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Both take a mask made for any length; the others decide by values what a graph would freeze.
_ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")


class _GivenLayer(CacheLayerMixin):
    """A layer's past, given as tensors; new positions are joined by concatenation, which every exporter can write."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a given layer has its tensors from the start")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        # The shape, never a test for emptiness, which would fix in the graph whether there is a past.
        assert self.keys is not None
        return self.keys.shape[-2]

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class DecodeStep(nn.Module):
    """A causal language model as a function of tensors; what is exported."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: KeysAndValues,
    ) -> tuple[torch.Tensor, KeysAndValues]:
        """Read T new tokens after P cached ones.

        Args:
            input_ids: (B, T).
            attention_mask: (B, P + T), 1 where a token is real, 0 where it is padding.
            position_ids: (B, T), positions within each row's text.
            past_key_values: The cache so far.

        Returns:
            The logits, (B, T, V), and the cache with P + T positions.
        """
        # Told once here, equal sizes get one name in the graph, and no step later has to guess.
        torch._check(attention_mask.shape[0] == input_ids.shape[0])
        torch._check(attention_mask.shape[1] == past_key_values[0][0].shape[2] + input_ids.shape[1])
        cache = Cache(layers=[_GivenLayer(keys, values) for keys, values in past_key_values])
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=True,
            return_dict=True,
        )
        layers: list[Any] = cache.layers
        return outputs.logits, [(layer.keys, layer.values) for layer in layers]


def export_decode_step(model: PreTrainedModel) -> ExportedProgram:
    """The step that reads one token, for any batch size and any length of the cache from 1 up.

    The program takes what [`DecodeStep`] takes, with T = 1, and shares the model's weights.

    Args:
        model: A causal language model, Tercet's or one of transformers', in evaluation mode, its attention "eager" or
            "sdpa".

    Raises:
        UserError: The model cannot be exported; says why.
    """
    check_exportable(model)
    batch_size, past_length = Dim("batch_size", min=1), Dim("past_length", min=1)
    total: Any = past_length + 1
    return _export(model, num_tokens=1, tokens={0: batch_size}, mask={0: batch_size, 1: total},
                   past={0: batch_size, 2: past_length})  # fmt: skip


def export_step(model: PreTrainedModel) -> ExportedProgram:
    """As `export_decode_step`, but for any number of new tokens.

    The graph is right for every size, T = 1 and P = 0 included, and that is what ONNX makes use of. As a program of
    torch it refuses T = 1: torch's own decompositions guard against sizes of one.
    """
    check_exportable(model)
    batch_size, num_tokens = Dim("batch_size", min=1), Dim("sequence_length", min=2)
    past_length, total = Dim("past_sequence_length", min=0), Dim.DYNAMIC  # a sum of two, which `DecodeStep` tells
    return _export(model, num_tokens=3, tokens={0: batch_size, 1: num_tokens}, mask={0: batch_size, 1: total},
                   past={0: batch_size, 2: past_length})  # fmt: skip


def check_exportable(model: PreTrainedModel) -> None:
    """Refuse early what a graph cannot hold.

    Raises:
        UserError: Names the reason.
    """
    if model.training:
        raise UserError("the model is in training mode, and the graph would hold its dropout: call model.eval() first")
    implementation = model.config._attn_implementation
    if implementation not in _ATTENTION_IMPLEMENTATIONS:
        raise UserError(
            f"attention {implementation!r} cannot be exported: call model.set_attn_implementation('sdpa') first"
        )
    parameters = getattr(model.config, "rope_parameters", None) or {}
    rope_types = {parameters.get("rope_type", "default")} | {
        inner.get("rope_type", "default") for inner in parameters.values() if isinstance(inner, dict)
    }
    if changing := sorted(rope_types - set(_FIXED_ROPE_TYPES)):
        raise UserError(
            f"rope_type {changing[0]!r} changes its frequencies with the length, and an exported graph cannot: only "
            f"{', '.join(_FIXED_ROPE_TYPES)} can be exported"
        )


def empty_cache(model: PreTrainedModel, batch_size: int = 1) -> KeysAndValues:
    """What to give as the past before the first token: (B, K, 0, D) for each layer.

    Raises:
        UserError: The model's state is no keys and values a layer (a recurrent one, for example).
    """
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = getattr(model(input_ids=token, use_cache=True, return_dict=True), "cache", None)
    layers: list[Any] = cache.layers if isinstance(cache, Cache) else []
    held = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    is_plain = all(isinstance(tensor, torch.Tensor) and tensor.ndim == 4 for pair in held for tensor in pair)
    if not held or not is_plain:
        raise UserError(
            f"{type(model).__name__} keeps no keys and values for each layer, and only those can be exported"
        )
    empty = []
    for keys, values in held:
        assert keys is not None and values is not None
        empty.append(tuple(s.new_zeros((batch_size, s.shape[1], 0, s.shape[3])) for s in (keys, values)))
    return empty


def _export(
    model: PreTrainedModel,
    *,
    num_tokens: int,
    tokens: dict[int, Any],
    mask: dict[int, Any],
    past: dict[int, Any],
) -> ExportedProgram:
    # Sizes that all differ: two that are equal in the example would be taken for one and the same.
    batch_size, past_length = 2, 5
    cache = empty_cache(model, batch_size)
    device = model.device
    positions = torch.arange(past_length, past_length + num_tokens, device=device).expand(batch_size, -1).clone()
    inputs = {
        "input_ids": torch.zeros((batch_size, num_tokens), dtype=torch.long, device=device),
        "attention_mask": torch.ones((batch_size, past_length + num_tokens), dtype=torch.long, device=device),
        "position_ids": positions,
        "past_key_values": [
            tuple(states.new_zeros((batch_size, states.shape[1], past_length, states.shape[3])) for states in pair)
            for pair in cache
        ],
    }
    shapes = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": tokens,
        "past_key_values": [(past, past) for _ in cache],
    }
    with as_export_error(model), torch.no_grad(), _any_size():
        return torch.export.export(DecodeStep(model), tuple(inputs.values()), dynamic_shapes=shapes, strict=False)


def _any_size() -> AbstractContextManager[Any]:
    """Sizes 0 and 1 are sizes like any other; by default torch makes a graph for sizes from 2 up."""
    config: Any = symbolic_shapes_config
    return config.patch(backed_size_oblivious=True)


@contextmanager
def as_export_error(model: PreTrainedModel) -> Iterator[None]:
    """Turn whatever an exporter raises, which can be anything, into one line that says what it could not export."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's notes to itself about its own deprecations
            yield
    except (OSError, MemoryError, UserError):
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{type(model).__name__} cannot be exported: {reason[:200]}") from error
