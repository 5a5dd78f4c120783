"""Training's own backward passes on a CPU against the operators that they replace."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tercet.modeling import (
    TercetConfig,
    TercetForCausalLM,
    attention_tercet,
    kernels_tercet,
    layers_tercet,
    linear_tercet,
    training_attention_tercet,
)

USERS = (kernels_tercet, layers_tercet, linear_tercet)


@pytest.fixture
def without_kernels(monkeypatch):
    """Call it, and everything runs as single operators."""

    def switch_off():
        for module in USERS:
            monkeypatch.setattr(module, "trains_on_cpu", lambda states: False)

    return switch_off


def make_model(**fields):
    torch.manual_seed(0)
    shape = {"vocab_size": 67, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
             "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.3}  # fmt: skip
    return TercetForCausalLM(TercetConfig(**{**shape, **fields})).train()


def gradients_of(model, **inputs):
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qk_norm": False, "num_key_value_heads": 6},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        {"hidden_act": "gelu"},
        {"mlp_type": "plain", "norm_type": "layer_norm", "position_embedding_type": "learned"},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    ],
    ids=["modern", "no-qk-norm", "biases", "gelu", "classic", "sliding"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_single_operators(fields, packed, without_kernels):
    model = make_model(**fields)
    ids = torch.randint(0, 67, (3, 150))
    inputs = {"input_ids": ids, "labels": ids}
    if packed:
        inputs["position_ids"] = torch.cat([torch.arange(70), torch.arange(80)]).expand(3, -1)
    loss, gradients = gradients_of(model, **inputs)
    assert "Rotation" in repr(sorted_nodes(model, inputs)) or fields.get("position_embedding_type") == "learned"
    without_kernels()
    expected_loss, expected = gradients_of(model, **inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=2e-5 * gradient.abs().max().item())


def sorted_nodes(model, inputs):
    """Names of the backward graph's nodes."""
    waiting, seen = [model(**inputs, use_cache=False).loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(parent for parent, _ in node.next_functions)
    return sorted({type(node).__name__ for node in seen})


def test_a_mask_of_the_callers_own_is_obeyed(without_kernels):
    """A prefix that sees itself both ways, which causal blocks would cut."""
    model = make_model()
    mask = torch.ones(100, 100, dtype=torch.bool).tril()
    mask[:30, :30] = True
    ids = torch.randint(0, 67, (2, 100))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask.expand(2, 1, -1, -1)}
    loss, _ = gradients_of(model, **inputs)
    without_kernels()
    torch.testing.assert_close(loss, gradients_of(model, **inputs)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_seen_by_nobody_and_sees_what_it_did(side, without_kernels):
    model = make_model()
    ids = torch.randint(0, 67, (3, 90))
    mask = torch.ones(3, 90, dtype=torch.long)
    mask[1, slice(0, 40) if side == "left" else slice(50, 90)] = 0
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    logits, (loss, gradients) = model(ids, attention_mask=mask, use_cache=False).logits, gradients_of(model, **inputs)
    without_kernels()
    torch.testing.assert_close(logits, model(ids, attention_mask=mask, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    expected_loss, expected = gradients_of(model, **inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=2e-5 * gradient.abs().max().item())


def test_a_gradient_of_a_gradient(without_kernels):
    model = make_model(num_hidden_layers=1)
    ids = torch.randint(0, 67, (2, 9))

    def penalty():
        parameters = list(model.parameters())
        loss = model(ids, labels=ids, use_cache=False).loss
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), parameters)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = penalty()
        without_kernels()
        for gradient, expected in zip(found, penalty(), strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_function_transforms_and_forward_mode_work_as_before():
    model = make_model(num_hidden_layers=1)
    ids = torch.randint(0, 67, (2, 9))
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def loss_of(weights):
        return torch.func.functional_call(model, weights, (ids,), {"labels": ids, "use_cache": False}).loss

    expected = gradients_of(model, input_ids=ids, labels=ids)[1]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = torch.func.grad(loss_of)(parameters)
        direction = {name: torch.ones_like(tensor) for name, tensor in parameters.items()}
        slope = torch.func.jvp(loss_of, (parameters,), (direction,))[1]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(slope, sum(gradient.sum() for gradient in expected.values()), rtol=1e-3, atol=1e-3)


def test_a_hook_or_an_adapter_on_a_projection_is_not_passed_over():
    model = make_model()
    layer, seen = model.model.layers[0], []
    layer.mlp.up_proj.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.self_attn.k_proj.register_forward_hook(lambda *_: seen.append("forward"))
    ids = torch.randint(0, 67, (1, 8))
    model(ids, labels=ids).loss.backward()
    assert sorted(seen) == ["backward", "forward"]


def test_frozen_weights_get_no_gradient_and_others_theirs(without_kernels):
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up_proj" in name or "q_proj" in name)
    ids = torch.randint(0, 67, (2, 20))
    found = gradients_of(model, input_ids=ids, labels=ids)[1]
    without_kernels()
    expected = gradients_of(model, input_ids=ids, labels=ids)[1]
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


def test_recomputed_blocks_give_the_same_bits():
    model = make_model(hidden_dropout=0.1)
    ids = torch.randint(0, 67, (2, 40))
    results = []
    for recompute in (False, True):
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(1)
        results.append(gradients_of(model, input_ids=ids, labels=ids))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], gradient) for name, gradient in results[1][1].items())


@pytest.mark.parametrize("shape", [(5, 7, 3), (300, 16, 24), (1100, 384, 384)])
def test_products_are_those_of_the_library(shape):
    """Whichever library computes them, also where an operand lies the other way."""
    num_rows, num_in, num_out = shape
    torch.manual_seed(0)
    states, weight = torch.randn(num_rows, num_in), torch.randn(num_out, num_in)
    expected = F.linear(states.double(), weight.double()).float()
    tolerance = {"rtol": 0, "atol": 2e-6 * num_in}
    torch.testing.assert_close(kernels_tercet.matmul_transposed(states, weight), expected, **tolerance)
    laid = weight.t().contiguous().t()
    torch.testing.assert_close(kernels_tercet.matmul_transposed(states, laid), expected, **tolerance)


def test_without_onednn_the_gradients_are_the_same(monkeypatch):
    model = make_model(hidden_size=96, num_attention_heads=6)
    ids = torch.randint(0, 67, (4, 100))
    found = gradients_of(model, input_ids=ids, labels=ids)[1]
    monkeypatch.setattr(kernels_tercet, "_onednn_linear", None)
    for name, gradient in gradients_of(copy.deepcopy(model), input_ids=ids, labels=ids)[1].items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("block", [1, 16, 64])
def test_attention_in_blocks_is_attention(block, monkeypatch):
    monkeypatch.setattr(training_attention_tercet, "_BLOCK", block)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 37, heads, 8, requires_grad=True) for heads in (6, 2, 2))
    output = training_attention_tercet.causal_attention(query, key, value, None, 0.3)
    mask = torch.full((37, 37), float("-inf")).triu(1)
    heads = (states.transpose(1, 2) for states in (query, key, value))
    expected, _ = attention_tercet.eager_attention_forward(torch.nn.Module(), *heads, mask, 0.3)
    torch.testing.assert_close(output, expected)
    weight = torch.randn_like(output)
    found = torch.autograd.grad((output * weight).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)
