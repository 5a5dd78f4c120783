"""The compiled decode step says the same tokens as the plain forward; so do the short roads of one token.

Compiled by dynamo alone (backend "eager") most of these take seconds; one slow test generates code as users do.
"""

import copy

import pytest
import torch
from transformers import DynamicCache

from tercet.modeling import TercetCache, TercetConfig, decode_tercet
from tercet.modeling.decode_tercet import DecodeStep


@pytest.fixture
def traced(model, monkeypatch):
    """The same weights, with the step traced to a graph and run as it is, for any batch as on an accelerator."""
    torch._dynamo.reset()
    monkeypatch.setattr(decode_tercet, "_MAX_ROWS_ON_CPU", 64)
    clone = copy.deepcopy(model)
    clone.decode_step = DecodeStep(
        clone, lambda step: torch.compile(step, dynamic=True, fullgraph=True, backend="eager")
    )
    return clone


def generate(model, ids, **kwargs):
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=settings.pop("attention_mask", torch.ones_like(ids)), **settings)


def test_compiled_tokens_are_the_plain_ones(model, traced, make_ids):
    for batch_size in (1, 3):
        ids = make_ids(batch_size, 9)
        assert torch.equal(generate(traced, ids), generate(model, ids, cache=DynamicCache(config=model.config)))


def test_compiled_logits_with_left_padding(model, traced, make_ids):
    ids = make_ids(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    settings = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    got = generate(traced, ids, **settings)
    expected = generate(model, ids, cache=DynamicCache(config=model.config), **settings)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=2e-5)


def test_sampling_and_beams(model, traced, make_ids):
    ids = make_ids(2, 7)
    for settings in ({"do_sample": True, "temperature": 1.3}, {"num_beams": 3}):
        torch.manual_seed(5)
        got = generate(traced, ids, **settings)
        torch.manual_seed(5)
        assert torch.equal(got, generate(model, ids, cache=DynamicCache(config=model.config), **settings))


@torch.no_grad()
def test_the_step_is_used_and_falls_back(traced, make_ids):
    """Else the tests above compare the plain forward to itself."""
    ids, used = make_ids(2, 6), []
    step, traced.decode_step._step = traced.decode_step._step, lambda *args: used.append(1) or step(*args)
    cache = TercetCache(traced.config)
    traced(ids, cache=cache)
    assert not used
    expected = copy.deepcopy(traced)(ids[:, :1], cache=copy.deepcopy(cache)).logits
    torch.testing.assert_close(traced(ids[:, :1], cache=cache).logits, expected, rtol=0, atol=2e-5)
    assert len(used) == 1
    assert cache.length == 7
    outputs = traced(ids[:, :1], cache=cache, output_hidden_states=True)
    assert len(outputs.hidden_states) == traced.config.num_hidden_layers + 1
    traced(ids[:, :2], cache=cache)
    traced(ids[:, :1], cache=TercetCache(traced.config))
    traced(ids[:, :1], cache=DynamicCache(config=traced.config))
    traced(inputs_embeds=traced.model.embed_tokens(ids[:, :1]), cache=cache)
    assert len(used) == 1
    assert cache.length == 11
    # Weights that are not what was fused: the plain forward, and its numbers.
    traced.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(32, 32))
    plain = copy.deepcopy(traced)
    torch.testing.assert_close(
        traced(ids[:, :1], cache=copy.deepcopy(cache)).logits, plain(ids[:, :1], cache=cache).logits, rtol=0, atol=2e-5
    )
    assert len(used) == 1


@torch.no_grad()
def test_a_step_that_fails_leaves_the_cache_as_it_was(traced, make_ids):
    ids, cache = make_ids(1, 6), TercetCache(traced.config)
    traced(ids, cache=cache)

    def fail(*args):
        raise RuntimeError("no compiler here")

    before = [layer.keys.clone() for layer in cache.layers]
    traced.decode_step._step = fail
    with pytest.raises(RuntimeError, match="no compiler"):
        traced(ids[:, :1], cache=cache)
    assert cache.length == 6
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_few_compilations_however_long_the_text(make_model, make_ids):
    model = make_model(TercetConfig.modern(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                           max_position_embeddings=4096, pad_token_id=1))  # fmt: skip
    torch._dynamo.reset()
    graphs = []
    model.decode_step = DecodeStep(
        model,
        lambda step: torch.compile(
            step, dynamic=True, fullgraph=True, backend=lambda graph, _: graphs.append(1) or graph
        ),
    )
    generate(model, make_ids(1, 5), max_new_tokens=1500, min_new_tokens=1500)
    assert len(graphs) <= 3


def test_learned_positions_end_where_they_end(traced, make_ids):
    limit = traced.config.max_position_embeddings
    ids = make_ids(1, limit)
    if traced.config.position_embedding_type == "learned":
        with pytest.raises(ValueError, match="max_position_embeddings"):
            generate(traced, ids, max_new_tokens=3, min_new_tokens=3)
    else:
        assert generate(traced, ids, max_new_tokens=3, min_new_tokens=3).shape[1] == limit + 3


def test_what_cannot_be_compiled_is_refused(make_model):
    config = TercetConfig.modern(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )  # fmt: skip
    with pytest.raises(ValueError, match="dynamic"):
        make_model(config).compile_decode()
    model = make_model(TercetConfig.modern(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="up_proj"):
        model.compile_decode()


def test_half_precision_and_a_copied_model(traced, make_ids):
    ids = make_ids(2, 9)
    half = copy.deepcopy(traced).to(torch.bfloat16)
    assert half.decode_step is None
    expected = generate(
        half, ids, cache=DynamicCache(config=half.config), output_logits=True, return_dict_in_generate=True
    )
    half.decode_step = DecodeStep(half, lambda step: torch.compile(step, dynamic=True, backend="eager"))
    got = generate(half, ids, output_logits=True, return_dict_in_generate=True)
    # Rounding differs; tokens may part after the first near tie, logits before that may not.
    torch.testing.assert_close(got.logits[1].float(), expected.logits[1].float(), rtol=0.05, atol=0.2)


@pytest.mark.slow  # code is generated and built, half a minute
def test_generated_code_says_the_same_tokens(model, make_ids, monkeypatch):
    monkeypatch.setattr(decode_tercet, "_MAX_ROWS_ON_CPU", 64)
    compiled = copy.deepcopy(model).compile_decode()
    for batch_size in (1, 3):
        ids = make_ids(batch_size, 9)
        mask = torch.ones_like(ids)
        mask[0, : 4 * (batch_size > 1)] = 0
        expected = generate(model, ids, attention_mask=mask, cache=DynamicCache(config=model.config))
        assert torch.equal(generate(compiled, ids, attention_mask=mask), expected)
