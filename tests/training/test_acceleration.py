"""Gradient checkpointing saves memory and changes no bit; compilation changes no loss; freed memory is kept."""

import shutil
import subprocess
import sys

import pytest
import torch

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.acceleration import checkpoint_blocks, compile_model
from tercet.training.errors import UserError


def make_model():
    torch.manual_seed(0)
    return TercetForCausalLM(
        TercetConfig(vocab_size=61, hidden_size=32, num_hidden_layers=6, num_attention_heads=2)
    ).train()


def measure(model):
    """Bytes that a forward pass keeps for the backward pass, and the gradients."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    ids = torch.randint(0, 61, (4, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids, labels=ids, skip_logits=True, use_cache=False).loss
    num_bytes = sum(kept.values())
    loss.backward()
    return num_bytes, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("every", "num_blocks"), [(False, 0), (True, 6), (1, 6), (2, 3), (3, 2), (7, 1)])
def test_so_many_blocks_are_computed_again_and_gradients_stay(every, num_blocks):
    plain_bytes, expected = measure(make_model())
    model = make_model()
    assert checkpoint_blocks(model, every) == num_blocks
    num_bytes, gradients = measure(model)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    if num_blocks:
        assert num_bytes < plain_bytes * (1 - 0.7 * num_blocks / 6)
    else:
        assert num_bytes == plain_bytes


def test_without_a_compiler_compiling_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"training.compile needs a C\+\+ compiler.*training.compile=false"):
        compile_model(make_model(), print)


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_model():
    model, said = make_model(), []
    expected = measure(model)[1]
    expected = [gradient.clone() for gradient in expected]
    model.zero_grad()
    compiled = compile_model(model, said.append)
    assert "first step takes" in said[0]
    gradients = measure(compiled)[1]
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_memory_is_used_again_and_not_fetched_anew():
    """Page faults of the second of two equal loops over large tensors, in a process of its own."""
    script = """
import resource, sys, torch
if sys.argv[1] == "kept":
    from tercet.training.allocator import keep_freed_memory
    if not keep_freed_memory():
        print(-1); raise SystemExit
def loop():
    for _ in range(5):
        torch.ones(10_000_000).add(1)
loop()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
loop()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = {}
    for name in ("kept", "plain"):
        done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, check=True)
        faults[name] = int(done.stdout)
    if faults["kept"] < 0:
        pytest.skip("another C library than glibc")
    assert faults["kept"] < faults["plain"] / 5
