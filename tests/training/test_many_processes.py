"""Real runs of several processes on this machine, over gloo, under torchrun: what one process does, they do."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tercet.training.batches import evaluation_windows
from tercet.training.checkpoints import list_checkpoints
from tercet.training.export import check_loads_without_tercet
from tercet.training.pipeline import train
from tercet.training.recipe import recipe_to_yaml
from tercet.training.results import RunResults
from tercet.training.token_set import PreparedData

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def silently(line):
    """Where a test does not read what a run says."""


def under_torchrun(recipe_path, output, *options, processes=2, environment=()):
    """A finished call of the command: standard output, standard error and exit code."""
    return subprocess.run(
        [*TORCHRUN, "--nproc_per_node", str(processes), "-m", "tercet.training", str(recipe_path), "--output",
         str(output), *options],
        capture_output=True, text=True, timeout=300, env={**os.environ, **dict(environment)},
    )  # fmt: skip


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_equal_to_noise(one, other):
    """Losses of every step, evaluations, and the weights at the end."""
    for expected, got in zip(records(one), records(other), strict=True):
        assert expected["step"] == got["step"]
        for name in {"loss_nats", "validation_loss_nats", "validation_bits_per_byte", "grad_norm"} & expected.keys():
            assert got[name] == pytest.approx(expected[name], rel=2e-4), name
        assert expected.get("tokens") == got.get("tokens")
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=2e-3, msg=name)


@pytest.fixture
def make_run(make_recipe, tmp_path):
    """A recipe in memory and as a file; without dropout, whose draws differ with the number of processes."""

    def make(**training):
        sections = {"optimizer": training.pop("optimizer", {})}
        recipe = make_recipe(
            model={"hidden_dropout": 0.0, "num_key_value_heads": 1},
            training={"global_batch_size": 8, "per_device_batch_size": 2, **training},
            **sections,
        )
        path = tmp_path / "r.yaml"
        path.write_text(recipe_to_yaml(recipe))
        return recipe, path

    return make


def test_two_processes_train_as_one(make_run, tmp_path):
    """DDP with two accumulated micro-batches, in few steps."""
    recipe, path = make_run(num_steps=3, evaluate_every=3)
    train(recipe, output_dir=tmp_path / "one", say=silently)
    done = under_torchrun(path, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert "2 processes on cpu, weights in every process (DDP), float32" in done.stdout
    assert "8 rows of 32 tokens, 256 a step: 2 rows x 2 accumulated x 2 processes" in done.stdout
    assert_equal_to_noise(tmp_path / "one", tmp_path / "two")
    assert RunResults.load(tmp_path / "two" / "results.json").hardware.num_processes == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_sharded_processes_train_as_one(make_run, tmp_path, name):
    """Saved, evaluated and sampled on the way."""
    recipe, path = make_run(optimizer={"name": name, "ema_decay": 0.9}, sample_every=4, sequence_length=40)
    train(recipe, output_dir=tmp_path / "one", say=silently)
    validation = PreparedData.open(tmp_path / "one" / "data").validation
    # The two have not equally many batches to evaluate, and must run the model equally often.
    assert len(evaluation_windows(validation, 40, 20, 32, eos_token_id=0, pad_token_id=1)) % 2
    done = under_torchrun(path, tmp_path / "two", "--set", "training.sharding=full")
    assert done.returncode == 0, done.stderr
    assert "weights sharded (FSDP2)" in done.stdout
    assert_equal_to_noise(tmp_path / "one", tmp_path / "two")
    assert [sample.prompt for sample in RunResults.load(tmp_path / "two" / "results.json").samples] == ["The"]
    for folder in (tmp_path / "two", list_checkpoints(tmp_path / "two")[-1]):
        assert check_loads_without_tercet(folder, "The", max_new_tokens=3).model_class.endswith("TercetForCausalLM")
    ours, theirs = ({path.name for path in (tmp_path / name).rglob("*")} for name in ("one", "two"))
    assert ours == theirs - {"rng-1.safetensors"}


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes(make_run, tmp_path):
    """Two sharded, then one, then two again: at each stop the state is whole, and the end is that of one process."""
    recipe, path = make_run(keep_last=9)
    train(recipe, output_dir=tmp_path / "one", say=silently)
    output = tmp_path / "other"
    done = under_torchrun(path, output, "--set", "training.sharding=full")
    assert done.returncode == 0, done.stderr
    # Back to the state of its third step, as if it had been killed behind it.
    stop_at(output, 3)
    train(recipe, output_dir=output, say=silently)
    stop_at(output, 6)
    done = under_torchrun(path, output, "--set", "training.sharding=full")
    assert done.returncode == 0, done.stderr
    assert "going on from step 6" in done.stdout
    assert_equal_to_noise(tmp_path / "one", output)


def stop_at(output: Path, step: int) -> None:
    """Leave a run as a kill behind a checkpoint does."""
    for checkpoint in list_checkpoints(output):
        if not checkpoint.name.endswith(f"{step:08d}"):
            shutil.rmtree(checkpoint)
    for name in ("results.json", "README.md", "config.json", "model.safetensors"):
        (output / name).unlink(missing_ok=True)
    assert [int(path.name[5:]) for path in list_checkpoints(output)] == [step]


@pytest.mark.slow
def test_a_killed_process_stops_the_run_and_is_named(make_run, tmp_path):
    """Without torchrun, which would end the others itself: two processes started by hand, as on two machines."""
    _, path = make_run(num_steps=100_000, save_every=5, evaluate_every=100_000)
    output = tmp_path / "run"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29641", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tercet.training", str(path), "--output", str(output)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": "0"},
        )
        for rank in range(2)
    ]  # fmt: skip
    deadline = time.monotonic() + 120
    while not list_checkpoints(output) and time.monotonic() < deadline:
        time.sleep(0.1)
    processes[1].kill()
    killed = time.monotonic()
    _, said = processes[0].communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert processes[0].returncode == 2
    assert "tercet: process 1 has died" in said
    assert "the newest checkpoint is kept" in said
    assert "Traceback" not in said
    assert list_checkpoints(output)


@pytest.mark.slow
def test_an_fsdp_config_of_accelerate_is_followed_on_cpus(make_run, tmp_path):
    """accelerate 1.15 would train unsharded there without a word."""
    _, path = make_run(num_steps=2)
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}
    done = under_torchrun(path, tmp_path / "run", environment=environment.items())
    assert done.returncode == 0, done.stderr
    assert "accelerate's FSDP config is read as training.sharding: full" in done.stdout
    assert "accelerate's mixed_precision bf16 is not used" in done.stdout
    assert "weights sharded (FSDP2), float32" in done.stdout


@pytest.mark.slow
def test_accelerate_launch_of_two_on_cpus_does_not_train_with_one(make_run, tmp_path):
    _, path = make_run()
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "tercet.training",
         str(path), "--output", str(tmp_path / "run")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "asked for several processes on CPUs and started one" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mistake_is_told_by_the_main_process_and_all_stop(make_run, tmp_path):
    _, path = make_run()
    done = under_torchrun(path, tmp_path / "run", "--set", "data.path=/no/such/text")
    assert done.returncode != 0
    assert "/no/such/text" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_to_torchrun_saves(make_run, tmp_path, name):
    """torchrun hands it on. At Ctrl-C the terminal has sent it to every process already: twice is once."""
    _, path = make_run(num_steps=100_000, save_every=100_000, evaluate_every=100_000)
    output = tmp_path / "run"
    process = subprocess.Popen(
        [*TORCHRUN, "--nproc_per_node", "2", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
         "-m", "tercet.training", str(path), "--output", str(output)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, getattr(signal, name))
    said, errors = process.communicate(timeout=60)
    assert f"Stopped by {name}" in said, errors
    assert len(list_checkpoints(output)) == 1


SRUN = """#!/bin/bash
# One machine: what srun starts there. Options of srun's own go first.
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "requeued $2"; fi
"""


@pytest.mark.slow
def test_the_slurm_script_trains_is_stopped_and_queued_again(make_run, root, tmp_path):
    """With stand-ins for srun and scontrol: first USR1 in the middle, then to the end."""
    _, path = make_run(num_steps=40, save_every=1000, evaluate_every=1000)
    programs, output = tmp_path / "bin", tmp_path / "run"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    # torchrun of this environment, and no other.
    (programs / "torchrun").write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (programs / "torchrun").chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "4242", "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "localhost", "PROCESSES_PER_NODE": "2",
    }  # fmt: skip
    command = ["bash", str(root / "recipes" / "slurm.sh"), str(path), str(output), "--set", "training.log_every=1"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    # As Slurm: to the processes of the step, not to the script.
    (launcher,) = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(job.pid)], text=True).split()]
    os.kill(launcher, signal.SIGUSR1)
    said, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert "requeued 4242" in said
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    assert f"finished: {output}" in again.stdout
    assert "going on from step" in again.stdout


TENSOR_PARALLEL = """
import sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, out = sys.argv[1:]
dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, tp_plan="auto").eval()
assert model.model.layers[0].mlp.up_proj.weight.to_local().shape[0] * 2 == model.config.intermediate_size
ids = tokenizer("The module", return_tensors="pt")["input_ids"]
with torch.no_grad():
    logits = model(ids).logits
tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
if dist.get_rank() == 0:
    torch.save({"logits": logits, "tokens": tokens}, out)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_trained_folder_runs_tensor_parallel(make_recipe, tmp_path):
    """Two processes with half of the heads each say what one says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run"
    train(make_recipe(training={"num_steps": 3}), output_dir=folder, say=silently)
    script = tmp_path / "tensor_parallel.py"
    script.write_text(TENSOR_PARALLEL)
    done = subprocess.run(
        [*TORCHRUN, "--nproc_per_node", "2", str(script), str(folder), str(tmp_path / "out.pt")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)("The module", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(got["logits"], model(ids).logits, rtol=0, atol=2e-5)
    assert torch.equal(got["tokens"], model.generate(ids, max_new_tokens=8, do_sample=False))
