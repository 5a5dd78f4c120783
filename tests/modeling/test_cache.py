"""The cache against the plainest model of one: all keys ever seen, concatenated."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.exporters.utils import get_leaf_tensors

from tercet.modeling import TercetCache, TercetCacheLayer, TercetSlidingLayer

HEADS, HEAD_DIM, WINDOW = 2, 3, 5


class Concatenated:
    """Keeps everything and copies it every time; what a layer should return, said in the fewest words."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys: torch.Tensor | None = None

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=-2)
        num_visible = self.length if self.window is None else min(self.length, self.window - 1 + keys.shape[-2])
        return self.keys[:, :, self.length - num_visible :]

    @property
    def length(self):
        return 0 if self.keys is None else self.keys.shape[-2]


def make_states(batch_size, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, HEADS, num_tokens, HEAD_DIM, generator=generator)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 9)),
        st.tuples(st.just("update"), st.integers(100, 300)),
        st.tuples(st.just("crop"), st.integers(0, 20)),
        st.tuples(st.just("reorder"), st.integers(0, 1000)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.integers(0, 1000)),
        st.tuples(st.just("copy"), st.booleans()),
        st.tuples(st.just("deepcopy"), st.booleans()),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=25,
)


@pytest.mark.parametrize("window", [None, WINDOW], ids=["growing", "sliding"])
@given(operations=OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_any_sequence_of_operations(window, operations):
    layer = TercetCacheLayer() if window is None else TercetSlidingLayer(window)
    model = Concatenated(window)
    batch_size = 2
    for number, (name, argument) in enumerate(operations):
        if name == "update":
            keys = make_states(batch_size, argument, number)
            kv_length, kv_offset = layer.get_mask_sizes(argument)
            expected = model.update(keys)
            got_keys, got_values = layer.update(keys, -keys)
            assert torch.equal(got_keys, expected)
            assert torch.equal(got_values, -expected)
            assert (kv_length, kv_offset) == (expected.shape[-2], model.length - expected.shape[-2])
        elif model.keys is None:
            continue
        elif name == "crop":
            removed = min(argument, model.length)
            layer.crop(-removed)
            model.keys = model.keys[:, :, : model.length - removed]
        elif name in ("reorder", "select"):
            generator = torch.Generator().manual_seed(argument)
            size = batch_size if name == "reorder" else 1 + argument % batch_size
            rows = torch.randint(0, batch_size, (size,), generator=generator)
            (layer.reorder_cache if name == "reorder" else layer.batch_select_indices)(rows)
            model.keys, batch_size = model.keys[rows], size
        elif name == "repeat" and batch_size * argument <= 8:
            layer.batch_repeat_interleave(argument)
            model.keys, batch_size = model.keys.repeat_interleave(argument, dim=0), batch_size * argument
        elif name in ("copy", "deepcopy"):
            other = copy.copy(layer) if name == "copy" else copy.deepcopy(layer)
            # Whichever of the two goes on, what the other one writes must not reach it.
            layer, disturbed = (other, layer) if argument else (layer, other)
            disturbed.crop(-min(2, model.length))
            disturbed.update(*[torch.full((batch_size, HEADS, 3, HEAD_DIM), 99.0)] * 2)
        elif name == "reset":
            layer.reset()
            model.keys = None
        assert layer.get_seq_length() == model.length


def test_decoding_does_not_copy_the_past():
    layer = TercetCacheLayer()
    layer.update(make_states(1, 50, 0), make_states(1, 50, 0))
    addresses = set()
    for step in range(100):
        keys, _ = layer.update(make_states(1, 1, step), make_states(1, 1, step))
        addresses.add(keys.data_ptr())
    assert len(addresses) == 1


def test_memory_of_a_growing_layer_is_proportional():
    layer = TercetCacheLayer()
    for step in range(2000):
        layer.update(make_states(1, 1, step), make_states(1, 1, step))
    assert 2000 <= layer.capacity <= 1.5 * 2000 + 1
    assert layer.nbytes == 2 * layer.capacity * HEADS * HEAD_DIM * 4


def test_memory_of_a_sliding_layer_is_bounded():
    window, sizes = 100, set()
    layer = TercetSlidingLayer(window)
    for step in range(3000):
        layer.update(make_states(1, 1, step), make_states(1, 1, step))
        if step > 1000:
            sizes.add(layer.nbytes)
    assert max(sizes) <= 2 * (window + 2 * 64) * HEADS * HEAD_DIM * 4
    assert layer.get_seq_length() == 3000


def test_a_sliding_layer_says_what_it_cannot_undo():
    layer = TercetSlidingLayer(WINDOW)
    for step in range(1000):
        layer.update(make_states(1, 1, step), make_states(1, 1, step))
    with pytest.raises(ValueError, match="activate_past_recording"):
        layer.crop(-500)
    layer.activate_past_recording()
    for step in range(500):
        layer.update(make_states(1, 1, step), make_states(1, 1, step))
    layer.crop(-500)
    assert layer.get_seq_length() == 1000


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(1, HEADS, 1, HEAD_DIM),
        torch.zeros(2, HEADS + 1, 1, HEAD_DIM),
        torch.zeros(2, HEADS, 1, HEAD_DIM + 1),
        torch.zeros(2, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16),
    ],
    ids=["batch", "heads", "head_dim", "dtype"],
)
def test_states_of_another_shape_are_refused(other):
    layer = TercetCacheLayer()
    layer.update(make_states(2, 4, 0), make_states(2, 4, 0))
    with pytest.raises(ValueError, match="the cache holds"):
        layer.update(other, other)
    assert layer.get_seq_length() == 4


