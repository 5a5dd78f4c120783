"""Two processes under torchrun that train on a stream: killed, gone on with, and refused as one."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_runs import kill_tree, newest_step
from resumed_runs import assert_same_run
from streamed_runs import FRACTION, distinct_texts, trained_texts, write_shards

from tercet.training.checkpoints import list_checkpoints
from tercet.training.recipe import recipe_from_fields, recipe_to_yaml
from tercet.training.results import RunResults


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
        "num_steps": 400, "sequence_length": 128, "global_batch_size": 8, "save_every": 4, "evaluate_every": 200,
        "log_every": 5, "keep_last": 3,
    }  # fmt: skip
    (home / "recipe.yaml").write_text(recipe_to_yaml(recipe_from_fields(fields)))

    def start(folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                   "-m", "tercet.training", str(home / "recipe.yaml"), "--output", str(folder)]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    run_to_its_end(start(home / "untouched"))
    return start, home / "untouched", home / "recipe.yaml"


def run_to_its_end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return output


def positions(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((list_checkpoints(folder)[-1] / "state").glob("stream-*"))]


@pytest.mark.slow
def test_two_processes_killed_go_on_as_if_they_had_not_been(two_processes, texts, tmp_path):
    (start, untouched, _), folder = two_processes, tmp_path / "killed"
    for _ in range(3):
        begun_at, process, deadline = newest_step(folder), start(folder), time.monotonic() + 120
        while newest_step(folder) <= begun_at and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        ended = process.poll()
        kill_tree(process.pid)
        process.communicate()
        assert ended is None
    run_to_its_end(start(folder))
    assert_same_run(folder, untouched)
    assert positions(folder) == positions(untouched)
    assert [position["stream"]["rank"] for position in positions(untouched)] == [0, 1]
    # Both have read on their own: together about the two sources' epochs that their places tell of.
    results = RunResults.load(untouched / "results.json")
    assert results.data == RunResults.load(folder / "results.json").data
    assert results.data.stream is not None
    read = {source.name: source.documents for source in results.data.sources}
    for label, part in zip(read, (texts[:100], texts[100:]), strict=True):
        epochs = [position["stream"]["positions"][label]["epoch"] for position in positions(untouched)]
        assert min(epochs) * len(trained_texts(part)) <= read[label] <= (max(epochs) + 1) * len(trained_texts(part))
        assert max(epochs) >= 1


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
        r"tercet: \S+step-\d+ was saved by 2 process\(es\), and this run has 1: a stream goes on only with as many\. "
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
