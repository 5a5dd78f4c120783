"""`tercet train` on a stream of the Hub: shards, faults, a branch that moves on, and a Hub that is gone."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from hub_server import HubServer
from hub_server.clients import answer_of, run_client, run_python
from resumed_runs import assert_same_run
from streamed_runs import FRACTION, distinct_texts

LOAD = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
logits = model(**tokenizer("Document", return_tensors="pt")).logits
print(json.dumps([type(model).__name__, bool(logits.isfinite().all())]))
"""


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), file)
    return file.getvalue()


@pytest.fixture
def dataset(hub: HubServer, small_corpus):
    """Four shards of 40 documents."""
    texts = distinct_texts(small_corpus, 160)
    dataset = hub.create("user/shards", "dataset")
    dataset.add({f"data/train-{shard:05d}-of-00004.parquet": parquet(texts[shard::4]) for shard in range(4)})
    return dataset


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    fields = {
        "output_dir": "run",
        "seed": 3,
        "data": {"path": "user/shards", "stream": True, "stream_sample_mb": 0.01, "validation_fraction": FRACTION},
        "tokenizer": {"vocab_size": 300},
        "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_dropout": 0.1},
        "optimizer": {"warmup_steps": 2},
        "training": {
            "num_steps": 30, "sequence_length": 128, "global_batch_size": 4, "per_device_batch_size": 2,
            "device": "cpu", "log_every": 1, "evaluate_every": 15, "save_every": 5,
        },
        "samples": {"prompts": ["The"], "max_new_tokens": 5},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def train(hub: HubServer, recipe: Path, folder: Path, *settings: str, **options):
    words = [word for setting in settings for word in ("--set", setting)]
    return run_client(hub, [sys.executable, "-m", "tercet", "train", recipe, "--output", folder, *words], **options)


def back_to(folder: Path, step: int) -> None:
    """As a kill behind this checkpoint leaves a run."""
    for path in (folder / "checkpoints").glob("step-*"):
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)
    for name in ("results.json", "README.md", "config.json", "model.safetensors"):
        (folder / name).unlink()


@pytest.mark.slow
def test_a_run_on_a_stream_of_the_hub(hub: HubServer, dataset, recipe: Path, tmp_path: Path):
    """Trained through faults and loaded; gone on with in the commit that it began with, whatever came after."""
    hub.faults.add(r"GET /content/", cut=2000, after=5)
    hub.faults.add(r"GET /content/", status=503, after=8)
    done = train(hub, recipe, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert hub.faults.are_over
    assert "1 source, 4 shards, read while training" in done.stdout
    assert answer_of(run_python(hub, LOAD, tmp_path / "run")) == ["TercetForCausalLM", True]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["data"]["sources"][0]["hub_id"] == "user/shards"
    assert results["data"]["sources"][0]["documents"] == results["data"]["train"]["documents"] > 20
    assert results["evaluation"]["bits_per_byte"] > 0
    assert "datasets:\n- user/shards\n" in (tmp_path / "run" / "README.md").read_text()
    record = json.loads((tmp_path / "run" / "data" / "stream.json").read_text())
    assert record["origins"]["user/shards"]["commit"] == dataset.history()[0].oid

    shutil.copytree(tmp_path / "run", tmp_path / "other")
    back_to(tmp_path / "other", 25)
    dataset.add({"data/train-00000-of-00004.parquet": parquet(["all of it is new"] * 99)})
    done = train(hub, recipe, tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert "going on from step 25" in done.stdout
    assert_same_run(tmp_path / "other", tmp_path / "run")


@pytest.mark.slow
def test_a_hub_that_stays_away_ends_the_run_with_its_checkpoint(hub: HubServer, dataset, recipe: Path, tmp_path: Path):
    """In the last of the files that the steps behind the checkpoint read."""
    done = train(hub, recipe, tmp_path / "run", "training.num_steps=10")
    assert done.returncode == 0, done.stderr
    back_to(tmp_path / "run", 5)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    num_before = len(hub.requests_to(r"GET /content/"))
    assert train(hub, recipe, tmp_path / "copy", "training.num_steps=10").returncode == 0
    num_read = len(hub.requests_to(r"GET /content/")) - num_before
    hub.faults.add(r"GET /content/", status=404, after=num_read - 1, times=1000)
    done = train(hub, recipe, tmp_path / "run", "training.num_steps=10")
    assert done.returncode == 2
    assert re.search(r"tercet: Hub dataset 'user/shards' .*goes on from \S+step-00000005", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    hub.faults.clear()
    assert train(hub, recipe, tmp_path / "run", "training.num_steps=10").returncode == 0
