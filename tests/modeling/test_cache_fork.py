"""Forks share the prompt's memory, go their own ways, and never reach each other."""

import gc
import weakref

import pytest
import torch
from transformers.exporters.utils import get_leaf_tensors

from tercet.modeling import TercetCache, TercetForkedLayer

ATOL = 2e-5
QUANTIZATIONS = pytest.mark.parametrize("quantization", [None, "int8"])


@pytest.fixture
def prefilled(modern_model, make_ids):
    """A cache of two different prompts of 20 tokens."""
    cache = TercetCache(modern_model.config)
    with torch.no_grad():
        modern_model(make_ids(2, 20), cache=cache)
    return cache


def storages(cache: TercetCache) -> set[int]:
    return {part.untyped_storage().data_ptr() for layer in cache.layers for part in layer.parts}


@QUANTIZATIONS
@torch.no_grad()
def test_forks_continue_like_repeated_prompts(model, make_ids, quantization):
    prompt, rest = make_ids(2, 9), make_ids(6, 12, seed=1)
    cache = TercetCache(model.config, quantization=quantization)
    model(prompt, cache=cache)
    fork = cache.fork(3)
    repeated = TercetCache(model.config, quantization=quantization)
    model(prompt.repeat_interleave(3, dim=0), cache=repeated)
    for part in rest.split([1, 1, 4, 1, 5], dim=1):
        got, expected = (model(part, cache=each).logits for each in (fork, repeated))
        if quantization is None:
            torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)
        else:  # A number at the edge of a code takes the next when a product of another shape rounds otherwise.
            assert (got - expected).norm() / expected.norm() < 0.003
    assert (cache.length, fork.length) == (9, 21)


@torch.no_grad()
def test_a_fork_copies_nothing_of_the_prompt(prefilled, modern_model, make_ids):
    before = storages(prefilled)
    addresses = [part.data_ptr() for layer in prefilled.layers for part in layer.parts]
    fork = prefilled.fork(50)
    assert fork.nbytes == 0
    for step in range(3):
        modern_model(make_ids(100, 1, seed=step), cache=fork)
        prefixes = [layer.segments()[0] for layer in fork.layers]
        assert [states.data_ptr() for keys, values, _ in prefixes for states in (keys, values)] == addresses
        assert {(keys.shape[0], repeats) for keys, _, repeats in prefixes} == {(2, 50)}
    config = modern_model.config
    own_positions = fork.layers[0].own.capacity
    per_position = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    assert fork.nbytes == 100 * own_positions * per_position
    assert own_positions == 256
    # The original goes on in its own memory.
    modern_model(make_ids(2, 1), cache=prefilled)
    assert storages(prefilled) == before


@pytest.mark.parametrize("config", ["sliding"], indirect=True)
@torch.no_grad()
def test_a_sliding_fork_of_one_prompt_copies_at_its_first_token(model, make_ids):
    cache = TercetCache(model.config)
    model(make_ids(1, 300), cache=cache)
    fork = cache.fork(4)
    assert [part.data_ptr() for part in fork.layers[0].parts] == [part.data_ptr() for part in cache.layers[0].parts]
    model(make_ids(4, 1), cache=fork)
    assert fork.layers[0].parts[0].data_ptr() != cache.layers[0].parts[0].data_ptr()
    assert fork.nbytes == 4 * cache.nbytes


