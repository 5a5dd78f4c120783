"""Every way of generating, with every kind of layer: the tokens of transformers' own cache, or of the cache itself."""

import pytest
import torch
from transformers import DynamicCache

from tercet.modeling import TercetCache, TercetQuantizedLayer, TercetQuantizedSlidingLayer

WAYS = {
    "greedy": {},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 1.2},
    "contrasted_rows": {"num_return_sequences": 2, "do_sample": True},
}


def generate(model, ids, **kwargs):
    torch.manual_seed(11)
    return model.generate(ids, max_new_tokens=24, min_new_tokens=24, **{"do_sample": False, **kwargs})


def repetitive(make_ids):
    """A prompt longer than the windows, in which a lookup finds something."""
    part = make_ids(1, 7)
    return torch.cat([part, part, part[:, :4]], dim=1)


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_of_transformers_own_cache(model, make_ids, way):
    ids = repetitive(make_ids)
    expected = generate(model, ids, cache=DynamicCache(config=model.config), **WAYS[way])
    assert torch.equal(generate(model, ids, **WAYS[way]), expected)
    # The same from a prompt that was prefilled in pieces across the window's edge.
    cache = TercetCache(model.config)
    with torch.no_grad():
        for start, end in ((0, 3), (3, 4), (4, 11), (11, 17)):
            model(ids[:, start:end], cache=cache)
    if way in ("greedy", "sampled"):
        assert torch.equal(generate(model, ids, cache=cache, **WAYS[way]), expected)
    elif way == "prompt_lookup":
        # transformers would feed the prompt again behind the one that is held.
        with pytest.raises(ValueError, match="begin with an empty cache"):
            generate(model, ids, cache=cache, **WAYS[way])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_layers_say_one_thing_whichever_way_they_are_filled(model, make_ids, quantization):
    ids, settings = repetitive(make_ids), {"cache_config": {"quantization": quantization}}
    greedy = generate(model, ids, return_dict_in_generate=True, **settings)
    layers = {type(layer) for layer in greedy.cache.layers}
    assert layers <= {TercetQuantizedLayer, TercetQuantizedSlidingLayer}
    assert greedy.cache.quantization == quantization
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=4, **settings), greedy.sequences)
    # Rows of a batch do not touch each other.
    assert torch.equal(generate(model, ids.repeat(3, 1), **settings)[2:], greedy.sequences)


@torch.no_grad()
@pytest.mark.parametrize(("quantization", "largest"), [("int8", 0.02), ("int4", 0.3)])
def test_quantized_logits_are_near(model, make_ids, quantization, largest):
    ids = make_ids(2, 40)
    exact, cache = model(ids, use_cache=False).logits, TercetCache(model.config, quantization=quantization)
    got = torch.cat([model(ids[:, start : start + 5], cache=cache).logits for start in range(0, 40, 5)], dim=1)
    error = (got - exact).norm() / exact.norm()
    assert 0 < error < largest


@pytest.mark.parametrize("wrong", [{"quantization": "int3"}, {"nbits": 4}])
def test_a_cache_that_is_not_there_is_refused(modern_model, make_ids, wrong):
    with pytest.raises(ValueError, match="int8"):
        generate(modern_model, make_ids(1, 4), cache_config=wrong)


def test_a_filled_past_beside_an_empty_cache_is_read(model, make_ids):
    """How prefix tuning hands over its prefix, again at every token; transformers would drop it."""
    prefix, ids = make_ids(1, 3), make_ids(1, 6, seed=1)
    whole = torch.cat([prefix, ids], dim=1)
    expected = model.generate(whole, max_new_tokens=24, do_sample=False, eos_token_id=-1)[:, 3:]
    with torch.no_grad():
        past = model(prefix, cache=DynamicCache(config=model.config), use_cache=True).cache
        cache, tokens = TercetCache(model.config), ids
        for step in range(24):
            new = tokens if step == 0 else tokens[:, -1:]
            logits = model(new, cache=cache, past_key_values=past, use_cache=True).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(tokens, expected)
    assert cache.length == 3 + 6 + 23
    assert past.get_seq_length() == 3


@pytest.mark.parametrize("config", ["sliding"], indirect=True)
def test_a_past_that_has_forgotten_its_beginning_is_refused(model, make_ids):
    with torch.no_grad():
        past = model(make_ids(1, 30), cache=DynamicCache(config=model.config), use_cache=True).cache
        with pytest.raises(ValueError, match="holds 30 positions, of which layer 0, where attention slides, has kept"):
            model(make_ids(1, 2), cache=TercetCache(model.config), past_key_values=past, use_cache=True)
