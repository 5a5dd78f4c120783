"""Linear layers for few rows, and projections fused into one, against `nn.Linear`."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tercet.modeling.linear_tercet import FusedProjections, apply_linear, linear


@pytest.mark.parametrize("num_out", [1, 6, 7, 64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 5), (64, 1), (65, 1), (1, 200), (0, 1), ()])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_and_many_give_the_same_product(shape, num_out, has_bias):
    torch.manual_seed(0)
    states, weight = torch.randn(*shape, 48), torch.randn(num_out, 48)
    bias = torch.randn(num_out) if has_bias else None
    expected = F.linear(states, weight, bias)
    with torch.no_grad():
        got = linear(states, weight, bias)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def test_gradients_are_those_of_a_linear_layer():
    layer, states = nn.Linear(8, 6), torch.randn(2, 8)
    apply_linear(layer, states).sum().backward()
    torch.testing.assert_close(layer.weight.grad, states.sum(0).expand(6, 8))


def test_every_projection_is_of_the_type_that_quantization_looks_for(model):
    """bitsandbytes and FP8 ask for the type itself, and load a subclass unquantized without a word."""
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    assert kinds == {nn.Linear}


def test_whatever_is_put_on_a_projection_is_called(modern_model, make_ids):
    """A hook, a forward of its own as accelerate's offloading sets, another module as an adapter's."""
    ids, names = make_ids(1, 5), [name for name, part in modern_model.named_modules() if type(part) is nn.Linear]
    assert len(names) == 7 * modern_model.config.num_hidden_layers + 1
    expected = modern_model(ids).logits
    called = []
    for kind in ("hook", "forward", "module"):
        model = copy.deepcopy(modern_model)
        for name in names:
            layer = model.get_submodule(name)
            if kind == "hook":
                layer.register_forward_hook(lambda *_, key=(kind, name): called.append(key))
            elif kind == "forward":
                layer.forward = lambda states, key=(kind, name), old=layer.forward: called.append(key) or old(states)
            else:
                note = nn.Identity()
                note.register_forward_hook(lambda *_, key=(kind, name): called.append(key))
                model.set_submodule(name, nn.Sequential(note, layer))
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
    assert sorted(called) == sorted((kind, name) for kind in ("hook", "forward", "module") for name in names)


def make_fused():
    torch.manual_seed(0)
    first, second = nn.Linear(16, 8), nn.Linear(16, 4)
    before = {name: copy.deepcopy(layer) for name, layer in (("first", first), ("second", second))}
    return FusedProjections([first, second]), first, second, before


def test_fused_projections_are_the_projections():
    fused, first, second, before = make_fused()
    states = torch.randn(3, 2, 16)
    with torch.no_grad():
        for got, layer, name in zip(fused(states), (first, second), ("first", "second"), strict=True):
            torch.testing.assert_close(got, before[name](states), rtol=0, atol=1e-6)
            assert torch.equal(layer.weight, before[name].weight)
            assert layer.weight.data_ptr() != before[name].weight.data_ptr()
    assert fused.is_current(first, second)


def test_an_update_of_a_projection_is_seen_by_the_fused_product():
    fused, first, second, _ = make_fused()
    torch.optim.SGD([first.weight], lr=0.5)
    first(torch.ones(1, 16)).sum().backward()
    torch.optim.SGD([first.weight], lr=0.5).step()
    second.load_state_dict({"weight": torch.zeros(4, 16), "bias": torch.ones(4)})
    states = torch.randn(1, 16)
    assert fused.is_current(first, second)
    with torch.no_grad():
        got = fused(states)
        torch.testing.assert_close(got[0], F.linear(states, first.weight, first.bias), rtol=0, atol=1e-6)
        assert torch.equal(got[1], torch.ones(1, 4))


def test_whatever_replaces_a_weight_ends_the_fusion():
    for change in (
        lambda layer: layer.double(),
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.zeros(8, 16))),
        lambda layer: layer.load_state_dict({"weight": torch.zeros(8, 16), "bias": torch.zeros(8)}, assign=True),
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    ):
        fused, first, second, _ = make_fused()
        change(first)
        assert not fused.is_current(first, second)
    assert not fused.is_current(copy.deepcopy(first), second)


def test_a_model_with_fused_projections_is_copied_and_saved_as_any_other(modern_model, make_ids, tmp_path):
    ids = make_ids(2, 9)
    with torch.no_grad():
        expected = modern_model(ids).logits
        before = {name: tensor.clone() for name, tensor in modern_model.state_dict().items()}
        modern_model.fuse_projections()
        torch.testing.assert_close(modern_model(ids).logits, expected, rtol=0, atol=1e-5)
        after = modern_model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        modern_model.save_pretrained(tmp_path)
        loaded = type(modern_model).from_pretrained(tmp_path).eval()
        copies = (loaded, copy.deepcopy(modern_model), pickle.loads(pickle.dumps(modern_model)))
        for other in copies:
            assert other.model.layers[0].self_attn.fused is None
            assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
            torch.testing.assert_close(other(ids).logits, expected, rtol=0, atol=1e-5)
        weights = modern_model.model.layers[0].self_attn
        assert weights.k_proj.weight.untyped_storage().data_ptr() == weights.fused.weight.untyped_storage().data_ptr()


def test_a_fused_model_trains_as_it_did(modern_model, make_ids):
    ids = make_ids(2, 9)
    reference = copy.deepcopy(modern_model)
    modern_model.fuse_projections()
    for model in (modern_model, reference):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(modern_model.state_dict()[name], tensor), name
