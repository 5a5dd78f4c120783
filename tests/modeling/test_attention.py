"""Every implementation of attention computes the same function, and checkpointing gradients changes none of it."""

import copy

import pytest
import torch


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
