"""Layers of a key/value cache that are written in place and handed out as views.

Keys and values never change once computed, so a new token should cost one write of its own and one read of the past.
`DynamicCache` copies the whole past at every token; here each layer owns buffers that grow geometrically.

What a layer stores is a tuple of tensors, its parts: positions on axis -2, rows on axis 0, the same for all of them.
Here the parts are keys and values; `cache_codecs_tercet.py` has layers whose parts are small integers and their ranges.

Shapes: B batch, K key/value heads, T new tokens in this call, S keys visible (cached + T), D head_dim, W the window.
A buffer is (B, K, capacity, ·), the part in it a view of its filled front, (B, K, length, ·).
"""

from typing import Any, NamedTuple, Self

import torch
from transformers.cache_utils import CacheLayerMixin
from transformers.utils import is_tracing

# Room for a short answer at first; later a buffer grows by half, so that a long cache has been copied fewer than three
# times in all. Few distinct capacities: a step compiled for whole buffers is compiled anew for each.
_HEADROOM = 128
_GROWTH = 1.5
_CAPACITY_MULTIPLE = 256

Parts = tuple[torch.Tensor, ...]


class Slots(NamedTuple):
    """Whole buffers with room for new positions, for a step that writes them itself.

    The visible positions are [start, end); the caller must write those at the end of the range that are new. What lies
    outside is finite, so that a mask can blank it.
    """

    keys: torch.Tensor  # (B, K, capacity, D)
    values: torch.Tensor
    start: int
    end: int


class Segment(NamedTuple):
    """A run of visible positions, whose every row serves `repeats` adjacent rows of the batch."""

    keys: torch.Tensor  # (B / repeats, K, positions, D)
    values: torch.Tensor
    repeats: int


class TercetCacheLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer in growing buffers.

    Invariant: the parts are views of the front of `_buffers`, or tensors of their own while `_buffers` is None: under
    autograd or tracing, where in-place writes would break the graph, and after operations that return a new tensor
    anyway. The first `_num_shared` positions of a buffer are seen by a copy or a fork, too, and never written again.
    """

    # Slots, so that `vars()` does not hold them: exporters flatten that down to every tensor, and the buffers would
    # become inputs and outputs of the graph beside the views of them. They make layers by `__new__` alone.
    __slots__ = ("_buffers", "_num_shared")
    _buffers: Parts | None
    _num_shared: int
    dtype: torch.dtype
    device: torch.device
    quantization: str | None = None
    part_names = ("keys", "values")

    is_sliding = False
    is_croppable = True
    has_shared_prefix = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: D102
        layer = super().__new__(cls)
        layer._buffers, layer._num_shared = None, 0
        return layer

    def __init__(self, **kwargs: Any) -> None:
        # Not the base class's, whose `keys` and `values` a quantized layer computes.
        self.is_initialized = False
        self.parts = ()

    @property
    def parts(self) -> Parts:
        """What is stored of the positions held, one tensor for each of `part_names`; empty before the first update."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self.keys, self.values = parts or (None, None)

    @property
    def num_held(self) -> int:
        """Positions that the parts hold; fewer than were seen where attention slides."""
        return self.parts[0].shape[-2] if self.is_initialized else 0

    def encode(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Parts:
        """Parts of these positions, (B, K, T, D) each."""
        return key_states, value_states

    def decode(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these parts, (B, K, positions, D) each."""
        return parts[0], parts[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Start empty, (B, K, 0, D), with the new states' batch, heads, dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.hold(self.encode(key_states[:, :, :0], value_states[:, :, :0]))
        self.is_initialized = True

    def hold(self, parts: Parts) -> None:
        """Hold these tensors as they are; the next in-place append moves them into buffers."""
        self.parts, self._buffers, self._num_shared = parts, None, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append T new positions and return all that the queries may see.

        Args:
            key_states: (B, K, T, D).
            value_states: (B, K, T, D).

        Returns:
            Keys and values, (B, K, S, D), valid until the next call that changes the cache.

        Raises:
            ValueError: The cache holds another batch size, number of heads, head size, dtype or device.
        """
        self._store(key_states, value_states)
        return self.decode(self.parts)

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> list[Segment]:
        """As `update`, for an attention that reads segments."""
        return [Segment(*self.update(key_states, value_states), 1)]

    def segments(self) -> list[Segment]:
        """All positions that the next query may see, in order; none before the first update."""
        return [Segment(*self.decode(self.parts), 1)] if self.is_initialized else []

    def make_room(self, num_new: int) -> Slots | None:
        """Count `num_new` more positions as held and return the buffers, in which the caller writes them.

        The buffers stay the same tensors from call to call until they must grow. To be called without autograd.

        Returns:
            None, and nothing has changed, where the layer has no such buffers: see `can_make_room`.
        """
        if not self.can_make_room(num_new):
            return None
        end = self._extend(num_new)
        assert self._buffers is not None
        return Slots(self._buffers[0], self._buffers[1], 0, end)

    def can_make_room(self, num_new: int) -> bool:
        """Whether `make_room` returns buffers: not while empty, nor quantized, offloaded or traced."""
        # An emptied layer takes any batch, and only `update` sees which.
        if self.quantization is not None or self.num_held == 0:
            return False
        assert self.keys is not None
        return self.keys.device == self.device and not needs_graph(self.keys)

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self.fits(key_states, value_states):
            self._start_or_refuse(key_states, value_states)
        if self._buffers is None:
            self.prefetch()
        new = self.encode(key_states, value_states)
        if self._must_concatenate(key_states, value_states):
            self.hold(tuple(torch.cat(pair, dim=-2) for pair in zip(self.parts, new, strict=True)))
            return
        num_new = key_states.shape[-2]
        end = self._extend(num_new)
        assert self._buffers is not None
        for buffer, states in zip(self._buffers, new):  # noqa: B905 - a microsecond of every token
            buffer[:, :, end - num_new : end] = states

    def _extend(self, num_new: int) -> int:
        """Count new positions as held, whatever stands there, and return their end in the buffers."""
        length = self.num_held
        if not self._is_writable(length, length + num_new):
            self._find_room(num_new)
            length = self.num_held
        end = length + num_new
        assert self._buffers is not None
        self.parts = tuple([buffer[:, :, :end] for buffer in self._buffers])
        return end

    def _must_concatenate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether a write in place would break autograd, a trace or an export."""
        return needs_graph(key_states, value_states, self.parts[0])

    def _is_writable(self, start: int, end: int) -> bool:
        buffers = self._buffers
        if buffers is None or end > buffers[0].shape[-2] or start < self._num_shared:
            return False
        # A buffer born in inference mode may not be written outside it.
        return torch.is_inference_mode_enabled() or not buffers[0].is_inference()

    def _find_room(self, num_new: int) -> None:
        self._reallocate(grown_capacity(self.num_held, num_new))

    def _reallocate(self, capacity: int) -> None:
        buffers = []
        for filled in self.parts:
            buffer = filled.new_empty((*filled.shape[:2], capacity, filled.shape[-1]))
            length = filled.shape[-2]
            buffer[:, :, :length] = filled
            # A compiled step reads whole buffers; the weight 0 of what is masked would not make a NaN there vanish.
            buffer[:, :, length:].zero_()
            buffers.append(buffer)
        self._buffers, self._num_shared = tuple(buffers), 0

    def fits(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether the states continue what is held; a quick no for what `check_layout` must look at."""
        held = self.keys
        if held is None:
            return False
        old, new = held.shape, key_states.shape
        return (
            (old[0] == new[0] and old[1] == new[1] and old[3] == new[3] and value_states.shape == new)
            and (key_states.dtype is held.dtype and value_states.dtype is held.dtype)
            and (key_states.device == self.device and value_states.device == self.device)
        )

    def _start_or_refuse(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape[:-1] != value_states.shape[:-1]:
            raise ValueError(f"keys are {tuple(key_states.shape)} and values {tuple(value_states.shape)}.")
        if self.num_held == 0:
            self.lazy_initialization(key_states, value_states)
        else:
            self.check_layout(key_states, value_states)

    def check_layout(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuse states that do not continue what is held; raises the ValueError of `update`."""
        # `copy_` would broadcast a batch of one over the buffer and go on with wrong numbers.
        for held, new in zip(self.decode(tuple(part[:, :, :0] for part in self.parts)), (key_states, value_states)):  # noqa: B905
            old_layout = (*held.shape[:2], held.shape[-1]), held.dtype, self.device
            new_layout = (*new.shape[:2], new.shape[-1]), new.dtype, new.device
            if old_layout != new_layout:
                raise ValueError(
                    "the cache holds batch, heads, head_dim = {} of {} on {} and got {} of {} on {}: use a new cache, "
                    "or `batch_repeat_interleave` / `batch_select_indices` to change its "
                    "batch.".format(*old_layout, *new_layout)
                )

    def get_seq_length(self) -> int:
        """Number of positions seen so far."""
        return self.num_held

    def get_max_length(self) -> int:
        """-1: a growing layer has no bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that `update` will return for `query_length` queries, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    @property
    def capacity(self) -> int:
        """Positions that fit without another allocation."""
        return self.num_held if self._buffers is None else self._buffers[0].shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        # Rows that are one row expanded, as a fork of a window is at first, lie in memory once.
        tensors = [part[:1] if part.stride(0) == 0 else part for part in self._buffers or self.parts]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def batch_size(self) -> int:
        """Rows B held, -1 before the first update."""
        return self.parts[0].shape[0] if self.is_initialized else -1

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse what `crop` could not undo exactly; raises its ValueError."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative number.")

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions, exactly as if they had never come.

        Args:
            tokens_to_remove: The number of positions as 0 or a negative number, transformers' convention.

        Raises:
            ValueError: If positive.
        """
        self.check_crop(tokens_to_remove)
        if tokens_to_remove < 0:
            self._truncate(max(self.num_held + tokens_to_remove, 0))

    def _truncate(self, length: int) -> None:
        self.parts = tuple(part[:, :, :length] for part in self.parts)

    def reset(self) -> None:
        """Forget everything; buffers are kept, so that the next prompt allocates nothing."""
        self._truncate(0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row beam_idx[i] was, (B,)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order (indices, or a boolean mask over rows)."""
        self._replace(tuple(part[indices.to(part.device)] for part in self.parts))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies adjacent."""
        self._replace(tuple(part.repeat_interleave(repeats, dim=0) for part in self.parts))

    def _replace(self, parts: Parts) -> None:
        # Same shape: written back into the buffers, so that a beam search allocates nothing that stays.
        is_same_batch = self._buffers is not None and self._buffers[0].shape[0] == parts[0].shape[0]
        if is_same_batch and self._is_writable(0, self.num_held):
            for held, new in zip(self.parts, parts, strict=True):
                held.copy_(new)
        else:
            self.hold(parts)

    def offload(self) -> None:
        """Move to the CPU."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move back to the device of the states."""
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.is_initialized and self.parts[0].device != device:
            self.hold(tuple(part.to(device, non_blocking=True) for part in self.parts))

    def restore(self, parts: Parts, head_dim: int, dtype: torch.dtype, length: int) -> None:
        """Hold parts that a layer of this kind held when it had seen `length` positions."""
        empty = torch.empty((*parts[0].shape[:2], 0, head_dim), dtype=dtype, device=parts[0].device)
        self.lazy_initialization(empty, empty)
        self.hold(parts)

    def share(self) -> Parts:
        """The parts, for another layer to hold; from now on this one writes only behind them."""
        self._num_shared = max(self._num_shared, self.num_held)
        return self.parts

    def empty_like(self) -> Self:
        """A layer of the same kind and settings that holds no position of the same rows."""
        return self._clone(tuple(part[:, :, :0] for part in self.parts))

    def _clone(self, parts: Parts) -> Self:
        clone = type(self).__new__(type(self))
        vars(clone).update(vars(self))
        clone.hold(parts)
        return clone

    def __copy__(self) -> Self:
        # Both see the same past: this one goes on behind it, the copy in buffers of its own.
        return self._clone(self.share())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The default copies views and buffers apart, and writes would then go where nobody reads.
        clone = self._clone(tuple(part.clone() for part in self.parts))
        memo[id(self)] = clone
        return clone

    def __getstate__(self) -> dict[str, Any]:
        # A view is pickled with the whole buffer that it looks at.
        return vars(self._clone(tuple(part.clone() for part in self.parts)))


def grown_capacity(length: int, num_new: int) -> int:
    """Capacity of the next buffer of a layer that holds `length` positions and gets `num_new` more."""
    needed = max(length + num_new + _HEADROOM, int(length * _GROWTH))
    return -(-needed // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE


def needs_graph(*states: torch.Tensor) -> bool:
    """Whether a write in place of these, or into them, would break autograd, a trace or an export."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states):
        return True
    # `is_tracing` takes microseconds, most of them to learn that no accelerator is capturing a graph.
    if type(states[0]) is torch.Tensor and states[0].device.type == "cpu":
        return torch.compiler.is_compiling() or torch.jit.is_tracing()
    return is_tracing(states[0])


__all__ = ["Parts", "Segment", "Slots", "TercetCacheLayer", "grown_capacity", "needs_graph"]
