"""What commands say of a recipe that trains on a stream: no figure that nobody knows."""

import json
from pathlib import Path

import pytest
from streamed_runs import distinct_texts, write_shards

from small_runs import small_settings


@pytest.fixture
def settings(small_corpus, tmp_path) -> list[str]:
    shards = write_shards(tmp_path / "texts", distinct_texts(small_corpus), 3)
    changes = ("data.stream=true", "data.stream_sample_mb=0.02", "data.validation_fraction=0.2")
    return small_settings(f"data.path={shards}", *changes, "data.drop_duplicates=false")


def test_plan_train_info_and_prepare(tercet, settings, tmp_path: Path):
    run = tmp_path / "run"
    shown = tercet("plan", "demo", *settings, "--output", run, "--no-timing")
    assert shown.code == 0, shown.err
    assert "a stream: only reading it tells" in shown.out
    assert "the stream's sample of 0.02 MB" in shown.out
    assert "epochs" not in shown.out

    shown = tercet("train", "demo", *settings, "--output", run)
    assert shown.code == 0, shown.err
    assert "512 tokens (of a stream)" in shown.out
    card = (run / "README.md").read_text()
    assert "| Epochs | a stream, not read to its end |" in card
    assert "Its text was read as a stream" in card
    record = json.loads((run / "results.json").read_text())
    assert f"| train | {record['data']['train']['documents']:,} |" in card

    shown = tercet("data", "info", run)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("A sample of the stream")
    assert "0.02 MB" in shown.out

    shown = tercet("data", "prepare", "demo", *settings, "--output", tmp_path / "prepared")
    assert shown.code == 2
    assert shown.err.startswith("tercet: data.stream: true is to train without preparing")
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "prepared").exists()
