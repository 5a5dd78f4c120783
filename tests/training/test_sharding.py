"""Sharded training (FSDP2 over gloo) takes the steps of training with whole weights."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tercet.modeling import TercetForCausalLM
from tercet.training.sharded_muon import rows_by_process
from tercet.training.sharding import part_like, whole


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Two processes, started once: what each optimizer's steps came to."""
    output = tmp_path_factory.mktemp("sharded") / "steps"
    script = Path(__file__).with_name("sharded_steps.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script), str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(params=["adamw", "muon"])
def found(request, steps):
    result = torch.load(f"{steps}-{request.param}.pt", weights_only=True)
    return {**result, "folder": Path(f"{steps}-{request.param}")}


def test_the_steps_are_those_of_whole_weights(found):
    """Two accumulated micro-batches in each of two processes, against one batch in one; uneven shards."""
    for expected, got in (*found["losses"], *found["norms"]):
        assert got == pytest.approx(expected, rel=1e-5)
    assert found["norms"][0][0] > 0.5  # clipped
    assert found["losses"][-1] != found["losses"][0]
    for name, tensor in found["alone"].items():
        torch.testing.assert_close(found["sharded"][name], tensor, rtol=0, atol=5e-5, msg=name)


def test_weights_are_shards_outside_of_a_step(found):
    assert found["kinds"] == ["DTensor"]
    assert found["parts"]
    assert found["tied"]


def test_a_whole_copy_is_the_plain_model(found):
    assert found["class"] == "TercetForCausalLM"
    assert found["random_state_kept"]
    assert torch.equal(*found["generated"])
    model = TercetForCausalLM.from_pretrained(found["folder"])
    assert (found["folder"] / "modeling_tercet.py").exists()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, found["sharded"][name]), name


def test_bfloat16_is_for_the_blocks_alone(steps):
    found = torch.load(f"{steps}-bfloat16.pt", weights_only=True)
    assert found["blocks"] == ["torch.bfloat16"]
    assert found["kept"] == ["torch.float32"]
    # The number of tokens that the loss is divided by is not rounded to bfloat16, which would be 1000.
    assert found["losses"][0] / found["losses"][1] == pytest.approx(1001, rel=1e-5)


@pytest.mark.parametrize("num_rows", range(1, 12))
@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_rows_are_dealt_out_as_torch_deals_them(num_rows, num_processes):
    chunks = [len(chunk) for chunk in torch.arange(num_rows).chunk(num_processes)]
    assert rows_by_process(num_rows, num_processes) == chunks + [0] * (num_processes - len(chunks))


def test_without_shards_nothing_changes():
    layer = torch.nn.Linear(3, 2)
    assert whole(layer.weight) is layer.weight
    assert part_like(layer.weight, layer.bias) is layer.weight
