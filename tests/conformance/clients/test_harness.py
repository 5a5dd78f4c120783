"""lm-eval by its own command on the folder, beside `tercet eval --tasks`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conformance.clients.packages import environment
from conformance.clients.reference import TEXTS

pytestmark = pytest.mark.slow
CHOICES = [
    {"question": "The name of", "choices": ["the class", "zzzz qqqq"], "answer": 0},
    {"question": "An expression", "choices": ["xkcd xkcd", "statement"], "answer": 1},
    {"question": "If the value is", "choices": ["????????", "a type"], "answer": 0},
]


@pytest.fixture
def tasks(tmp_path) -> Path:
    """Two tasks from local files, as no network is there: one of choices, one of likelihood."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = {"own_choices": CHOICES, "own_texts": [{"text": text} for text in TEXTS]}
    fields = {
        "own_choices": {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "own_texts": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
        },
    }  # fmt: skip
    for name in rows:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test", "metadata": {"version": 1.0}, **fields[name]}  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.client("lm-eval", "`lm-eval run --model hf` on the folder, trust_remote_code; two tasks from files")
def test_lm_eval(trained, tasks, tmp_path, client_record):
    copy = shutil.copytree(trained.folder, tmp_path / "copy")
    names = "own_choices,own_texts"
    ours = subprocess.run(
        [sys.executable, "-m", "tercet", "eval", copy, "--tasks", names, "--task-path", tasks],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ours.returncode == 0, ours.stderr
    measured = json.loads((copy / "results.json").read_text())["tasks"]["results"]
    theirs = subprocess.run(
        [
            sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
            f"pretrained={trained.folder},trust_remote_code=True", "--tasks", names, "--include_path", tasks,
            "--device", "cpu", "--batch_size", "4", "--output_path", tmp_path / "out",
        ],
        env=environment(tmp_path / "modules"), capture_output=True, text=True,
    )  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr
    (written,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(written.read_text())["results"]
    values = {row["task"]: (row["value"], results[row["task"]][f"{row['metric']},none"]) for row in measured}
    assert values.keys() == {"own_choices", "own_texts"}
    assert 0 < values["own_choices"][0] < 1
    for one, other in values.values():
        assert one == pytest.approx(other, rel=1e-5)
    said = ", ".join(f"{name.removeprefix('own_')} {one:.4f} and {other:.4f}" for name, (one, other) in values.items())
    client_record(f"as `tercet eval --tasks`: {said}")