def test_an_emptied_cache_takes_another_batch():
    layer = TercetCacheLayer()
    layer.update(make_states(2, 4, 0), make_states(2, 4, 0))
    layer.reset()
    keys, _ = layer.update(make_states(3, 2, 0), make_states(3, 2, 0))
    assert keys.shape == (3, HEADS, 2, HEAD_DIM)


def test_a_buffer_of_inference_mode_is_not_written_outside_it():
    layer = TercetCacheLayer()
    with torch.inference_mode():
        layer.update(make_states(1, 4, 0), make_states(1, 4, 0))
    keys, _ = layer.update(make_states(1, 1, 1), make_states(1, 1, 1))
    assert torch.equal(keys, torch.cat([make_states(1, 4, 0), make_states(1, 1, 1)], dim=-2))
    assert not keys.is_inference()


def test_gradients_flow_through_the_cache(modern_model, make_ids):
    """Training with a cache of one's own, as prefix tuning does."""
    ids = make_ids(1, 8)
    cache = TercetCache(modern_model.config)
    modern_model(ids[:, :5], cache=cache)
    modern_model(ids[:, 5:], cache=cache).logits.sum().backward()
    with_cache = modern_model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    modern_model.zero_grad()
    modern_model(ids, use_cache=False).logits[:, 5:].sum().backward()
    torch.testing.assert_close(with_cache, modern_model.model.layers[0].self_attn.k_proj.weight.grad)


def test_crop_takes_no_positive_number():
    with pytest.raises(ValueError, match="negative"):
        TercetCacheLayer().crop(3)


@torch.no_grad()
def test_sizes_are_visible(modern_model, make_ids):
    cache = TercetCache(modern_model.config)
    assert (cache.length, cache.nbytes) == (0, 0)
    modern_model(make_ids(2, 7), cache=cache)
    config = modern_model.config
    assert cache.length == 7
    assert cache.capacity >= 7
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert cache.nbytes == 2 * cache.capacity * per_position


@torch.no_grad()
def test_exporters_see_keys_and_values_and_no_buffers(modern_model, make_ids):
    """A graph's inputs and outputs are every tensor under `vars()`; layers come back from them without `__init__`."""
    cache = modern_model(make_ids(1, 6)).cache
    leaves = get_leaf_tensors(cache)
    num_layers = modern_model.config.num_hidden_layers
    assert leaves.keys() == {f"layers.{index}.{name}" for index in range(num_layers) for name in ("keys", "values")}
    layer = TercetCacheLayer.__new__(TercetCacheLayer)
    vars(layer).update(vars(cache.layers[0]))
    assert torch.equal(layer.update(*[torch.ones_like(layer.keys)] * 2)[0][:, :, :6], cache.layers[0].keys)


def test_a_pickled_cache_goes_on(modern_model, make_ids):
    ids = make_ids(1, 8)
    with torch.no_grad():
        cache = pickle.loads(pickle.dumps(modern_model(ids[:, :6]).cache))
        expected = modern_model(ids).logits[:, 6:]
        torch.testing.assert_close(modern_model(ids[:, 6:], cache=cache).logits, expected, rtol=0, atol=2e-5)