@torch.no_grad()
@pytest.mark.parametrize(
    "spoil",
    [
        lambda cache, model, ids: (cache.crop(-15), model(ids, cache=cache)),
        lambda cache, model, ids: (cache.reset(), model(ids, cache=cache)),
        lambda cache, model, ids: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache, model, ids: cache.batch_select_indices(torch.tensor([1, 1])),
        lambda cache, model, ids: (cache.crop(-15), cache.make_room(4)[0].keys.fill_(9)),
    ],
    ids=["crop", "reset", "reorder", "select", "make_room"],
)
def test_nothing_done_to_the_original_reaches_a_fork(prefilled, modern_model, make_ids, spoil):
    fork = prefilled.fork(2)
    second = fork.fork(2)
    before = [layer.keys.clone() for layer in fork.layers]
    spoil(prefilled, modern_model, make_ids(2, 8, seed=5))
    for layer, twice, keys in zip(fork.layers, second.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(twice.keys, keys.repeat_interleave(2, dim=0))


@torch.no_grad()
def test_forks_of_forks_freed_in_any_order(prefilled, modern_model, make_ids):
    children = [prefilled.fork(2) for _ in range(2)]
    for number, child in enumerate(children):
        modern_model(make_ids(4, 3, seed=number), cache=child)
    grandchildren = [child.fork(2) for child in children]
    expected = [[layer.keys.clone() for layer in cache.layers] for cache in grandchildren]
    gone = [weakref.ref(layer) for layer in prefilled.layers]
    prefilled.layers.clear()
    del children[1]
    gc.collect()
    assert not any(layer() for layer in gone)
    torch.empty(1_000_000).fill_(7)  # What was freed too early would be written over.
    for cache, keys in zip(grandchildren, expected, strict=True):
        assert [len(layer.segments()) for layer in cache.layers] == [2] * len(keys)
        assert all(torch.equal(layer.keys, each) for layer, each in zip(cache.layers, keys, strict=True))


def test_freeing_the_last_owner_frees_the_prompt(prefilled):
    fork = prefilled.fork(2)
    storage = weakref.ref(fork.layers[0].segments()[0].keys.untyped_storage())
    part = weakref.ref(prefilled.layers[0].keys)
    prefilled.layers.clear()
    assert part() is not None
    fork.layers.clear()
    gc.collect()
    assert part() is None
    assert storage() is None


@torch.no_grad()
def test_selection_keeps_sharing_where_it_can(prefilled, modern_model, make_ids):
    def prefix(cache):
        return cache.layers[0].segments()[0]

    address = prefix(prefilled).keys.data_ptr()
    fork = prefilled.fork(3)
    modern_model(make_ids(6, 2, seed=1), cache=fork)
    fork.reorder_cache(torch.tensor([2, 0, 0, 5, 5, 4]))  # beams stay with their prompt
    assert (prefix(fork).keys.data_ptr(), prefix(fork).repeats) == (address, 3)
    fork.batch_repeat_interleave(2)
    assert (prefix(fork).keys.data_ptr(), prefix(fork).repeats) == (address, 6)
    fork.batch_select_indices(torch.tensor([0, 1, 6, 8]))
    assert (prefix(fork).keys.data_ptr(), prefix(fork).repeats) == (address, 2)
    fork.batch_select_indices(torch.tensor([3, 2, 2]))
    assert prefix(fork).keys.shape[0] == 1
    assert prefix(fork).repeats == 3
    single = prefix(fork).keys.data_ptr()
    fork.batch_select_indices(torch.tensor([True, False, True]))
    assert (prefix(fork).keys.data_ptr(), prefix(fork).repeats) == (single, 2)


@torch.no_grad()
def test_a_fork_is_refused_another_batch(prefilled, modern_model, make_ids):
    fork = prefilled.fork(2)
    with pytest.raises(ValueError, match=r"the cache holds batch, heads, head_dim = \(4,"):
        modern_model(make_ids(2, 1), cache=fork)
    assert fork.length == 20


@pytest.mark.parametrize("number", [0, -1])
def test_fork_needs_at_least_one_row(prefilled, number):
    with pytest.raises(ValueError, match=rf"fork\({number}\)"):
        prefilled.fork(number)


@torch.no_grad()
def test_a_fork_cropped_to_nothing_is_an_ordinary_cache(prefilled, modern_model, make_ids):
    fork = prefilled.fork(2)
    assert fork.has_shared_prefix(0)
    assert fork.make_room(1) is None
    assert fork.length == 20
    fork.crop(-20)
    assert not fork.has_shared_prefix(0)
    ids = make_ids(1, 7)
    torch.testing.assert_close(modern_model(ids, cache=fork).logits, modern_model(ids).logits)
    assert fork.make_room(1) is not None


def test_gradients_flow_into_a_shared_prompt(modern_model, make_ids):
    """Soft prompts: one computed prefix, several continuations that train it."""
    ids = make_ids(1, 8)
    cache = TercetCache(modern_model.config)
    modern_model(ids[:, :5], cache=cache)
    modern_model(ids[:, 5:].expand(2, -1), cache=cache.fork(2)).logits.sum().backward()
    weight = modern_model.model.layers[0].self_attn.k_proj.weight
    got = weight.grad.clone()
    modern_model.zero_grad()
    (2 * modern_model(ids, use_cache=False).logits[:, 5:].sum()).backward()
    torch.testing.assert_close(got, weight.grad, rtol=1e-4, atol=1e-4)


def test_an_exporter_is_told_that_it_cannot_take_a_fork(prefilled):
    layer = prefilled.fork(2).layers[0]
    assert get_leaf_tensors(layer) == {}
    rebuilt = TercetForkedLayer.__new__(TercetForkedLayer)
    vars(rebuilt).update(vars(layer))
    with pytest.raises(ValueError, match="not pass through an exporter"):
        rebuilt.update(torch.zeros(4, 2, 1, 8), torch.zeros(4, 2, 1, 8))


def test_generation_from_a_fork(modern_model, make_ids):
    """`generate` runs its own prefill, so the last token of the prompt is left to it."""
    ids = make_ids(1, 9)
    shared = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
    cache = TercetCache(modern_model.config)
    with torch.no_grad():
        modern_model(ids[:, :-1], cache=cache)
    rows = ids.expand(2, -1)
    expected = modern_model.generate(rows, **shared)
    assert torch.equal(modern_model.generate(rows, cache=cache.fork(2), **shared), expected)
