"""The record of a run: what goes in comes out, and nothing that is not a measure goes in."""

import json
import math
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tercet.training import hardware
from tercet.training.results import (
    Data,
    Evaluation,
    ModelFacts,
    RunResults,
    Sample,
    Source,
    Split,
    TaskResult,
    Tasks,
    TokenizerFacts,
    Training,
    write_atomically,
)


@pytest.fixture
def results() -> RunResults:
    split = Split(documents=1, tokens=2, bytes=3)
    return RunResults(
        tercet_version="0.1.0",
        date="2026-01-02T03:04:05+00:00",  # type: ignore[arg-type]  # read as ISO, as from the file
        versions=hardware.versions(),
        hardware=hardware.describe_hardware(num_processes=2),
        data=Data(sources=[Source(name="poems", documents=2, bytes=6)], language=["en"], train=split, validation=split),
        tokenizer=TokenizerFacts(vocab_size=300, bytes_per_token=1.5),
        model=ModelFacts(num_parameters=10, num_non_embedding_parameters=4),
        training=Training(
            num_steps=1,
            tokens_seen=2,
            epochs=1.0,
            duration_s=0.5,
            tokens_per_second=4.0,
            optimizer="AdamW",
            schedule="cosine",
            precision="float32",
            final_loss_nats=5.5,
        ),
        evaluation=Evaluation(loss_nats=1.0, perplexity=math.e, bits_per_byte=1.1, num_tokens=2, num_bytes=3),
        samples=[Sample(prompt="日", text="本\u2028\n", settings="greedy")],
    )


def test_save_and_load_give_the_same(results: RunResults, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.save(path)
    assert RunResults.load(path) == results
    assert json.loads(path.read_text())["samples"][0]["prompt"] == "日"
    assert [item.name for item in tmp_path.iterdir()] == ["results.json"]


def test_nan_is_refused_when_made_and_when_saved(results: RunResults, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Evaluation(loss_nats=math.nan, perplexity=1.0, bits_per_byte=1.0, num_tokens=1, num_bytes=1)
    smuggled = results.model_copy(
        update={"training": results.training.model_copy(update={"duration_s": math.inf})}
    )  # model_copy does not validate
    with pytest.raises(ValueError, match="JSON compliant"):
        smuggled.save(tmp_path / "results.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"model": {"num_parameters": 0, "num_non_embedding_parameters": 0}}, "model.num_parameters: .*greater"),
        ({"date": "yesterday"}, "date: "),
        ({"evaluation": {"loss_nats": 1.0}}, "evaluation.perplexity: Field required"),
    ],
)
def test_load_names_the_field_on_one_line(results: RunResults, tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**results.model_dump(mode="json"), **change}))
    with pytest.raises(ValueError, match=message) as caught:
        RunResults.load(path)
    assert "\n" not in str(caught.value)
    assert "tercet eval" in str(caught.value)


def test_load_refuses_nan_in_the_file(results: RunResults, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.save(path)
    path.write_text(path.read_text().replace('"bits_per_byte": 1.1', '"bits_per_byte": NaN'))
    with pytest.raises(ValueError, match=r"evaluation\.bits_per_byte"):
        RunResults.load(path)


def test_load_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is missing: no run of Tercet ended here; `tercet train`"):
        RunResults.load(tmp_path / "results.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_hardware_is_this_machine() -> None:
    machine = hardware.describe_hardware("cpu", num_processes=3)
    assert machine.device == "cpu"
    assert machine.num_processes == 3
    assert machine.num_threads == torch.get_num_threads()
    assert machine.num_cores == hardware.usable_cores()
    assert machine.processor
    versions = hardware.versions()
    assert versions.python == platform.python_version()
    assert versions.torch.split("+")[0] == torch.__version__.split("+")[0]


def test_tasks_of_one_harness_are_kept_side_by_side() -> None:
    def tasks(harness: str, *rows: tuple[str, float, int]) -> Tasks:
        results = [
            TaskResult(task=task, metric="acc", value=value, num_fewshot=shots, num_documents=3)
            for task, value, shots in rows
        ]
        return Tasks(harness=harness, date=datetime(2026, 1, 2, tzinfo=UTC), results=results)

    earlier = tasks("lm-eval 1", ("a", 0.1, 0), ("b", 0.2, 0))
    now = tasks("lm-eval 1", ("b", 0.3, 0), ("b", 0.4, 5))
    kept = [(row.task, row.value) for row in now.beside(earlier).results]
    assert kept == [("a", 0.1), ("b", 0.3), ("b", 0.4)]
    assert now.beside(None) == now
    assert tasks("lm-eval 2", ("c", 0.5, 0)).beside(earlier).results[0].task == "c"
    assert len(tasks("lm-eval 2", ("c", 0.5, 0)).beside(earlier).results) == 1
