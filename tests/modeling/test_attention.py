"""Every implementation of attention computes the same function, and checkpointing gradients changes none of it."""

import copy

import pytest
import torch
from transformers import DynamicCache

from tercet.modeling import TercetCache, attention_tercet


@torch.no_grad()
def test_eager_equals_sdpa(model, make_ids):
    ids = make_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    logits = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        logits[implementation] = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(logits["eager"], logits["sdpa"], rtol=0, atol=2e-5)


@pytest.mark.slow  # flex attention is compiled: tens of seconds
@torch.no_grad()
def test_flex_equals_eager_and_isolates_documents(modern_model, make_ids):
    ids = make_ids(2, 128)
    positions = torch.cat([torch.arange(60), torch.arange(68)]).expand(2, -1)
    logits = {}
    for implementation in ("eager", "flex_attention"):
        modern_model.set_attn_implementation(implementation)
        logits[implementation] = [
            modern_model(ids, use_cache=False).logits,
            modern_model(ids, position_ids=positions, use_cache=False).logits,
        ]
    for eager, flex in zip(*logits.values(), strict=True):
        torch.testing.assert_close(eager, flex, rtol=0, atol=2e-5)


@torch.no_grad()
def test_attention_weights_are_probabilities_over_the_visible_past(model, make_ids):
    model.set_attn_implementation("eager")
    config = model.config
    weights = model(make_ids(2, 9), output_attentions=True).attentions
    assert len(weights) == config.num_hidden_layers
    for layer_weights, kind in zip(weights, config.layer_types, strict=True):
        assert layer_weights.shape == (2, config.num_attention_heads, 9, 9)
        torch.testing.assert_close(layer_weights.sum(-1), torch.ones(2, config.num_attention_heads, 9))
        visible = torch.ones(9, 9).tril()
        if kind == "sliding_attention":
            visible = visible - torch.ones(9, 9).tril(-config.sliding_window)
        assert (layer_weights * (1 - visible)).abs().max() == 0


def test_gradient_checkpointing_gives_the_same_gradients(model, make_ids):
    ids = make_ids(2, 8)
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_dropout_acts_in_training_only(make_ids):
    from tercet.modeling import TercetConfig, TercetForCausalLM

    torch.manual_seed(0)
    model = TercetForCausalLM(
        TercetConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, hidden_dropout=0.5)
    )
    ids = make_ids(1, 6)
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_half_precision_keeps_the_rotary_frequencies(modern_model):
    """A frequency rounded to bfloat16 is off by up to 1 in 256: a quarter turn and more at position 128."""
    exact = modern_model.model.rotary_emb.inv_freq.clone()
    for convert in (torch.nn.Module.bfloat16, torch.nn.Module.half, lambda module: module.to(torch.bfloat16)):
        converted = convert(copy.deepcopy(modern_model))
        assert converted.model.layers[0].mlp.up_proj.weight.dtype != torch.float32
        assert torch.equal(converted.model.rotary_emb.inv_freq, exact)
        assert torch.equal(converted.model.rotary_emb.original_inv_freq, exact)


@torch.no_grad()
@pytest.mark.parametrize("many_keys", [0, 1 << 60], ids=["products", "fused"])
def test_one_token_at_a_time_equals_all_at_once(model, make_ids, many_keys, monkeypatch):
    monkeypatch.setattr(attention_tercet, "_MANY_KEYS", many_keys)
    ids = make_ids(3, 14)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    for given in (None, mask):
        positions = None if given is None else (given.cumsum(-1) - 1).clamp(min=0)
        whole = model(ids, attention_mask=given, position_ids=positions, use_cache=False).logits
        cache = TercetCache(model.config)
        for start, end in ((0, 6), *((index, index + 1) for index in range(6, 14))):
            got = model(
                ids[:, start:end],
                attention_mask=None if given is None else given[:, :end],
                position_ids=None if positions is None else positions[:, start:end],
                cache=cache,
            ).logits
        torch.testing.assert_close(got[:, -1], whole[:, -1], rtol=0, atol=2e-5)


@torch.no_grad()
def test_no_mask_is_made_for_one_token_without_padding(model, make_ids, monkeypatch):
    ids, seen = make_ids(2, 6), []
    cache = TercetCache(model.config)
    model(ids, cache=cache)
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **kwargs):
        seen.append((attn_mask, query.shape[1], key.shape[1]))
        return original(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model(ids[:, :1], attention_mask=torch.ones(2, 7, dtype=torch.long), cache=cache)
    heads = model.config.num_key_value_heads
    assert seen == [(None, heads, heads)] * model.config.num_hidden_layers


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_a_fork_is_the_prompt_repeated(model, make_ids, implementation, num_tokens):
    """Read where it lies, or copied where many tokens come at once: the numbers of the prompt in every row."""
    model.set_attn_implementation(implementation)
    prompt, answers = make_ids(2, 9), make_ids(6, num_tokens, seed=1)
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    cache = TercetCache(model.config)
    model(prompt, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), cache=cache)
    rows = torch.cat([prompt.repeat_interleave(3, dim=0), answers], dim=1)
    row_mask = torch.cat([mask.repeat_interleave(3, dim=0), torch.ones_like(answers)], dim=1)
    positions = (row_mask.cumsum(-1) - 1).clamp(min=0)
    whole = model(rows, attention_mask=row_mask, position_ids=positions, use_cache=False).logits[:, 9:]
    arguments = {"attention_mask": row_mask, "position_ids": positions[:, 9:]}
    got = model(answers, cache=cache.fork(3), **arguments)
    torch.testing.assert_close(got.logits, whole, rtol=0, atol=2e-5)
    again = model(answers, cache=cache.fork(3).fork(1), output_attentions=implementation == "eager", **arguments)
    torch.testing.assert_close(again.logits, whole, rtol=0, atol=2e-5)
    if implementation == "eager":
        for weights in again.attentions:
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@torch.no_grad()
def test_generating_from_a_fork(model, make_ids):
    prompt = make_ids(1, 8)
    cache = TercetCache(model.config)
    model(prompt[:, :-1], cache=cache)
    rows = prompt.repeat_interleave(4, dim=0)
    for settings in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2}):
        torch.manual_seed(3)
        got = model.generate(rows, cache=cache.fork(4 * settings.get("num_beams", 1)), max_new_tokens=9, **settings)
        torch.manual_seed(3)
        expected = model.generate(rows, cache=DynamicCache(config=model.config), max_new_tokens=9, **settings)
        assert torch.equal(got, expected)
    assert cache.length == 7


@torch.no_grad()
def test_a_cache_of_another_model_is_refused(model, make_ids):
    other = copy.deepcopy(model.config)
    other.num_hidden_layers, other.layer_types = 2, other.layer_types[:2]
    with pytest.raises(ValueError, match="num_hidden_layers"):
        model(make_ids(1, 4), cache=TercetCache(other))
    cache = model(make_ids(2, 4)).cache
    with pytest.raises(ValueError, match="the cache holds"):
        model(make_ids(1, 1), cache=cache)
