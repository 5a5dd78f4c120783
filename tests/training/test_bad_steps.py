"""Steps whose loss or gradient is not finite, and losses out of the ordinary."""

import re

import numpy as np
import pytest
import torch
from resumed_runs import assert_same_run, dying_step, losses, silently, train_until_killed, weights
from transformers import AutoTokenizer

import tercet.training.loop as loop_module
from tercet.training.checkpoints import list_checkpoints
from tercet.training.errors import UserError
from tercet.training.pipeline import train
from tercet.training.watch import SpikeWatch


def overflowing(*numbers):
    """What makes the gradient infinite in the steps of these numbers, counted from 1 over all calls."""
    calls = []

    def before(model):
        calls.append(1)
        if len(calls) in numbers:
            handle = model.model.norm.weight.register_hook(lambda gradient: handle.remove() or gradient * float("inf"))

    return before


def test_a_bad_step_is_left_out_and_counted(make_recipe, tmp_path, monkeypatch, capsys):
    seen, overflow = [], overflowing(4)

    def watch(model):
        seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        overflow(model)

    monkeypatch.setattr(loop_module, "training_step", dying_step(100, watch))
    outcome = train(make_recipe(model={"hidden_dropout": 0.0}), output_dir=tmp_path / "run", say=silently)
    # seen[i] are the weights before step i + 1.
    assert all(torch.equal(tensor, seen[4][name]) for name, tensor in seen[3].items())
    assert not all(torch.equal(tensor, seen[5][name]) for name, tensor in seen[4].items())
    assert outcome.loop.state.num_bad_steps == 1
    assert outcome.loop.state.num_bad_in_row == 0
    assert re.search(r"step +4 +left out: not finite \(loss [\d.]+, gradient norm (inf|nan)\)", capsys.readouterr().out)
    (left_out,) = [record for record in losses(tmp_path / "run") if "left_out" in record]
    assert left_out == {"step": 4, "left_out": True, "num_bad_steps": 1}
    assert [r["step"] for r in losses(tmp_path / "run") if "loss_nats" in r] == [1, 2, 3, 5, 6, 7, 8]
    tokens = {r["step"]: r["tokens"] for r in losses(tmp_path / "run") if "loss_nats" in r}
    assert tokens[5] - tokens[3] == pytest.approx(4 * 32, abs=8)  # one step's, not two


def test_a_run_with_bad_steps_goes_on_exactly(make_recipe, tmp_path, monkeypatch):
    """Killed between two bad steps: how many there were in a row is remembered."""
    recipe = make_recipe(training={"max_bad_steps": 2, "save_every": 1})
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "training_step", dying_step(100, overflowing(4, 5)))
        train(recipe, output_dir=tmp_path / "whole", say=silently)
    train_until_killed(recipe, tmp_path / "killed", 5, overflowing(4))
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "training_step", dying_step(100, overflowing(1)))  # step 5
        outcome = train(recipe, output_dir=tmp_path / "killed", say=silently)
    assert outcome.loop.state.num_bad_steps == 2
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(("allowed", "stops_in"), [(0, 4), (2, 6)])
def test_too_many_in_a_row_end_the_run(make_recipe, tmp_path, monkeypatch, allowed, stops_in):
    monkeypatch.setattr(loop_module, "training_step", dying_step(100, overflowing(4, 5, 6)))
    with pytest.raises(
        UserError,
        match=rf"diverged in step {stops_in}: loss .*max_bad_steps is {allowed}.*by itself is finite.*document \d+ of "
        r".*learning_rate.*step-0000000[36]",
    ):
        train(make_recipe(training={"max_bad_steps": allowed}), output_dir=tmp_path / "run", say=silently)
    for saved in list_checkpoints(tmp_path / "run"):
        assert all(tensor.isfinite().all() for tensor in weights(saved).values())


def test_the_offending_documents_are_named(make_recipe, tmp_path, text_folder, monkeypatch):
    """A token that two documents have breaks the loss: those of them in the step are named, and no other."""
    text = tmp_path / "text"
    text.mkdir()
    for index in range(40):
        word = "qqqqq" if index in (7, 11) else "plain"
        (text / f"{index:02d}.txt").write_text(f"Number {index} says {word} {word} and is short.")
    recipe = make_recipe(
        data={"path": str(text)},
        model={"tie_word_embeddings": False},
        tokenizer={"vocab_size": 270},
        training={"max_bad_steps": 0, "global_batch_size": 8, "num_steps": 40},
    )

    def poison(model):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
        with torch.no_grad():
            model.model.embed_tokens.weight[tokenizer("qqqqq")["input_ids"][-1]] = float("nan")

    monkeypatch.setattr(loop_module, "training_step", dying_step(100, poison))
    with pytest.raises(UserError, match="diverged in step") as caught:
        train(recipe, output_dir=tmp_path / "run", say=silently)
    named = re.findall(r"document \d+ of \S+ \('(.*?)'\)", str(caught.value))
    assert 1 <= len(named) <= 2
    assert all("qqqqq" in text for text in named)


class TestSpikes:
    def test_only_what_is_far_above_the_recent_losses(self):
        noise = np.random.default_rng(0).normal(3.0, 0.05, 1000)
        watch = SpikeWatch(6.0)
        assert [loss for loss in noise if watch.median_below(loss) is not None] == []
        assert watch.median_below(3.2) is None
        assert watch.median_below(4.0) == pytest.approx(3.0, abs=0.02)
        assert watch.median_below(1.0) is None

    def test_spikes_do_not_hide_those_that_follow(self):
        watch = SpikeWatch(6.0, np.random.default_rng(0).normal(3.0, 0.05, 100).tolist())
        assert [watch.median_below(5.0) is not None for _ in range(10)] == [True] * 10

    def test_the_first_losses_are_compared_with_nothing(self):
        watch = SpikeWatch(6.0)
        assert all(watch.median_below(loss) is None for loss in [9.0, 1.0, 50.0, *[1.0] * 15])

    def test_a_spike_is_reported_and_recorded_over_a_resume(self, make_recipe, tmp_path, monkeypatch, capsys):
        """With a window of a few losses, that a resumed run reads back from its records."""
        monkeypatch.setattr(SpikeWatch, "_ENOUGH", 5)

        recipe = make_recipe(
            training={"save_every": 6}, optimizer={"learning_rate": 1e-5, "matrix_learning_rate": 1e-5}
        )
        train_until_killed(recipe, tmp_path / "run", 7)

        def first(model):
            if getattr(model, "is_shocked", False):
                return
            model.is_shocked = True
            with torch.no_grad():
                model.lm_head.weight.mul_(100)

        monkeypatch.setattr(loop_module, "training_step", dying_step(100, first))
        train(recipe, output_dir=tmp_path / "run", say=silently)
        assert re.search(r"step +7 +loss spike: [\d.]+, recently 5\.\d+", capsys.readouterr().out)
        (spike, *_) = [record for record in losses(tmp_path / "run") if "loss_spike_nats" in record]
        assert spike["step"] == 7
        assert spike["loss_spike_nats"] > spike["recent_median_nats"]
