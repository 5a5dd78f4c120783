"""Keys and values as small integers: how many bytes, how exact, and what happens to what cannot be encoded."""

import pytest
import torch
from transformers.exporters.utils import get_leaf_tensors

from tercet.modeling import GroupedIntegers, TercetCache, TercetQuantizedLayer, TercetQuantizedSlidingLayer
from tercet.modeling.cache_codecs_tercet import CODECS

MAX_SHARE_OF_FLOAT32 = {"int8": 0.28, "int4": 0.16}
both = pytest.mark.parametrize("quantization", CODECS)


def make_states(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(got, expected):
    return (got - expected).norm() / expected.norm()


def round_trip(codec: GroupedIntegers, states):
    return codec.decode(*codec.encode(states), states.shape[-1], states.dtype)


@both
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_bytes_of_a_position(quantization, head_dim):
    layer = TercetQuantizedLayer(quantization=quantization)
    states = make_states(2, 3, 10, head_dim)
    layer.update(states, states)
    assert layer.nbytes <= MAX_SHARE_OF_FLOAT32[quantization] * 2 * 2 * 3 * layer.capacity * head_dim * 4


@both
@pytest.mark.parametrize("head_dim", [1, 3, 8, 32, 33, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_half_a_step(quantization, head_dim, dtype):
    codec = CODECS[quantization]
    states = make_states(2, 3, 50, head_dim, dtype=dtype) * 3 + 1
    error = (round_trip(codec, states).double() - states.double()).abs()
    spread = (states.amax(-1) - states.amin(-1)).double()[..., None]
    # Steps are rounded up by at most an eighth, minima to float16, and the result to `dtype`.
    step = spread / (2**codec.bits - 1) * 1.13
    rounding = states.double().abs() * torch.finfo(dtype).eps / 2 + states.amin(-1).double().abs()[..., None] * 2**-11
    assert (error <= step / 2 + rounding + 1e-6).all()


@both
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 1, 1, 64), (1, 1, 0, 8), (0, 2, 3, 8), (1, 1, 1, 1)])
def test_the_smallest_shapes(quantization, shape):
    states = make_states(*shape)
    got = round_trip(CODECS[quantization], states)
    assert got.shape == states.shape
    torch.testing.assert_close(got, states, rtol=0, atol=0.3)


@both
def test_groups_do_not_disturb_each_other(quantization):
    codec = CODECS[quantization]
    states = make_states(1, 1, 4, 128)
    louder = states.clone()
    louder[..., :32] *= 1000
    louder[:, :, 1] *= 1000
    assert torch.equal(round_trip(codec, louder)[:, :, 0, 64:], round_trip(codec, states)[:, :, 0, 64:])


@both
def test_a_position_is_encoded_alike_alone_and_among_others(quantization):
    codec = CODECS[quantization]
    states = make_states(2, 3, 40, 64, seed=1)
    whole = codec.encode(states)
    for split in ([1] * 40, [7, 33]):
        pieces = [codec.encode(piece) for piece in states.split(split, dim=2)]
        for number, part in enumerate(whole):
            assert torch.equal(torch.cat([piece[number] for piece in pieces], dim=2), part)


@both
@pytest.mark.parametrize("constant", [0.0, 1.0, -2.5, 65504.0, 6e-5])
def test_equal_numbers_are_exact(quantization, constant):
    states = torch.full((1, 1, 2, 64), constant).half().float()
    assert torch.equal(round_trip(CODECS[quantization], states), states)


@both
@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2, 1e2, 1e4])
def test_small_and_large_numbers(quantization, scale):
    states = make_states(1, 1, 20, 64) * scale
    error = (round_trip(CODECS[quantization], states) - states).abs().max()
    # Below float16's smallest steps the error is absolute.
    assert error <= max({"int8": 0.03, "int4": 0.3}[quantization] * scale, 1e-6)


@both
@pytest.mark.parametrize("outlier", [float("nan"), float("inf"), -float("inf"), 1e6, -1e6, 3e38])
def test_what_float16_cannot_describe_is_not_made_up(quantization, outlier):
    states = make_states(1, 1, 3, 128)
    states[0, 0, 1, 70] = outlier
    got = round_trip(CODECS[quantization], states)
    group = CODECS[quantization].group_size
    start = 70 // group * group
    assert not got[0, 0, 1, start : start + group].isfinite().any()
    got[0, 0, 1, start : start + group] = 0
    assert got.isfinite().all()


@both
def test_states_that_need_gradients_are_refused(quantization, modern_model, make_ids):
    cache = TercetCache(modern_model.config, quantization=quantization)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        modern_model(make_ids(1, 4), cache=cache)
    with torch.no_grad():
        modern_model(make_ids(1, 4), cache=cache)
    assert cache.length == 4


def test_unknown_quantization_is_refused(modern_model):
    with pytest.raises(ValueError, match="'int5': choose one of int8, int4, or None"):
        TercetCache(modern_model.config, quantization="int5")


def test_values_of_another_shape_than_keys_are_refused():
    layer = TercetQuantizedLayer(quantization="int8")
    with pytest.raises(ValueError, match="keys are"):
        layer.update(make_states(1, 2, 3, 8), make_states(1, 2, 3, 16))


@pytest.mark.parametrize("other", [make_states(2, 2, 1, 8), make_states(1, 2, 1, 8, dtype=torch.bfloat16)])
def test_states_of_another_shape_are_refused(other):
    layer = TercetQuantizedLayer(quantization="int8")
    layer.update(*[make_states(1, 2, 3, 8)] * 2)
    with pytest.raises(ValueError, match="the cache holds batch, heads, head_dim"):
        layer.update(other, other)


@both
@torch.no_grad()
def test_logits_stay_close_and_do_not_depend_on_the_chunks(quantization, model, make_ids):
    ids = make_ids(2, 14)
    expected = model(ids, use_cache=False).logits

    def logits(*chunks):
        cache = TercetCache(model.config, quantization=quantization)
        return torch.cat([model(part, cache=cache).logits for part in ids.split(list(chunks), dim=1)], dim=1)

    whole = logits(14)
    assert relative_error(whole, expected) < {"int8": 0.03, "int4": 0.4}[quantization]
    # Not equal: matrix products of other shapes round otherwise, and a number at the edge of a code takes the next.
    for chunks in ((13, 1), (5, 9), [1] * 14):
        assert relative_error(logits(*chunks), whole) < {"int8": 0.003, "int4": 0.04}[quantization]


@both
def test_assisted_decoding_equals_greedy(quantization, modern_model, make_ids):
    ids = make_ids(1, 6).repeat(1, 3)
    shared = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": -1}
    caches = [TercetCache(modern_model.config, quantization=quantization) for _ in range(2)]
    greedy = modern_model.generate(ids, cache=caches[0], **shared)
    assert torch.equal(modern_model.generate(ids, cache=caches[1], prompt_lookup_num_tokens=4, **shared), greedy)


@torch.no_grad()
def test_exporters_see_all_that_is_stored_and_nothing_twice():
    layer = TercetQuantizedSlidingLayer(5, quantization="int8")
    states = make_states(1, 2, 3, 8)
    layer.update(states, states)
    assert len(get_leaf_tensors(layer)) == 4
    rebuilt = TercetQuantizedSlidingLayer.__new__(TercetQuantizedSlidingLayer)
    vars(rebuilt).update(vars(layer))
    new = make_states(1, 2, 1, 8, seed=1)
    assert torch.equal(rebuilt.update(new, new)[0], layer.update(new, new)[0])
