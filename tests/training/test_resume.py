"""A run that was stopped, in any way, ends with the bits of one that was not."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from resumed_runs import Killed, assert_same_run, dying_step, losses, silently, train_until_killed, weights

import tercet.training.loop as loop_module
from tercet.training.checkpoints import CHECKPOINTS, list_checkpoints
from tercet.training.errors import UserError
from tercet.training.pipeline import train
from tercet.training.recipe import recipe_to_yaml
from tercet.training.results import RunResults


@pytest.mark.parametrize("dies_in_step", [1, 2, 5, 8])
def test_killed_and_started_again(make_recipe, tmp_path, untouched, dies_in_step):
    folder = tmp_path / "killed"
    train_until_killed(make_recipe(), folder, dies_in_step)
    assert not (folder / "model.safetensors").exists()
    outcome = train(make_recipe(), output_dir=folder, say=silently)
    assert outcome.results is not None
    assert_same_run(folder, untouched)


DIES_WHILE_SAVING = """
import os, sys
from pathlib import Path
import tercet.training.pipeline as pipeline
from tercet.training.recipe import load_recipe

real_write, calls = pipeline.write_model_folder, []

def dying_write(model, tokenizer, path, weights):
    real_write(model, tokenizer, path, weights)
    calls.append(path)
    if len(calls) == 2:
        (path / "model.safetensors").write_bytes(b"half")
        os._exit(9)

pipeline.write_model_folder = dying_write
pipeline.train(load_recipe(sys.argv[1]), output_dir=Path(sys.argv[2]))
"""


def test_killed_while_saving(make_recipe, tmp_path, untouched):
    """A torn checkpoint is never loaded, and never left to be taken for one."""
    folder, recipe_path = tmp_path / "killed", tmp_path / "r.yaml"
    recipe_path.write_text(recipe_to_yaml(make_recipe()))
    done = subprocess.run([sys.executable, "-c", DIES_WHILE_SAVING, str(recipe_path), str(folder)], capture_output=True)
    assert done.returncode == 9, done.stderr
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000003"]
    assert list((folder / CHECKPOINTS).glob(".writing-*"))
    train(make_recipe(), output_dir=folder, say=silently)
    assert not list((folder / CHECKPOINTS).glob(".writing-*"))
    assert_same_run(folder, untouched)


@pytest.mark.parametrize("dies_in", ["make_samples", "replace_model_folder", "plot_losses"])
def test_killed_after_the_last_step(make_recipe, tmp_path, untouched, monkeypatch, dies_in):
    """Nothing is left to train, and the folder is still to be finished."""
    import tercet.training.pipeline as pipeline_module

    def die(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(pipeline_module, dies_in, die)
        with pytest.raises(Killed):
            train(make_recipe(), output_dir=tmp_path / "run", say=silently)
    outcome = train(make_recipe(), output_dir=tmp_path / "run", say=silently)
    assert outcome.results is not None
    assert_same_run(tmp_path / "run", untouched)
    assert outcome.results.evaluation == RunResults.load(untouched / "results.json").evaluation
    assert outcome.results.training.final_loss_nats == losses(untouched)[-2]["loss_nats"]


def test_text_that_changed_is_noticed(make_recipe, tmp_path, text_folder):
    import shutil

    text = shutil.copytree(text_folder, tmp_path / "text")
    recipe = make_recipe(data={"path": str(text)})
    train_until_killed(recipe, tmp_path / "run", 5)
    (text / "new.txt").write_text("Something that was not there before. " * 50)
    with pytest.raises(UserError, match="the text has changed"):
        train(recipe, output_dir=tmp_path / "run", say=silently)


def test_stopped_by_ctrl_c(make_recipe, tmp_path):
    """A real process, a real signal: it saves, says where and how to go on, and the rest is the same to the bit."""
    recipe_path, output = tmp_path / "r.yaml", tmp_path / "run"
    recipe_path.write_text(
        recipe_to_yaml(make_recipe(training={"num_steps": 150, "save_every": 1000, "evaluate_every": 1000}))
    )
    command = [sys.executable, "-m", "tercet", "train", str(recipe_path), "--output", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "Stopped by SIGINT after step" in stdout
    assert f"to go on: tercet train {recipe_path} --output {output}" in stdout
    (saved,) = list_checkpoints(output)
    assert str(saved) in stdout
    assert not (output / "config.json").exists()

    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "going on from step" in again.stdout
    whole = tmp_path / "whole"
    train(
        make_recipe(training={"num_steps": 150, "save_every": 1000, "evaluate_every": 1000}),
        output_dir=whole,
        say=silently,
    )
    assert_same_run(output, whole)


def test_the_same_seed_gives_the_same_bits(make_recipe, tmp_path, untouched):
    train(make_recipe(), output_dir=tmp_path / "again", say=silently)
    assert_same_run(tmp_path / "again", untouched)


def test_another_seed_does_not(make_recipe, tmp_path, untouched):
    train(make_recipe(seed=4), output_dir=tmp_path / "other", say=silently)
    assert losses(tmp_path / "other") != losses(untouched)


def test_old_checkpoints_go(make_recipe, untouched):
    # 8 steps, saved every 3 and at the end, two kept.
    assert [path.name for path in list_checkpoints(untouched)] == ["step-00000006", "step-00000008"]


def test_tied_weights_stay_tied_through_training_and_resume(make_recipe, tmp_path, untouched, monkeypatch):
    from transformers import AutoModelForCausalLM

    calls = []

    def watch(model):
        calls.append(model.lm_head.weight is model.get_input_embeddings().weight)

    train_until_killed(make_recipe(), tmp_path / "run", 5, watch)
    monkeypatch.setattr(loop_module, "training_step", dying_step(100, watch))
    train(make_recipe(), output_dir=tmp_path / "run", say=silently)
    assert len(calls) == 5 + 5  # killed in the fifth, gone on from the third
    assert all(calls)
    assert_same_run(tmp_path / "run", untouched)
    for folder in (untouched, *list_checkpoints(untouched)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert "lm_head.weight" not in weights(folder)


@pytest.mark.slow  # two processes that each import torch
def test_two_processes_equal_one(make_recipe, tmp_path):
    """DDP over gloo: the same global batches, the same losses to floating-point noise."""
    recipe = make_recipe(model={"hidden_dropout": 0.0})
    recipe_path = tmp_path / "r.yaml"
    recipe_path.write_text(recipe_to_yaml(recipe))
    train(recipe, output_dir=tmp_path / "one", say=silently)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "tercet.training",
         str(recipe_path), "--output", str(tmp_path / "two")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    for one, two in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, abs=2e-4, rel=1e-3)
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=2e-3, msg=name)
