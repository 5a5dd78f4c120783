"""The plans for several devices, run on two CPU processes: the numbers of one process."""

import fnmatch
import os
import subprocess
import sys

import pytest
import torch

from tercet.modeling import TercetForCausalLM

# Tensor parallel: each process holds half of the heads and of the feed-forward layer.
TENSOR_PARALLEL = """
import sys
import torch
import torch.distributed as dist
from tercet.modeling import TercetForCausalLM

folder, ids_path, out = sys.argv[1:]
dist.init_process_group("gloo")
model = TercetForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
assert model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0] * 2 == model.config.hidden_size
ids = torch.load(ids_path, weights_only=True)
logits = model(ids).logits
loss = model(ids, labels=ids).loss
loss.backward()
gradient = model.model.layers[0].self_attn.q_norm.weight.grad
tokens = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=-1)
if dist.get_rank() == 0:
    full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    torch.save({"logits": logits.detach(), "tokens": tokens, "q_norm": full.detach()}, out)
dist.destroy_process_group()
"""


@pytest.mark.slow  # two processes that each import torch
def test_tensor_parallel_equals_one_process(modern_model, make_ids, tmp_path):
    ids = make_ids(2, 9)
    modern_model.save_pretrained(tmp_path / "model")
    torch.save(ids, tmp_path / "ids.pt")
    script = tmp_path / "tp.py"
    script.write_text(TENSOR_PARALLEL)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script),
         str(tmp_path / "model"), str(tmp_path / "ids.pt"), str(tmp_path / "out.pt")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    model = TercetForCausalLM.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(got["logits"], model(ids).logits.detach(), rtol=0, atol=2e-5)
    assert torch.equal(got["tokens"], model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=-1))
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close(got["q_norm"], model.model.layers[0].self_attn.q_norm.weight.grad, rtol=1e-4, atol=1e-5)


def test_every_projection_is_in_a_plan(model):
    """Whatever the kind of decoder, a rank knows which way each of its matrices is cut, and of no other module."""
    plan = model.config.base_model_tp_plan
    for name, module in model.model.layers.named_modules(prefix="layers"):
        if isinstance(module, torch.nn.Linear):
            assert any(fnmatch.fnmatch(name, pattern) for pattern in plan), name
    names = [name for name, _ in model.model.named_modules()]
    for pattern in plan:
        assert fnmatch.filter(names, pattern), f"the plan names {pattern}, which this model lacks"
    assert "base_model_tp_plan" not in model.config.to_dict()
    assert set(model.config.base_model_pp_plan) == {"embed_tokens", "layers", "norm"}
