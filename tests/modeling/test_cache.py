"""The cache's layers: memory, in-place writes, refusals; `test_cache_properties.py` has what they return."""

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers.exporters.utils import get_leaf_tensors

from tercet.modeling import TercetCache, TercetCacheLayer, TercetSlidingLayer

HEADS, HEAD_DIM, WINDOW = 2, 3, 5


def make_states(batch_size, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, HEADS, num_tokens, HEAD_DIM, generator=generator)


def test_decoding_does_not_copy_the_past():
    layer: Any = TercetCacheLayer()
    layer.update(make_states(1, 50, 0), make_states(1, 50, 0))
    addresses = set()
    for step in range(100):
        keys, _ = layer.update(make_states(1, 1, step), make_states(1, 1, step))
        addresses.add(keys.data_ptr())
    assert len(addresses) == 1


def test_memory_of_a_growing_layer_is_proportional():
    layer: Any = TercetCacheLayer()
    for step in range(2000):
        layer.update(make_states(1, 1, step), make_states(1, 1, step))
    assert 2000 <= layer.capacity <= 1.5 * 2000 + 1
    assert layer.nbytes == 2 * layer.capacity * HEADS * HEAD_DIM * 4


@pytest.mark.parametrize("prompt", [1, 1000])
@pytest.mark.parametrize("is_written_by_the_caller", [False, True], ids=["update", "make_room"])
def test_memory_of_a_sliding_layer_is_constant(prompt, is_written_by_the_caller):
    window, sizes = 100, set()
    layer: Any = TercetSlidingLayer(window)
    layer.update(make_states(1, prompt, 0), make_states(1, prompt, 0))
    for step in range(5000):
        states = make_states(1, 1, step)
        if is_written_by_the_caller:
            keys, values, _, end = layer.make_room(1)
            keys[:, :, end - 1 : end], values[:, :, end - 1 : end] = states, states
        else:
            layer.update(states, states)
        if step > window:
            sizes.add((layer.nbytes, layer.keys.data_ptr(), layer.values.data_ptr()))
    assert len(sizes) == 1
    assert layer.nbytes <= 2 * (window + 2 * 64) * HEADS * HEAD_DIM * 4
    assert layer.get_seq_length() == prompt + 5000


def test_buffers_stay_the_same_between_few_growths():
    layer: Any = TercetCacheLayer()
    layer.update(make_states(1, 10, 0), make_states(1, 10, 0))
    seen = []
    for _ in range(3000):
        keys, values, start, end = layer.make_room(1)
        assert (start, end) == (0, layer.get_seq_length())
        buffers = keys.data_ptr(), values.data_ptr(), keys.shape[-2]
        if buffers not in seen:
            seen.append(buffers)
    assert [capacity for *_, capacity in seen] == [256, 512, 768, 1280, 2048, 3072]


def test_a_long_prompt_in_pieces_keeps_the_buffers_of_a_sliding_layer():
    layer: Any = TercetSlidingLayer(WINDOW)
    layer.update(make_states(1, 200, 0), make_states(1, 200, 0))
    address = layer.keys.data_ptr()
    for step in range(5):
        layer.update(make_states(1, 500, step), make_states(1, 500, step))
        layer.update(make_states(1, 1, step), make_states(1, 1, step))
    assert layer.keys.data_ptr() == address


def test_recording_the_past_writes_in_place():
    layer: Any = TercetSlidingLayer(WINDOW)
    layer.update(make_states(1, 50, 0), make_states(1, 50, 0))
    layer.activate_past_recording()
    addresses = set()
    for step in range(1000):
        layer.update(make_states(1, 1, step), make_states(1, 1, step))
        addresses.add(layer.keys.data_ptr())
    assert len(addresses) <= 6
    layer.crop(-700)
    assert layer.get_seq_length() == 350
    assert layer.capacity == WINDOW - 1 + 2 * 64
    for step in range(300):
        layer.update(make_states(1, 1, step), make_states(1, 1, step))
    layer.record_past = False  # as `generate` does, without a crop
    layer.reset()
    layer.update(make_states(1, 1, 0), make_states(1, 1, 0))
    assert layer.capacity == WINDOW - 1 + 2 * 64


