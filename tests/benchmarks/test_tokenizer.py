"""The benchmark of tokenizer training runs, and its tables need nothing but its JSON."""

import gzip
import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_smoke(root, small_corpus, tmp_path):
    file = tmp_path / "corpus.jsonl.gz"
    with gzip.open(file, "wt") as lines:
        for number, text in enumerate(text[start : start + 2000] for text in small_corpus for start in (0, 2000, 4000)):
            if text:
                lines.write(json.dumps({"text": text, "source": ("gcide", "chinese_poetry")[number % 2]}) + "\n")
    command = [
        sys.executable,
        str(root / "benchmarks" / "tokenizer.py"),
        str(file),
        "--smoke",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "tokenizer.json").read_text())
    small, large = record["sections"]["training"]
    for row in (small, large):
        for kind in ("tercet", "direct"):
            assert row["runs"][kind][0]["peak_bytes"] > row["runs"][kind][0]["before_bytes"] * 0.9
        # Whatever fits the budget is trained on as a whole: not one token differs.
        assert row["bytes_per_token"]["tercet"] == row["bytes_per_token"]["direct"]
    assert large["runs"]["tercet"][0]["seen_bytes"] > 2 * small["runs"]["tercet"][0]["seen_bytes"]
    figures = record["sections"]["patterns"]["bytes_per_token"]
    assert len({tuple(row.values()) for row in figures.values()}) > 3
    for words in ("bloom", "clauses", "blanks"):  # all of it fits
        name = next(name for name in figures if name.endswith(f"(words: {words})"))
        assert figures[f"within the budget, `--words {words}`"]["all"] == pytest.approx(figures[name]["all"], rel=0.02)
    from tokenizer_report import tables

    assert tables(record) + "\n" == done.stdout == (tmp_path / "tokenizer.md").read_text()
    assert str(tmp_path) not in done.stdout
