"""The benchmark of data runs, keeps what it measured, and counts as it says."""

import json
import subprocess
import sys
import time
from itertools import pairwise

import pytest


@pytest.fixture(scope="module")
def smoke(root, tmp_path_factory):
    """What `--smoke` writes and prints."""
    folder = tmp_path_factory.mktemp("data")
    command = [sys.executable, str(root / "benchmarks" / "data.py"), "--smoke", "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "data.json").read_text()), done.stdout


@pytest.mark.slow  # a dozen processes that each import torch or datasets
def test_the_record_holds_what_was_measured(smoke):
    folder, record, printed = smoke
    assert "--smoke" in record["command"] and record["date"] and record["hardware"]["processor"]
    assert [size["megabytes"] for size in record["preparation"]] == [0.1, 0.2]
    for size in record["preparation"]:
        (ours,), (peer,) = size["runs"]["tercet"], size["runs"]["group_texts"]
        # Of one tokenizer; ours ends each document with a token more.
        assert ours["num_tokens"] == peer["num_tokens"] + size["documents"]
        assert ours["num_dropped"] == 0
        assert 0 < peer["num_dropped"] < peer["num_tokens"]
        for run in (ours, peer):
            assert 30e6 < run["peak_bytes"] < 4e9
            assert all(seconds > 0 for seconds in run["seconds"].values())
        assert peer["num_processes"] >= 3  # the workers are watched as well
    assert set(record["resume"]["seconds"]) == {"0 %", "90 %"}
    assert record["loader"]["demo_tokens_per_second"] > 0
    assert (folder / "data.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "data.md").read_text() == printed
    from data_report import tables

    assert tables(record) + "\n" == printed, "the tables need more than the JSON holds"


def test_a_corpus_is_taken_evenly_and_of_the_size_that_was_asked_for(tmp_path):
    from data import texts, write_corpus

    source = tmp_path / "all.jsonl"
    source.write_text("".join(json.dumps({"text": f"{number:04d}" * 250}) + "\n" for number in range(400)))
    for megabytes, documents in ((0.1, 100), (0.4, 400), (9, 400)):
        found = write_corpus(source, megabytes, tmp_path / "part.jsonl.gz")
        numbers = [int(text[:4]) for text in texts(tmp_path / "part.jsonl.gz")]
        assert len(numbers) == found["documents"] == documents
        assert {b - a for a, b in pairwise(numbers)} == {400 // documents}


def test_memory_of_grandchildren_is_seen():
    from data import watch_memory

    child = "import time; held = bytearray(120_000_000); time.sleep(1)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = time.monotonic()
    peaks = watch_memory(subprocess.Popen([sys.executable, "-c", parent]))
    assert time.monotonic() - started < 30
    assert len(peaks) == 2
    assert max(peaks.values()) > 120e6 > min(peaks.values())


def test_speed_is_tokens_by_seconds_of_all_parts():
    from data_report import ratios, tokens_per_second

    ours = {"num_tokens": 600, "seconds": {"read and tokenize": 2.0, "pack": 1.0}}
    peer = {"num_tokens": 600, "seconds": {"read": 4.0, "tokenize": 5.0, "group_texts": 1.0}}
    assert tokens_per_second(ours) == 200
    assert tokens_per_second(peer) == 60
    assert ratios({"tercet": [ours], "group_texts": [peer]}) == [pytest.approx(200 / 60)]
    assert ratios({"tercet": [ours], "group_texts": [peer]}, without="read") == [2.0]


def test_the_example_of_the_docs_is_what_the_code_prints(root, capsys):
    from data_example import main

    main()
    printed = capsys.readouterr().out
    shown = (root / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = printed.strip("\n").split("\n\n")
    assert len(blocks) == 7
    for block in blocks:
        heading, _, body = block.partition("\n")
        assert f"```\n{body}\n```" in shown, f"docs/data.md lacks the output under {heading!r}"
