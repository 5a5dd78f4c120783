"""Two processes under torchrun that train on a stream: killed, gone on with, and refused as one."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_runs import kill_tree, newest_step
from recorded_run import trained_labels
from resumed_runs import assert_same_run
from streamed_runs import FRACTION, distinct_texts, texts_of_a_rank, trained_texts, write_shards
from transformers import AutoTokenizer

from tercet.training.checkpoints import list_checkpoints
from tercet.training.recipe import recipe_from_fields, recipe_to_yaml
from tercet.training.results import RunResults

NUM_STEPS = 400


@pytest.fixture(scope="module")
def texts(small_corpus) -> list[str]:
    return distinct_texts(small_corpus)


@pytest.fixture(scope="module")
def two_processes(texts, make_fields, tmp_path_factory):
    """Starts a run of two processes in a folder; and the folder of one that nothing has stopped.

    One of the sources has more shards than there are processes, the other fewer.
    """
    home = tmp_path_factory.mktemp("two-processes")
    fields = make_fields(home)
    sources = [
        {"path": str(write_shards(home / "many", texts[:100], 5)), "weight": 2},
        {"path": str(write_shards(home / "one", texts[100:], 1)), "weight": 1},
    ]
    fields["data"] = {
        "sources": sources, "stream": True, "stream_sample_mb": 0.012, "validation_fraction": FRACTION
    }  # fmt: skip
    fields["training"] |= {
        "num_steps": NUM_STEPS, "sequence_length": 128, "global_batch_size": 8, "save_every": 4, "evaluate_every": 200,
        "log_every": 5, "keep_last": 3,
    }  # fmt: skip
    (home / "recipe.yaml").write_text(recipe_to_yaml(recipe_from_fields(fields)))

    def start(folder: Path) -> subprocess.Popen[str]:
        script, recipe = Path(__file__).parents[1] / "recorded_run.py", home / "recipe.yaml"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                   str(script), str(records_of(folder)), str(recipe), "--output", str(folder)]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    run_to_its_end(start(home / "untouched"))
    return start, home / "untouched", home / "recipe.yaml"


def records_of(folder: Path) -> Path:
    """Where a run's processes write down what they learn from."""
    return folder.with_name(f"{folder.name}-records")


def run_to_its_end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return output


def positions(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((list_checkpoints(folder)[-1] / "state").glob("stream-*"))]


@pytest.mark.slow
def test_two_processes_killed_go_on_as_if_they_had_not_been(two_processes, texts, tmp_path):
    """What they end with is that of an untouched run; what they learned from is every document once an epoch."""
    (start, untouched, _), folder = two_processes, tmp_path / "killed"
    begun_at = []
    for _ in range(3):
        begun_at.append(newest_step(folder))
        process, deadline = start(folder), time.monotonic() + 120
        # Far enough for the next life to begin in another epoch, and past the save that a kill at once would hit.
        while newest_step(folder) <= begun_at[-1] + 70 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        ended = process.poll()
        kill_tree(process.pid)
        process.communicate()
        assert ended is None
    begun_at.append(newest_step(folder))
    assert f"going on from step {begun_at[-1]}" in run_to_its_end(start(folder))
    assert_same_run(folder, untouched)
    assert positions(folder) == positions(untouched)
    assert [position["stream"]["rank"] for position in positions(untouched)] == [0, 1]
    assert RunResults.load(folder / "results.json").data == RunResults.load(untouched / "results.json").data
    assert_each_document_once_an_epoch(folder, begun_at, texts)
    assert_each_document_once_an_epoch(untouched, [0], texts)


def assert_each_document_once_an_epoch(folder: Path, begun_at: list[int], texts: list[str]) -> None:
    """By the labels that both processes have learned from: in every epoch of a source, all of it, and nothing twice."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    results = RunResults.load(folder / "results.json")
    had: dict[tuple[str, int], list[str]] = {}  # of a source in an epoch, by both processes
    documents = dict.fromkeys((source.name for source in results.data.sources), 0)
    for rank in range(2):
        labels = trained_labels(records_of(folder), rank, begun_at, NUM_STEPS, 2, tokenizer.eos_token_id)
        assert len(labels) == NUM_STEPS * 8 // 2 * 128
        found = decoded(labels, tokenizer)
        for label, part in zip(documents, (texts[:100], texts[100:]), strict=True):
            of_source = [text for text in found if text in part]
            documents[label] += len(of_source)
            at, epoch = 0, 0
            while at < len(of_source):
                size = len(texts_of_a_rank(Path(label), rank, 2, epoch))
                had.setdefault((label, epoch), []).extend(of_source[at : at + size])
                at, epoch = at + size, epoch + 1
        assert all(text in texts for text in found)
    for label, part in zip(documents, (texts[:100], texts[100:]), strict=True):
        # An epoch that only one process has entered is not whole, either.
        last = min(epoch for name, epoch in had if name == label and len(had[name, epoch]) < len(trained_texts(part)))
        assert last >= 2
        for epoch in range(last):
            assert sorted(had[label, epoch]) == sorted(trained_texts(part))
        for (name, _), some in had.items():
            assert name != label or (len(set(some)) == len(some) and set(some) <= set(trained_texts(part)))
    # The run's own account is of the same documents.
    assert documents == {source.name: source.documents for source in results.data.sources}


def decoded(labels: list[int], tokenizer) -> list[str]:
    """The texts of the documents that the labels have to their ends, each of exactly its tokens."""
    documents: list[list[int]] = [[]]
    for token in labels:
        if token == tokenizer.eos_token_id:
            documents.append([])
        else:
            documents[-1].append(token)
    texts = [tokenizer.decode(ids) for ids in documents[:-1]]
    assert tokenizer(texts)["input_ids"] == documents[:-1]
    return texts


@pytest.mark.slow
def test_one_process_does_not_go_on_for_two(two_processes, tmp_path):
    start, _, recipe = two_processes
    folder = tmp_path / "run"
    process, deadline = start(folder), time.monotonic() + 120
    while not newest_step(folder) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    kill_tree(process.pid)
    process.communicate()
    done = subprocess.run(
        [sys.executable, "-m", "tercet.training", str(recipe), "--output", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"tercet: \S+step-\d+ was saved by 2 processes, and this run has 1: a stream goes on only with as many\. "
        r"Start 2, or prepare the data \(data\.stream: false\)\n",
        done.stderr,
    ), done.stderr


@pytest.mark.slow
def test_a_row_that_one_process_cannot_use_ends_both_with_its_line(two_processes, texts, tmp_path):
    """In the shard of whichever process: its place is told."""
    _, _, recipe = two_processes
    folder = write_shards(tmp_path / "text", texts, 2)
    lines = (folder / "01.jsonl").read_text().splitlines(keepends=True)
    (folder / "01.jsonl").write_text("".join([*lines[:70], "no json\n", *lines[70:]]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "-m", "tercet.training", str(recipe), "--output", str(tmp_path / "run"),
         "--set", f"data.sources=[{{path: {folder}, weight: 1}}]"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode != 0
    assert re.search(r"tercet: .*01\.jsonl, line 71 is not JSON", done.stderr), done.stderr
