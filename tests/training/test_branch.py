"""A run that begins where another one stood."""

import math

import pytest
from resumed_runs import losses, silently, weights

from tercet.training.checkpoints import list_checkpoints
from tercet.training.errors import UserError
from tercet.training.pipeline import train


@pytest.fixture
def branch(untouched):
    """Step 6 of 8 of the run that nothing has stopped."""
    checkpoint = list_checkpoints(untouched)[0]
    assert checkpoint.name == "step-00000006"
    return str(checkpoint)


def test_a_branch_of_the_same_recipe_is_the_same_run(make_recipe, tmp_path, untouched, branch, capsys):
    outcome = train(make_recipe(training={"branch_from": branch}), output_dir=tmp_path / "run", say=silently)
    ours, theirs = weights(tmp_path / "run"), weights(untouched)
    assert all((tensor == theirs[name]).all() for name, tensor in ours.items())
    assert losses(tmp_path / "run") == [record for record in losses(untouched) if record["step"] > 6]
    assert outcome.results.training.num_steps == 8
    assert outcome.results.training.tokens_seen == pytest.approx(8 * 4 * 32, rel=0.05)
    assert f"branches from {branch}, step 6; different in its recipe: nothing" in capsys.readouterr().out


def test_a_decay_from_a_stable_checkpoint(make_recipe, tmp_path, branch, capsys):
    """Four more steps in which the learning rate falls to its end from where it stood."""
    recipe = make_recipe(
        training={"branch_from": branch, "num_steps": 10}, optimizer={"decay_fraction": 0.4, "final_fraction": 0.0}
    )
    train(recipe, output_dir=tmp_path / "run", say=silently)
    rates = [record["learning_rate"] for record in losses(tmp_path / "run") if "learning_rate" in record]
    assert rates == pytest.approx([5e-3 * share for share in (1.0, 0.75, 0.5, 0.25)])
    said = capsys.readouterr().out
    assert "different in its recipe: optimizer.decay_fraction, training.num_steps" in said


def test_its_own_checkpoints_come_first(make_recipe, tmp_path, branch):
    recipe = make_recipe(training={"branch_from": branch, "max_hours": 1e-6})
    assert train(recipe, output_dir=tmp_path / "run", say=silently).loop.state.step == 7
    again = make_recipe(training={"branch_from": branch})
    outcome = train(again, output_dir=tmp_path / "run", say=silently)
    assert outcome.loop.state.step == 8
    assert math.isfinite(outcome.loop.loss_nats)


def test_a_checkpoint_that_is_not_there_is_known_before_the_text_is_read(make_recipe, tmp_path):
    """Preparing may take hours; where the run has a checkpoint of its own, the other one may be gone."""
    said, folder = [], tmp_path / "run"
    recipe = make_recipe(training={"branch_from": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match=r"training\.branch_from .*nowhere is no checkpoint of a run"):
        train(recipe, output_dir=folder, say=said.append)
    assert said == []
    assert not folder.exists()


def test_what_cannot_be_branched_from(make_recipe, tmp_path, untouched, branch, text_folder):
    def refused(match, **sections):
        sections["training"] = {"branch_from": branch, **sections.get("training", {})}
        with pytest.raises(UserError, match=match):
            train(make_recipe(**sections), output_dir=tmp_path / "run", say=silently)
        assert not (tmp_path / "run").exists()

    refused("is no checkpoint of a run", training={"branch_from": str(untouched)})
    refused("has done 6 steps, and training.num_steps is 6", training={"num_steps": 6})
    refused(
        r"another model \(different: .*rope", model={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    )
    refused("the text has changed", data={"validation_fraction": 0.3}, tokenizer={"path": str(untouched)})
    refused("cannot be gone on from", optimizer={"name": "adamw"})
