"""Layers of a key/value cache that are written in place and handed out as views.

Keys and values never change once computed, so a new token should cost one write of its own and one read of the past.
`DynamicCache` copies the whole past at every token; here each layer owns a buffer that grows geometrically.

Shapes: B batch, K key/value heads, T new tokens in this call, S keys visible (cached + T), D head_dim, W the window.
A layer's buffer is (B, K, capacity, D); `keys` and `values` are views of its filled part, (B, K, length, D).
"""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin
from transformers.utils import is_tracing

# The first allocation leaves room for a short answer; later ones grow by half, so that a long cache has been copied
# fewer than three times in all and wastes at most a third of its memory.
_FIRST_HEADROOM = 128
_GROWTH = 1.5


class TercetCacheLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer in a growing buffer.

    Invariant: `keys` and `values` are views of the first `length` positions of the pair in `_buffers`, or tensors of
    their own while `_buffers` is None: under autograd or tracing, where in-place writes would break the graph, and
    after operations that return a new tensor anyway.
    """

    # A slot, so that `vars()` does not hold it: exporters flatten that down to every tensor, and the buffers would
    # become inputs and outputs of the graph beside the views of them. They make layers by `__new__` alone.
    __slots__ = ("_buffers",)
    _buffers: tuple[torch.Tensor, torch.Tensor] | None

    is_sliding = False
    is_croppable = True

    def __new__(cls, *args: Any, **kwargs: Any) -> "TercetCacheLayer":  # noqa: D102
        layer = super().__new__(cls)
        layer._buffers = None
        return layer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Start empty, (B, K, 0, D), with the new states' batch, heads, dtype and device."""
        self.dtype, self.device, self._buffers = key_states.dtype, key_states.device, None
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

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
            ValueError: The cache holds another batch size, number of heads, head size or dtype.
        """
        self._prepare_for(key_states, value_states)
        self._append(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        assert self.keys is not None and self.values is not None
        length, new_length = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if any(map(_must_concatenate, (key_states, value_states, self.keys, self.values))):
            self._set(torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2))
            return
        if not self._is_writable(new_length):
            capacity = max(new_length + _FIRST_HEADROOM, int(length * _GROWTH))
            self._reallocate(capacity)
        assert self._buffers is not None
        key_buffer, value_buffer = self._buffers
        key_buffer[:, :, length:new_length] = key_states
        value_buffer[:, :, length:new_length] = value_states
        self.keys, self.values = key_buffer[:, :, :new_length], value_buffer[:, :, :new_length]

    def _is_writable(self, length: int) -> bool:
        # A buffer born in inference mode may not be written outside it.
        if self._buffers is None or self._buffers[0].shape[-2] < length:
            return False
        return torch.is_inference_mode_enabled() or not self._buffers[0].is_inference()

    def _reallocate(self, capacity: int) -> None:
        assert self.keys is not None and self.values is not None
        new_buffers = []
        for filled in (self.keys, self.values):
            buffer = filled.new_empty((*filled.shape[:2], capacity, filled.shape[-1]))
            buffer[:, :, : filled.shape[-2]] = filled
            new_buffers.append(buffer)
        self._buffers = (new_buffers[0], new_buffers[1])

    def _set(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these tensors as they are; the next in-place append moves them into a buffer."""
        self.keys, self.values, self._buffers = keys, values, None

    def _prepare_for(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        held, new = self.keys, key_states
        if held is None:
            self.lazy_initialization(key_states, value_states)
            return
        # `copy_` would broadcast a batch of one over the buffer and go on with wrong numbers.
        if (held.shape[:2], held.shape[-1], held.dtype) != (new.shape[:2], new.shape[-1], new.dtype):
            if held.shape[-2] == 0:
                self.lazy_initialization(key_states, value_states)
                return
            raise ValueError(
                f"the cache holds batch, heads, head_dim = {(*held.shape[:2], held.shape[-1])} of {held.dtype} and got "
                f"{(*new.shape[:2], new.shape[-1])} of {new.dtype}: use a new cache, or `batch_repeat_interleave` / "
                "`batch_select_indices` to change its batch."
            )

    def get_seq_length(self) -> int:
        """Number of positions seen so far."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def get_max_length(self) -> int:
        """-1: a growing layer has no bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that `update` will return for `query_length` queries, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    @property
    def capacity(self) -> int:
        """Positions that fit without another allocation."""
        if self._buffers is not None:
            return self._buffers[0].shape[-2]
        return 0 if self.keys is None else self.keys.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        if self.keys is None or self.values is None:
            return 0
        held = self._buffers or (self.keys, self.values)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @property
    def batch_size(self) -> int:
        """Rows B held, -1 before the first update."""
        return -1 if self.keys is None else self.keys.shape[0]

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
        if tokens_to_remove == 0 or self.keys is None or self.values is None:
            return
        self._truncate(max(self.keys.shape[-2] + tokens_to_remove, 0))

    def _truncate(self, length: int) -> None:
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def reset(self) -> None:
        """Forget everything; buffers are kept, so that the next prompt allocates nothing."""
        if self.keys is not None:
            self._truncate(0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row beam_idx[i] was, (B,)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order (indices, or a boolean mask over rows)."""
        if self.keys is not None and self.values is not None:
            indices = indices.to(self.keys.device)
            self._replace(self.keys[indices], self.values[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies adjacent."""
        if self.keys is not None and self.values is not None:
            self._replace(self.keys.repeat_interleave(repeats, dim=0), self.values.repeat_interleave(repeats, dim=0))

    def _replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        # Same shape: written back into the buffer, so that a beam search allocates nothing that stays. Else a new one.
        is_same_batch = self._buffers is not None and self._buffers[0].shape[0] == keys.shape[0]
        if is_same_batch and self._is_writable(keys.shape[-2]):
            assert self.keys is not None and self.values is not None
            self.keys.copy_(keys)
            self.values.copy_(values)
        else:
            self._set(keys, values)

    def offload(self) -> None:
        """Move to the CPU."""
        if self.keys is not None and self.values is not None:
            self._set(self.keys.to("cpu", non_blocking=True), self.values.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move back to the device of the states."""
        if self.keys is not None and self.values is not None and self.keys.device != self.device:
            self._set(self.keys.to(self.device, non_blocking=True), self.values.to(self.device, non_blocking=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> "TercetCacheLayer":
        # The default copies views and buffers apart, and writes would then go where nobody reads.
        clone = self.__copy__()
        memo[id(self)] = clone
        if clone.keys is not None and clone.values is not None:
            clone._set(clone.keys.clone(), clone.values.clone())
        return clone

    def __copy__(self) -> "TercetCacheLayer":
        # Both see the same past; whoever appends first moves to a buffer of its own. Were one of them left with the
        # old buffer, a crop and an append there would change what the other sees.
        self._buffers = None
        clone: TercetCacheLayer = type(self).__new__(type(self))
        vars(clone).update(vars(self))
        return clone


class TercetSlidingLayer(TercetCacheLayer):
    """Keys and values of one sliding layer: memory is bounded whatever the length.

    A ring in its effect, not in its order: the window slides along a buffer somewhat longer than itself and begins a
    new one when it reaches the end. Positions stay contiguous and in order, which masks need; the moves copy about
    2 W / slack positions a token. The slack is also how far `crop` can go back exactly once the window has moved.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, **kwargs: Any) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        # Positions seen, of which the layer holds the last ones.
        self.cumulative_length = 0
        self.record_past = False

    @property
    def _slack(self) -> int:
        return max(64, self.sliding_window // 4)

    def activate_past_recording(self) -> None:
        """Drop nothing until `crop` is called, which then can undo any number of tokens (assisted decoding)."""
        self.record_past = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append T positions; return the W - 1 before them and themselves, (B, K, min(S, W - 1 + T), D).

        Raises:
            ValueError: The cache holds another batch size, number of heads, head size or dtype.
        """
        self._prepare_for(key_states, value_states)
        num_new = key_states.shape[-2]
        kv_length, _ = self.get_mask_sizes(num_new)
        assert self.keys is not None and self.values is not None
        if not self.record_past and not self._is_writable(self.keys.shape[-2] + num_new):
            self._drop_all_but(self.sliding_window - 1 + self._slack)
        self._append(key_states, value_states)
        self.cumulative_length += num_new
        visible = self.keys[:, :, -kv_length:], self.values[:, :, -kv_length:]
        if not self.record_past and self.keys.shape[-2] > self.sliding_window - 1 + 2 * self._slack:
            self._drop_all_but(self.sliding_window - 1 + self._slack)
        return visible

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Long prompts are not worth a buffer: only their end stays.
        assert self.keys is not None and self.values is not None
        limit = self.sliding_window - 1 + 2 * self._slack
        needed = self.keys.shape[-2] + key_states.shape[-2]
        if needed > limit or self.record_past:
            self._set(torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2))
        else:
            super()._append(key_states, value_states)

    def _reallocate(self, capacity: int) -> None:
        super()._reallocate(min(capacity, self.sliding_window - 1 + 2 * self._slack))

    def _drop_all_but(self, length: int) -> None:
        assert self.keys is not None and self.values is not None
        if self.keys.shape[-2] > length:
            # Cloned: a view would keep the whole past alive.
            self._set(self.keys[:, :, -length:].clone(), self.values[:, :, -length:].clone())

    def get_seq_length(self) -> int:
        """Number of positions seen so far, including those that have left the window."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that `update` will return for `query_length` queries, and the position of the first."""
        past = min(self.cumulative_length, self.sliding_window - 1)
        return past + query_length, self.cumulative_length - past

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse what `crop` could not undo exactly; raises its ValueError."""
        super().check_crop(tokens_to_remove)
        if self.keys is None:
            return
        oldest_held = self.cumulative_length - self.keys.shape[-2]
        oldest_needed = max(self.cumulative_length + tokens_to_remove - self.sliding_window + 1, 0)
        if oldest_held > oldest_needed:
            raise ValueError(
                f"crop({tokens_to_remove}) needs positions before {oldest_held} of a layer with a sliding window of "
                f"{self.sliding_window}, and they are gone: call `activate_past_recording()` before the tokens to undo."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions; exact as far back as the slack or the recorded past reaches.

        Args:
            tokens_to_remove: The number of positions as 0 or a negative number.

        Raises:
            ValueError: If positive, or if positions that the window would need are gone.
        """
        if self.keys is None:
            return
        self.check_crop(tokens_to_remove)
        length = max(self.cumulative_length + tokens_to_remove, 0)
        oldest_held = self.cumulative_length - self.keys.shape[-2]
        self._truncate(length - oldest_held)
        self.cumulative_length = length
        if self.record_past:
            self._drop_all_but(self.sliding_window - 1 + self._slack)

    def reset(self) -> None:
        """Forget everything; buffers are kept."""
        super().reset()
        self.cumulative_length = 0


def _must_concatenate(states: torch.Tensor) -> bool:
    """Whether a write in place would break autograd, a trace or an export."""
    return (states.requires_grad and torch.is_grad_enabled()) or is_tracing(states)


__all__ = ["TercetCacheLayer", "TercetSlidingLayer"]
