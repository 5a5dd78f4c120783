"""Cache layers that store keys and values as small integers.

Shapes: B batch, K key/value heads, T new tokens, S positions held, D head_dim, G groups a head, N = ceil(D / G) numbers
a group, padded where G N > D.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .cache_layers_tercet import Parts, TercetCacheLayer
from .cache_sliding_tercet import TercetSlidingLayer

# Smallest divisor of a step of zero: its codes are decoded to the minimum whatever they are.
_TINY = 1e-30


@dataclass(frozen=True)
class GroupedIntegers:
    """Asymmetric integers: along D, each group of a token's head has its own minimum and step.

        x ~ minimum + code * step,   code in 0 ... 2**bits - 1

    The minimum is a float16, the step eight bits: exponent and three bits of the mantissa of a float16, rounded up.
    That is three bytes a group. Codes are computed from the rounded pair, so that the error of a number is at most half
    a step, or the float16 rounding of the minimum if that is more. A group of equal numbers is as exact as float16.
    Each position is encoded by itself: its parts do not depend on what else is in the call.

    Groups that float16 cannot describe come back as NaN or infinity, never as plausible numbers: those with a number
    that is not finite, a minimum beyond +-65504, or a range beyond about 100,000. Attention then shows it at once, with
    no check that would make an accelerator wait at every token.

    Attributes:
        bits: 8, or 4: two codes a byte, the first half of D in the low bits.
        group_size: Upper bound of N.
    """

    bits: int
    group_size: int

    def num_groups(self, head_dim: int) -> int:
        """G."""
        return -(-head_dim // self.group_size)

    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (..., D) or (..., ceil(D / 2)) and ranges (..., 3 G), uint8 both, of states (..., D)."""
        head_dim = states.shape[-1]
        groups = self._split_into_groups(states.float())  # (..., G, N)
        minimum, maximum = groups.aminmax(dim=-1, keepdim=True)
        minimum16 = minimum.half()
        minimum = minimum16.float()
        step8 = self._encode_step((maximum - minimum).clamp_(min=0) / (2**self.bits - 1))
        step = self._decode_step(step8).clamp_(min=_TINY)
        codes = ((groups - minimum) / step).round_().clamp_(0, 2**self.bits - 1).to(torch.uint8)
        ranges = torch.cat([minimum16.view(torch.uint8), step8], dim=-1)  # (..., G, 3)
        codes = codes.flatten(-2)[..., :head_dim]
        if self.bits == 4:
            half = -(-head_dim // 2)
            codes, high = codes[..., :half].clone(), codes[..., half:]
            codes[..., : head_dim - half] |= high << 4
        return codes, ranges.flatten(-2)

    def decode(self, codes: torch.Tensor, ranges: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """States (..., D) of this dtype; computed in float32."""
        if self.bits == 4:
            codes = torch.cat([codes & 15, (codes >> 4)[..., : head_dim // 2]], dim=-1)
        ranges = ranges.unflatten(-1, (self.num_groups(head_dim), 3))
        # Copied, as float16 must lie at even addresses; `contiguous` would leave a single group where it is.
        minimum = (
            ranges[..., :2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()
        )  # (..., G, 1)
        step = self._decode_step(ranges[..., 2:])
        # In place: less than half the time of `addcmul`, which does not broadcast well.
        states = self._split_into_groups(codes.float()).mul_(step).add_(minimum)
        return states.flatten(-2)[..., :head_dim].to(dtype)

    def _split_into_groups(self, states: torch.Tensor) -> torch.Tensor:
        num_groups = self.num_groups(states.shape[-1])
        padding = -states.shape[-1] % num_groups
        if padding:
            # By copies of the last number, which leave minimum and maximum as they are.
            states = torch.cat([states, states[..., -1:].expand(*states.shape[:-1], padding)], dim=-1)
        return states.unflatten(-1, (num_groups, -1))

    @property
    def _step_scale(self) -> int:
        """Steps are range / (2**bits - 1): this brings those of common ranges where float16 is precise."""
        return 2 ** (self.bits - 1)

    def _encode_step(self, step: torch.Tensor) -> torch.Tensor:
        # A step has no sign: of the float16's 1 + 5 + 10 bits, bits 7 to 14 are kept.
        return ((step * self._step_scale).half().view(torch.int16) + 127 >> 7).to(torch.uint8)

    def _decode_step(self, step8: torch.Tensor) -> torch.Tensor:
        return (step8.to(torch.int16) << 7).view(torch.float16).float() / self._step_scale


# The bytes of a float32: at D = 64 0.262 and 0.148 of them, at D = 32 0.273 and 0.148.
CODECS = {"int8": GroupedIntegers(bits=8, group_size=64), "int4": GroupedIntegers(bits=4, group_size=32)}


class _QuantizedParts(TercetCacheLayer):
    """A layer whose parts are codes and ranges of keys and of values; `keys` and `values` are decoded when asked for.

    `update` returns decoded states for all positions, the new ones included: what a query sees of a position then never
    depends on when it was computed, and prompts in chunks, single tokens and assisted decoding give equal results.
    """

    __slots__ = ()
    part_names = ("key_codes", "key_ranges", "value_codes", "value_ranges")
    quantization: str
    head_dim: int

    def __init__(self, *args: Any, quantization: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quantization = quantization

    # Not a slot: the parts are all that there is of this layer, and exporters must see them.
    @property
    def parts(self) -> Parts:
        return self.codes

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self.codes = parts

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore
        """(B, K, S, D), a new tensor."""
        return self._decode_one(*self.codes[:2]) if self.codes else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore
        """(B, K, S, D), a new tensor."""
        return self._decode_one(*self.codes[2:]) if self.codes else None

    def encode(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Parts:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                f"a cache with quantization={self.quantization!r} got keys or values that need gradients, and rounding "
                "to integers has none: call the model under torch.no_grad(), or use a cache without quantization."
            )
        codes, ranges = CODECS[self.quantization].encode(torch.stack((key_states, value_states)))
        return codes[0], ranges[0], codes[1], ranges[1]

    def decode(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        return self._decode_one(*parts[:2]), self._decode_one(*parts[2:])

    def _decode_one(self, codes: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        return CODECS[self.quantization].decode(codes, ranges, self.head_dim, self.dtype)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape != value_states.shape:
            raise ValueError(f"keys are {tuple(key_states.shape)} and values {tuple(value_states.shape)}.")
        self.head_dim = key_states.shape[-1]
        super().lazy_initialization(key_states, value_states)

    def fits(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        if not self.codes:
            return False
        expected = (*self.codes[0].shape[:2], key_states.shape[-2], self.head_dim)
        return key_states.shape == value_states.shape == expected and all(
            states.dtype is self.dtype and states.device == self.device for states in (key_states, value_states)
        )


class TercetQuantizedLayer(_QuantizedParts):
    """A growing layer of small integers."""

    __slots__ = ()


class TercetQuantizedSlidingLayer(_QuantizedParts, TercetSlidingLayer):
    """A sliding layer of small integers."""

    __slots__ = ()


__all__ = ["CODECS", "GroupedIntegers", "TercetQuantizedLayer", "TercetQuantizedSlidingLayer"]
