"""Every kind of cache, in several live branches, against the plainest model of one: concatenated states."""

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.modeling import GroupedIntegers, TercetCache, TercetConfig
from tercet.modeling.cache_codecs_tercet import CODECS

HEADS, HEAD_DIM, WINDOW, MAX_ROWS = 2, 3, 5, 8
KINDS = {
    "growing": (None, None),
    "sliding": (WINDOW, None),
    "growing-int8": (None, "int8"),
    "growing-int4": (None, "int4"),
    "sliding-int8": (WINDOW, "int8"),
}
OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 3),  # the branch
        st.one_of(
            st.tuples(st.sampled_from(["update", "append", "update_in_inference_mode"]), st.integers(1, 9)),
            st.tuples(st.just("update"), st.integers(100, 300)),
            st.tuples(st.just("make_room"), st.integers(1, 3)),
            st.tuples(st.just("make_room"), st.integers(100, 150)),
            st.tuples(st.just("crop"), st.integers(0, 20)),
            st.tuples(st.sampled_from(["reorder", "select", "mask"]), st.integers(0, 1000)),
            st.tuples(st.sampled_from(["repeat", "fork"]), st.integers(1, 3)),
            st.tuples(st.sampled_from(["copy", "deepcopy", "pickle", "save", "reset", "record", "drop"]), st.just(0)),
        ),
    ),
    min_size=1,
    max_size=25,
)


def make_config(window: int | None) -> TercetConfig:
    return TercetConfig.classic(
        vocab_size=11, hidden_size=6, num_hidden_layers=1, num_attention_heads=HEADS, head_dim=HEAD_DIM,
        sliding_window=window,
    )  # fmt: skip


class Branch:
    """A cache of one layer beside all states that it was given; the second says what the first must return."""

    def __init__(self, cache: TercetCache, states: tuple[torch.Tensor, ...], window: int | None) -> None:
        self.cache, self.states, self.window = cache, states, window
        self.codec: GroupedIntegers | None = CODECS[cache.quantization] if cache.quantization else None

    @property
    def batch_size(self) -> int:
        return self.states[0].shape[0]

    @property
    def length(self) -> int:
        return self.states[0].shape[-2]

    def fork_off(self, cache: TercetCache) -> "Branch":
        return Branch(cache, self.states, self.window)

    def receive(self, states: tuple[torch.Tensor, ...]) -> None:
        """Concatenate what the cache must remember of these states: what the codec leaves of them, if there is one."""
        if self.codec is not None:
            states = tuple(self.codec.decode(*self.codec.encode(new), HEAD_DIM, new.dtype) for new in states)
        self.states = tuple(torch.cat(pair, dim=-2) for pair in zip(self.states, states, strict=True))

    def visible(self, num_new: int) -> list[torch.Tensor]:
        num_visible = self.length if self.window is None else min(self.length, self.window - 1 + num_new)
        return [states[:, :, self.length - num_visible :] for states in self.states]

    def check(self) -> None:
        assert self.cache.get_seq_length() == self.length
        if self.length:
            assert_same(join(self.cache.layers[0].segments()), self.visible(0))

    def apply(self, name: str, argument: int, number: int) -> "Branch | None":
        """Do it to both; a new branch where there is one."""
        cache, layer = self.cache, self.cache.layers[0]
        if name in ("update", "append", "make_room", "update_in_inference_mode"):
            self.add(name, argument, make_states(self.batch_size, argument, number))
        elif name == "crop":
            removed = min(argument, self.length)
            cache.crop(-removed)
            self.states = tuple(states[:, :, : self.length - removed] for states in self.states)
        elif name in ("reorder", "select", "mask"):
            self.select(name, argument)
        elif name == "repeat" and self.batch_size * argument <= MAX_ROWS:
            cache.batch_repeat_interleave(argument)
            self.states = tuple(states.repeat_interleave(argument, dim=0) for states in self.states)
        elif name == "fork" and self.batch_size * argument <= MAX_ROWS:
            branch = self.fork_off(cache.fork(argument))
            branch.states = tuple(states.repeat_interleave(argument, dim=0) for states in self.states)
            return branch
        elif name in ("copy", "deepcopy"):
            return self.fork_off(getattr(copy, name)(cache))
        elif name == "pickle":
            return self.fork_off(pickle.loads(pickle.dumps(cache)))
        elif name == "save":
            with tempfile.TemporaryDirectory() as folder:
                cache.save(Path(folder, "cache"))
                return self.fork_off(TercetCache.load(Path(folder, "cache"), make_config(self.window)))
        elif name == "reset":
            cache.reset()
            self.states = tuple(states[:, :, :0] for states in self.states)
        elif name == "record" and layer.is_sliding:
            layer.record_past = not layer.record_past
        return None

    def add(self, name: str, num_new: int, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        cache, layer = self.cache, self.cache.layers[0]
        sizes = layer.get_mask_sizes(num_new)
        if name == "make_room":
            slots = cache.make_room(num_new)
            if slots is None:
                is_too_much = layer.is_sliding and num_new > 128 and not layer.record_past
                assert layer.quantization or layer.has_shared_prefix or not self.length or is_too_much
                got = cache.update(*states, 0)
            else:
                keys, values, start, end = slots[0]
                keys[:, :, end - num_new : end], values[:, :, end - num_new : end] = states
                assert keys.isfinite().all()
                assert values.isfinite().all()
                got = keys[:, :, start:end], values[:, :, start:end]
        elif name == "append":
            got = join(cache.append(*states, 0))
        else:
            with torch.inference_mode(name == "update_in_inference_mode"):
                got = cache.update(*states, 0)
        self.receive(states)
        expected = self.visible(num_new)
        assert_same(got, expected)
        assert sizes == (expected[0].shape[-2], self.length - expected[0].shape[-2])

    def select(self, name: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = self.batch_size if name == "reorder" else 1 + seed % self.batch_size
        rows: Any = torch.randint(0, self.batch_size, (size,), generator=generator)
        if name == "mask":
            rows = torch.randint(0, 2, (self.batch_size,), generator=generator).bool()
            rows[seed % self.batch_size] = True
        (self.cache.reorder_cache if name == "reorder" else self.cache.batch_select_indices)(rows)
        self.states = tuple(states[rows] for states in self.states)


def make_states(batch_size: int, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, batch_size, HEADS, num_tokens, HEAD_DIM, generator=generator)
    return states[0], states[1]


def join(segments: list[Any]) -> list[torch.Tensor]:
    rows = [[states.repeat_interleave(repeats, dim=0) for states in pair] for *pair, repeats in segments]
    return [torch.cat(states, dim=-2) for states in zip(*rows, strict=True)]


def assert_same(got: Any, expected: Any) -> None:
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize(("window", "quantization"), KINDS.values(), ids=KINDS)
@given(operations=OPERATIONS)
@settings(max_examples=200, deadline=None)
def test_any_operations_on_any_branches(window, quantization, operations):
    empty = torch.zeros(2, HEADS, 0, HEAD_DIM)
    branches = [Branch(TercetCache(make_config(window), quantization=quantization), (empty, empty), window)]
    for number, (index, (name, argument)) in enumerate(operations):
        branch = branches[index % len(branches)]
        if name == "drop":
            branches = branches if len(branches) == 1 else [other for other in branches if other is not branch]
            continue
        new_branch = branch.apply(name, argument, number)
        if new_branch is not None and len(branches) < 4:
            branches.append(new_branch)
        for other in branches:
            other.check()