def test_room_is_not_made_where_there_is_no_buffer():
    layer: Any = TercetSlidingLayer(WINDOW)
    assert layer.make_room(1) is None
    layer.update(make_states(1, 4, 0), make_states(1, 4, 0))
    assert layer.make_room(129) is None
    assert layer.get_seq_length() == 4
    tuned: Any = TercetCacheLayer()
    tuned.update(make_states(1, 4, 0).requires_grad_(), make_states(1, 4, 0))
    assert tuned.make_room(1) is None
    with torch.no_grad():
        assert tuned.make_room(1) is not None


@torch.no_grad()
def test_room_is_made_in_all_layers_or_none(modern_model, make_ids):
    cache: Any = TercetCache(modern_model.config)
    assert cache.make_room(1) is None
    modern_model(make_ids(1, 4), cache=cache)
    assert len(cache.make_room(2)) == len(cache.layers)
    assert cache.length == 6
    cache.layers[-1] = cache.fork().layers[-1]
    assert cache.make_room(1) is None
    assert {layer.get_seq_length() for layer in cache.layers} == {6}


def test_a_copy_costs_the_original_nothing():
    layer: Any = TercetCacheLayer()
    layer.update(make_states(1, 4, 0), make_states(1, 4, 0))
    address = layer.keys.data_ptr()
    other, third = copy.copy(layer), copy.deepcopy(layer)
    layer.update(make_states(1, 1, 1), make_states(1, 1, 1))
    assert layer.keys.data_ptr() == address
    other.update(make_states(1, 1, 2), make_states(1, 1, 2))
    assert len({each.keys.data_ptr() for each in (layer, other, third)}) == 3


def test_a_pickle_holds_no_empty_room():
    layer: Any = TercetCacheLayer()
    layer.update(make_states(1, 4, 0), make_states(1, 4, 0))
    assert len(pickle.dumps(layer)) < layer.nbytes


def test_a_sliding_layer_says_what_it_cannot_undo():
    layer: Any = TercetSlidingLayer(WINDOW)
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
        torch.zeros(2, HEADS, 1, HEAD_DIM, device="meta"),
    ],
    ids=["batch", "heads", "head_dim", "dtype", "device"],
)
def test_states_of_another_shape_are_refused(other):
    layer: Any = TercetCacheLayer()
    layer.update(make_states(2, 4, 0), make_states(2, 4, 0))
    with pytest.raises(ValueError, match="the cache holds"):
        layer.update(other, other)
    assert layer.get_seq_length() == 4


def test_values_that_do_not_match_the_keys_are_refused():
    layer: Any = TercetCacheLayer()
    with pytest.raises(ValueError, match="keys are"):
        layer.update(make_states(2, 4, 0), make_states(1, 4, 0))
    layer.update(make_states(2, 4, 0), make_states(2, 4, 0))
    for values in (make_states(1, 1, 0), make_states(2, 2, 0), make_states(2, 1, 0).bfloat16()):
        with pytest.raises(ValueError, match=r"keys are|the cache holds"):
            layer.update(make_states(2, 1, 0), values)
    assert layer.get_seq_length() == 4


def test_an_emptied_cache_takes_another_batch():
    layer: Any = TercetCacheLayer()
    layer.update(make_states(2, 4, 0), make_states(2, 4, 0))
    layer.reset()
    keys, _ = layer.update(make_states(3, 2, 0), make_states(3, 2, 0))
    assert keys.shape == (3, HEADS, 2, HEAD_DIM)


def test_a_buffer_of_inference_mode_is_not_written_outside_it():
    layer: Any = TercetCacheLayer()
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
    assert torch.equal(layer.update(*[torch.ones_like(cache.layers[0].keys)] * 2)[0][:, :, :6], cache.layers[0].keys)


def test_a_pickled_cache_goes_on(modern_model, make_ids):
    ids = make_ids(1, 8)
    with torch.no_grad():
        cache = pickle.loads(pickle.dumps(modern_model(ids[:, :6]).cache))
        expected = modern_model(ids).logits[:, 6:]
        torch.testing.assert_close(modern_model(ids[:, 6:], cache=cache).logits, expected, rtol=0, atol=2e-5)
