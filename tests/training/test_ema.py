"""The running average of the weights: what it is, where it goes, and that it survives."""

import copy

import pytest
import torch
from resumed_runs import assert_same_run, dying_step, silently, train_until_killed, weights
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import tercet.training.loop as loop_module
from tercet.tokenizer import token_ids
from tercet.training.checkpoints import list_checkpoints
from tercet.training.ema import WeightAverage
from tercet.training.evaluation import evaluate
from tercet.training.pipeline import train
from tercet.training.token_set import PreparedData


@pytest.fixture
def recipe(make_recipe):
    return make_recipe(optimizer={"ema_decay": 0.8}, training={"save_every": 3})


def test_it_is_the_average_and_leaves_bad_steps_out():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    expected = model.weight.detach().double()
    for step, is_finite in ((1, True), (2, True), (3, False), (4, True)):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        average.update(step, torch.tensor(is_finite))
        if is_finite:
            decay = min(0.5, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * model.weight.detach().double()
    torch.testing.assert_close(average.averages["weight"].double(), expected, rtol=1e-6, atol=1e-6)


def test_the_weights_come_back_to_the_bit():
    model = nn.Linear(4, 4)
    average, before = WeightAverage(model, 0.9), copy.deepcopy(model.state_dict())
    average.averages["weight"].zero_()
    with average.in_place():
        assert not model.weight.any()
    assert torch.equal(model.weight, before["weight"])


def test_a_run_that_was_killed_has_the_same_average(recipe, tmp_path):
    train(recipe, output_dir=tmp_path / "whole", say=silently)
    train_until_killed(recipe, tmp_path / "killed", 5)
    train(recipe, output_dir=tmp_path / "killed", say=silently)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")  # state/ema.safetensors is one of the files


def test_the_folder_has_the_average_and_its_results(recipe, make_recipe, tmp_path, untouched, monkeypatch):
    final = []
    monkeypatch.setattr(loop_module, "training_step", dying_step(100, final.append))
    outcome = train(recipe, output_dir=tmp_path / "run", say=silently)
    newest = list_checkpoints(tmp_path / "run")[-1]
    averages, raw = load_file(newest / "state" / "ema.safetensors"), weights(newest)
    folder = weights(tmp_path / "run")
    assert folder.keys() == averages.keys() == raw.keys()
    assert all(torch.equal(tensor, averages[name]) for name, tensor in folder.items())
    assert not all(torch.equal(tensor, raw[name]) for name, tensor in folder.items())
    # Training itself is not changed by averaging.
    assert all(torch.equal(tensor, weights(untouched)[name]) for name, tensor in raw.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    ids = token_ids(AutoTokenizer.from_pretrained(tmp_path / "run"))
    data = PreparedData.open(tmp_path / "run" / "data")
    measured = evaluate(model, data.validation, sequence_length=32, **ids.for_rows())
    assert measured.bits_per_byte == pytest.approx(outcome.results.evaluation.bits_per_byte, rel=1e-6)
    assert "decay 0.8" in outcome.results.training.optimizer
