"""Forks of cache layers: many continuations of one prefilled prompt, which is in memory once.

Shapes: B batch, B0 rows of a shared segment, K key/value heads, T new tokens in this call, S keys visible (cached + T),
D head_dim.
"""

import copy
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from .cache_layers_tercet import Parts, Segment, Slots, TercetCacheLayer


class _Shared(NamedTuple):
    """Positions that other layers hold, too, and nobody writes: row i of the fork is row i // repeats of the parts."""

    parts: Parts
    repeats: int

    @property
    def length(self) -> int:
        return self.parts[0].shape[-2]

    def truncate(self, length: int) -> "_Shared":
        return self._replace(parts=tuple(part[:, :, :length] for part in self.parts))

    def select(self, indices: torch.Tensor) -> "_Shared":
        """These rows of the fork, sharing as long as each run of equal rows is a multiple of one number of copies."""
        num_rows, num_selected = self.parts[0].shape[0], len(indices)
        if num_rows == 1 and num_selected > 0:
            return self._replace(repeats=num_selected)
        rows = (indices // self.repeats).tolist()
        repeats = gcd(*(len(list(run)) for _, run in groupby(rows))) or 1
        rows = rows[::repeats]
        first = rows[0] if rows else 0
        is_run = rows == list(range(first, first + len(rows)))
        kept = slice(first, first + len(rows)) if is_run else rows
        return _Shared(tuple(part[kept] for part in self.parts), repeats)


class TercetForkedLayer(CacheLayerMixin):
    """A growing layer that begins with positions of another one and stores only what follows them.

    Attributes:
        own: The layer of the positions after the fork.
    """

    # Slots: see `TercetCacheLayer`. An exporter would see a part of the positions and take it for all.
    __slots__ = ("_own", "_shared")
    _own: TercetCacheLayer | None
    _shared: tuple[_Shared, ...]

    is_sliding = False
    is_croppable = True

    def __new__(cls, *args: Any, **kwargs: Any) -> "TercetForkedLayer":  # noqa: D102
        layer = super().__new__(cls)
        layer._own, layer._shared = None, ()
        return layer

    def __init__(self, shared: tuple[_Shared, ...], own: TercetCacheLayer) -> None:
        self._shared, self._own = shared, own
        self.is_initialized = True

    @property
    def own(self) -> TercetCacheLayer:  # noqa: D102
        if self._own is None:
            raise ValueError("a forked cache does not pass through an exporter: give it one that was not forked.")
        return self._own

    @property
    def has_shared_prefix(self) -> bool:
        """Whether some positions belong to other layers, too."""
        return bool(self._shared)

    @property
    def quantization(self) -> str | None:
        """As that of the layer that was forked."""
        return self.own.quantization

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of `parts`."""
        return self.own.part_names

    @property
    def parts(self) -> Parts:
        """What is stored of all positions, in one piece: copies of the shared ones for every row."""
        pieces = [[part.repeat_interleave(repeats, dim=0) for part in parts] for parts, repeats in self._shared]
        return tuple(torch.cat(part, dim=-2) for part in zip(*pieces, self.own.parts, strict=True))

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.own.dtype

    @property
    def device(self) -> torch.device:
        """Of keys and values."""
        return self.own.device

    @property
    def keys(self) -> torch.Tensor:  # type: ignore
        """(B, K, S, D), a new tensor while positions are shared."""
        return self._join(self.segments())[0]

    @property
    def values(self) -> torch.Tensor:  # type: ignore
        """(B, K, S, D), a new tensor while positions are shared."""
        return self._join(self.segments())[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Start empty, with the new states' batch, heads, dtype and device."""
        self._shared = ()
        self.own.lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append T positions and return all visible ones, (B, K, S, D): copies of the shared ones for every row.

        Raises:
            ValueError: The cache holds another batch size, number of heads, head size, dtype or device.
        """
        return self._join(self.append(key_states, value_states))

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> list[Segment]:
        """Append T positions and return all visible ones as segments, with nothing copied."""
        if self._shared and not self.own.fits(key_states, value_states):
            # The layer of the rest takes any batch while it is empty.
            self.own.check_layout(key_states, value_states)
        own = Segment(*self.own.update(key_states, value_states), 1)
        return [*self._shared_segments(), own]

    def segments(self) -> list[Segment]:
        """All positions in order, with nothing copied."""
        return [*self._shared_segments(), *(self.own.segments() if self.own.num_held or not self._shared else [])]

    def _shared_segments(self) -> list[Segment]:
        return [Segment(*self.own.decode(parts), repeats) for parts, repeats in self._shared]

    @staticmethod
    def _join(segments: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        if len(segments) == 1 and segments[0].repeats == 1:
            return segments[0].keys, segments[0].values
        return (
            torch.cat([segment.keys.repeat_interleave(segment.repeats, dim=0) for segment in segments], dim=-2),
            torch.cat([segment.values.repeat_interleave(segment.repeats, dim=0) for segment in segments], dim=-2),
        )

    def make_room(self, num_new: int) -> Slots | None:
        """None while positions are shared: there is no one buffer of all of them."""
        return None if self._shared else self.own.make_room(num_new)

    def can_make_room(self, num_new: int) -> bool:
        """Whether `make_room` returns buffers."""
        return not self._shared and self.own.can_make_room(num_new)

    @property
    def num_held(self) -> int:
        """Positions held, shared ones included."""
        return sum(shared.length for shared in self._shared) + self.own.num_held

    def get_seq_length(self) -> int:
        """Number of positions seen so far."""
        return self.num_held

    def get_max_length(self) -> int:
        """-1: a growing layer has no bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that `update` will return for `query_length` queries, and the position of the first."""
        return self.num_held + query_length, 0

    @property
    def capacity(self) -> int:
        """Positions that fit without another allocation."""
        return self.num_held - self.own.num_held + self.own.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated by this layer: the shared positions are counted where they were computed."""
        return self.own.nbytes

    @property
    def batch_size(self) -> int:
        """Rows B."""
        return self.own.batch_size

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse a positive number."""
        self.own.check_crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions, here and not in the layers that share them.

        Args:
            tokens_to_remove: The number of positions as 0 or a negative number.

        Raises:
            ValueError: If positive.
        """
        num_shared_left = self.num_held - self.own.num_held + min(self.own.num_held + tokens_to_remove, 0)
        self.own.crop(tokens_to_remove)
        shared = []
        for segment in self._shared:
            if num_shared_left > 0:
                shared.append(segment.truncate(num_shared_left))
            num_shared_left -= segment.length
        self._shared = tuple(shared)

    def reset(self) -> None:
        """Forget everything, here and not in the layers that share it."""
        self._shared = ()
        self.own.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row beam_idx[i] was, (B,)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order (indices, or a boolean mask over rows); shared positions stay shared."""
        rows = torch.arange(self.batch_size, device=indices.device)[indices]
        self._shared = tuple(shared.select(rows) for shared in self._shared)
        self.own.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies adjacent; shared positions stay shared."""
        self._shared = tuple(_Shared(parts, repeats * number) for parts, number in self._shared)
        self.own.batch_repeat_interleave(repeats)

    def offload(self) -> None:
        """Move to the CPU; shared positions are copied there."""
        self._move(torch.device("cpu"))
        self.own.offload()

    def prefetch(self) -> None:
        """Move back to the device of the states."""
        self._move(self.device)
        self.own.prefetch()

    def _move(self, device: torch.device) -> None:
        self._shared = tuple(
            _Shared(tuple(part.to(device, non_blocking=True) for part in parts), repeats)
            for parts, repeats in self._shared
        )

    def share(self, repeats: int) -> tuple[_Shared, ...]:
        """All positions, for a fork with `repeats` copies of each row to begin with."""
        shared = tuple(_Shared(parts, repeats * number) for parts, number in self._shared)
        return (*shared, _Shared(self.own.share(), repeats)) if self.own.num_held else shared

    def __copy__(self) -> "TercetForkedLayer":
        return TercetForkedLayer(self._shared, copy.copy(self.own))

    def __deepcopy__(self, memo: dict[int, Any]) -> "TercetForkedLayer":
        # Nobody ever writes the shared positions, so that they need no copy.
        clone = TercetForkedLayer(self._shared, copy.deepcopy(self.own, memo))
        memo[id(self)] = clone
        return clone

    def __getstate__(self) -> dict[str, Any]:
        # A view is pickled with the whole buffer that it looks at.
        shared = [(tuple(part.clone() for part in parts), repeats) for parts, repeats in self._shared]
        return {"shared": shared, "own": self.own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(tuple(_Shared(*shared) for shared in state["shared"]), state["own"])


def fork_layer(layer: Any, num_copies: int) -> Any:
    """A layer in which every row of `layer` appears `num_copies` times, copies adjacent, and nothing is copied."""
    if layer.get_seq_length() == 0:
        fresh = copy.copy(layer)
        fresh.reset()
        fresh.batch_repeat_interleave(num_copies)
        return fresh
    if layer.is_sliding:
        # At most a window, which the fork copies at its first token.
        fork = copy.copy(layer)
        fork.hold(tuple(_expand_rows(part, num_copies) for part in fork.parts))
        return fork
    if isinstance(layer, TercetForkedLayer):
        shared, own = layer.share(num_copies), layer.own.empty_like()
    else:
        shared, own = (_Shared(layer.share(), num_copies),), layer.empty_like()
    own.batch_repeat_interleave(num_copies)
    return TercetForkedLayer(shared, own)


def _expand_rows(part: torch.Tensor, num_copies: int) -> torch.Tensor:
    # A view of one row; a copy of several, as copies must be adjacent.
    return part.unsqueeze(1).expand(-1, num_copies, *part.shape[1:]).flatten(0, 1)


__all__ = ["TercetForkedLayer", "fork_layer"]
