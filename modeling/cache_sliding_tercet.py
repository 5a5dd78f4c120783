"""The cache layer of attention that slides: memory is bounded whatever the length.

Shapes: B batch, K key/value heads, T new tokens in this call, S positions seen, D head_dim, W the window.
"""

from typing import Any

import torch

from .cache_layers_tercet import Parts, Segment, Slots, TercetCacheLayer, grown_capacity, needs_graph


class TercetSlidingLayer(TercetCacheLayer):
    """Keys and values of one sliding layer in buffers of W - 1 + 2 slack positions.

    A ring in its effect, not in its order: when the buffers are full, their end moves to their front. Positions stay
    contiguous and in order, which masks need; the moves copy about 2 (W + slack) / slack positions a token. The slack
    is also how far `crop` can go back exactly once the window has moved.
    """

    __slots__ = ()
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

    @property
    def _limit(self) -> int:
        """Capacity of buffers that are not recording the past."""
        return self.sliding_window - 1 + 2 * self._slack

    @property
    def _num_kept(self) -> int:
        """Positions that a move keeps."""
        return self.sliding_window - 1 + self._slack

    def activate_past_recording(self) -> None:
        """Drop nothing until `crop` is called, which then can undo any number of tokens (assisted decoding)."""
        self.record_past = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append T positions; return the W - 1 before them and themselves, (B, K, min(S, W - 1 + T), D).

        Raises:
            ValueError: The cache holds another batch size, number of heads, head size, dtype or device.
        """
        num_new = key_states.shape[-2]
        num_visible, _ = self.get_mask_sizes(num_new)
        buffers = self._spare_buffers
        self._store(key_states, value_states)
        self.cumulative_length += num_new
        num_held = self.num_held
        visible = self.decode(tuple([part[:, :, num_held - num_visible :] for part in self.parts]))
        if num_held > self._limit and not self.record_past:
            self._keep_end(self._num_kept, buffers)
        return visible

    def segments(self) -> list[Segment]:
        """The positions that the next query may see beside itself: the last W - 1."""
        if not self.is_initialized:
            return []
        start = self.num_held - self.get_mask_sizes(0)[0]
        return [Segment(*self.decode(tuple(part[:, :, start:] for part in self.parts)), 1)]

    def make_room(self, num_new: int) -> Slots | None:
        """As a growing layer's; the visible range begins W - 1 positions before the new ones."""
        num_visible, _ = self.get_mask_sizes(num_new)
        slots = super().make_room(num_new)
        if slots is None:
            return None
        self.cumulative_length += num_new
        return slots._replace(start=slots.end - num_visible)

    def can_make_room(self, num_new: int) -> bool:
        """Also not for more positions than buffers of their constant size take beside the window."""
        return super().can_make_room(num_new) and (self.record_past or num_new <= 2 * self._slack)

    def _must_concatenate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        if super()._must_concatenate(key_states, value_states):
            return True
        # Long prompts are not worth a buffer: they are all visible to their own queries, and then only their end stays.
        return key_states.shape[-2] > 2 * self._slack and not self.record_past

    def _is_writable(self, start: int, end: int) -> bool:
        if not super()._is_writable(start, end):
            return False
        # What recording made longer is given back.
        return self.record_past or self.capacity <= self._limit

    def _find_room(self, num_new: int) -> None:
        if self.record_past:
            super()._find_room(num_new)
        elif self.num_held + num_new <= self._limit:
            self._reallocate(min(grown_capacity(self.num_held, num_new), self._limit))
        else:
            self._keep_end(min(self._num_kept, self._limit - num_new), self._spare_buffers)

    @property
    def _spare_buffers(self) -> Parts | None:
        """The buffers, if nobody else sees a part of them."""
        return self._buffers if self._num_shared == 0 else None

    def _keep_end(self, length: int, buffers: Parts | None) -> None:
        """Hold the last `length` positions only, at the front of these buffers where they can be had."""
        start = max(self.num_held - length, 0)
        kept = tuple([part[:, :, start:] for part in self.parts])
        if needs_graph(*kept):
            # Cloned: a view would keep the whole past alive.
            self.hold(tuple(part.clone() for part in kept))
            return
        if buffers is None or not all(map(self._takes, buffers, kept)):
            self.parts = kept
            self._reallocate(self._limit)
            buffers = self._buffers
        else:
            for buffer, part in zip(buffers, kept, strict=True):
                # Cloned: the two may overlap.
                buffer[:, :, : part.shape[-2]] = part.clone()
        assert buffers is not None
        self.parts = tuple([buffer[:, :, : part.shape[-2]] for buffer, part in zip(buffers, kept, strict=True)])
        self._buffers = buffers

    def _takes(self, buffer: torch.Tensor, part: torch.Tensor) -> bool:
        """Whether the part can be written into this buffer, which may be older than the rows held now."""
        if buffer.is_inference() and not torch.is_inference_mode_enabled():
            return False
        expected = (*part.shape[:2], self._limit, part.shape[-1])
        return buffer.shape == expected and buffer.dtype == part.dtype and buffer.device == part.device

    def restore(self, parts: Parts, head_dim: int, dtype: torch.dtype, length: int) -> None:
        """Hold parts that a layer of this kind held when it had seen `length` positions."""
        super().restore(parts, head_dim, dtype, length)
        self.cumulative_length = length

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
        oldest_held = self.cumulative_length - self.num_held
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
        self.check_crop(tokens_to_remove)
        length = max(self.cumulative_length + tokens_to_remove, 0)
        oldest_held = self.cumulative_length - self.num_held
        self._truncate(length - oldest_held)
        self.cumulative_length = length
        # Not at every crop: assisted decoding crops at every step, and a little more than is needed costs nothing.
        is_long = self.num_held > self._limit - self._slack // 2 or self.capacity > self._limit
        if self.record_past and is_long and self.is_initialized:
            self._keep_end(self._num_kept, self._spare_buffers)

    def reset(self) -> None:
        """Forget everything; buffers are kept."""
        super().reset()
        self.cumulative_length = 0


__all__ = ["TercetSlidingLayer"]
