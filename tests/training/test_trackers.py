"""What trackers get, each in a run of its own; none of them needs a network."""

import importlib.util
import json

import pytest

from tercet.training.pipeline import train


def needs(name):
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"needs {name}: pip install 'tercet[track]'"
    )


def run(make_recipe, folder, tracker):
    train(make_recipe(training={"trackers": [tracker]}), output_dir=folder, say=lambda line: None)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss_nats"] for record in records if "loss_nats" in record}


@needs("tensorboard")
def test_tensorboard_holds_what_the_metrics_hold(make_recipe, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = run(make_recipe, tmp_path / "run", "tensorboard")
    files = list((tmp_path / "run" / "trackers").rglob("events.out.tfevents.*"))
    values = {}
    tags = set()
    for file in files:
        events = EventAccumulator(str(file)).Reload()
        tags |= set(events.Tags()["scalars"])
        if "loss_nats" in events.Tags()["scalars"]:
            values |= {event.step: event.value for event in events.Scalars("loss_nats")}
    assert values == pytest.approx(losses)
    assert {"learning_rate", "grad_norm", "tokens_per_second", "mfu", "validation_bits_per_byte"} <= tags


@needs("wandb")
def test_wandb_offline(make_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run(make_recipe, tmp_path / "run", "wandb")
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"loss_nats" in log.read_bytes()


@needs("trackio")
def test_trackio_locally(make_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run(make_recipe, tmp_path / "run", "trackio")
    assert list((tmp_path / "trackio").rglob("*"))


def test_a_tracker_that_is_missing_is_named(make_recipe, tmp_path, monkeypatch):
    from tercet.training.errors import UserError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"training.trackers names wandb.*pip install 'tercet\[track\]'"):
        run(make_recipe, tmp_path / "run", "wandb")
    assert not (tmp_path / "run").exists()
