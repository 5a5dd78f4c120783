"""Runs that are stopped and gone on with, and what must be the same as in one that was not."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file

import tercet.training.loop as loop_module
from tercet.training.pipeline import train


class Killed(BaseException):
    """What stands for a power cut."""


def silently(line):
    """Where a test does not read what a run says."""


def dying_step(number, before=lambda model: None):
    """A training step that does something else first and dies in the call of this number, counted from 1."""
    real_step, calls = loop_module.training_step, []

    def step(model, *args, **kwargs):
        calls.append(1)
        before(model)
        if len(calls) == number:
            raise Killed
        return real_step(model, *args, **kwargs)

    return step


def train_until_killed(recipe, folder, dies_in_step, before=lambda model: None):
    """Train until the call of this number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "training_step", dying_step(dies_in_step, before))
        with pytest.raises(Killed):
            train(recipe, output_dir=folder, say=silently)
    # What dies with a process here lives on in its thread.
    for thread in threading.enumerate():
        if thread.name == "tercet-save":
            thread.join()


def weights(folder):
    """A folder's model, by name."""
    return load_file(folder / "model.safetensors")


def losses(folder):
    """What was measured in a run's steps, without times and speeds."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("tokens_per_second", "mfu", "duration_s")
    return [{name: value for name, value in record.items() if name not in timed} for record in records]


def assert_same_run(one, other):
    """Weights, the newest optimizer state and metrics of two run folders, bit for bit."""
    assert losses(one) == losses(other)
    ours, theirs = (sorted((folder / "checkpoints").glob("step-*"))[-1] for folder in (one, other))
    assert ours.name == theirs.name
    names = sorted(path.relative_to(theirs) for path in theirs.rglob("*.safetensors"))
    assert names == sorted(path.relative_to(ours) for path in ours.rglob("*.safetensors"))
    assert any("optimizer" in name.name for name in names)
    for path, expected in [(one, other), *((ours / name, theirs / name) for name in names)]:
        _assert_same_tensors(path, expected)


def _assert_same_tensors(path, expected):
    ours, theirs = (weights(item) if item.is_dir() else load_file(item) for item in (path, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()), path
