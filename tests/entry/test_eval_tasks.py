"""Tasks of lm-eval from local files, on a trained checkpoint, without a network."""

import importlib.util
import json
import math
import shutil

import pytest
import torch
import yaml

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'tercet[eval]'"
)

CHOICES = [
    {"question": "The name of", "choices": ["the class", "zzzz qqqq"], "answer": 0},
    {"question": "An expression", "choices": ["xkcd xkcd", "statement"], "answer": 1},
    {"question": "If the value is", "choices": ["a type", "????????"], "answer": 0},
]
TEXTS = ["The statement is executed in the module.", "A class definition defines a class object."]


@pytest.fixture
def task_folder(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, rows in (("choices", CHOICES), ("texts", [{"text": text} for text in TEXTS])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "test_split": "test"}
    tasks = {
        "local_choices": {
            **data,
            "dataset_kwargs": {"data_files": {"test": str(folder / "choices.jsonl")}},
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "local_texts": {
            **data,
            "dataset_kwargs": {"data_files": {"test": str(folder / "texts.jsonl")}},
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
        },
    }
    for name, fields in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **fields, "metadata": {"version": 1.0}}))
    return folder


def nats(model, tokenizer, context, continuation):
    """Of the continuation, as the harness puts a question and an answer together."""
    before, whole = (tokenizer(text)["input_ids"] for text in (context, f"{context} {continuation}"))
    with torch.no_grad():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return -sum(float(scores[at - 1, whole[at]]) for at in range(len(before), len(whole)))


@needs_harness
def test_local_tasks_are_scored_and_noted(tercet, checkpoint, task_folder, tmp_path):
    from tercet.loading import load_checkpoint_folder

    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    shown = tercet("eval", copy, "--tasks", "local_choices,local_texts", "--task-path", task_folder)
    assert shown.code == 0, shown.err
    assert "local_choices" in shown.out
    assert "bits_per_byte" in shown.out
    tasks = json.loads((copy / "results.json").read_text())["tasks"]
    rows = {row["task"]: row for row in tasks["results"]}
    model, tokenizer = load_checkpoint_folder(copy)
    right = sum(
        min(range(2), key=lambda i: nats(model, tokenizer, row["question"], row["choices"][i])) == row["answer"]
        for row in CHOICES
    )
    assert rows["local_choices"]["value"] == pytest.approx(right / 3)
    assert (rows["local_choices"]["num_documents"], rows["local_choices"]["num_fewshot"]) == (3, 0)
    # Each text behind the start token, in windows of the model's context.
    total = 0.0
    for text in TEXTS:
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
        assert len(ids) <= model.config.max_position_embeddings + 1
        with torch.no_grad():
            scores = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        total -= sum(float(scores[at, token]) for at, token in enumerate(ids[1:]))
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert rows["local_texts"]["value"] == pytest.approx(total / math.log(2) / num_bytes, rel=1e-4)
    shown = tercet("card", copy)
    assert shown.code == 0, shown.err
    card = (copy / "README.md").read_text()
    assert "| local_choices | acc |" in card
    assert "type: local_texts" in card  # the Hub's model-index
    assert tasks["harness"] in card


@needs_harness
def test_limit_and_few_shots(tercet, checkpoint, task_folder, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    shown = tercet(
        "eval", copy, "--tasks", "local_choices", "--task-path", task_folder, "--limit", 2, "--num-fewshot", 1
    )
    assert shown.code == 0, shown.err
    tasks = json.loads((copy / "results.json").read_text())["tasks"]
    assert tasks["limit"] == 2
    assert tasks["results"][0]["num_documents"] == 2
    assert tasks["results"][0]["num_fewshot"] == 1


@needs_harness
@pytest.mark.slow  # it reads the names of the harness's thousands of tasks
def test_an_unknown_task_is_named_with_its_neighbours(tercet, checkpoint, task_folder):
    shown = tercet("eval", checkpoint, "--tasks", "local_choises", "--task-path", task_folder)
    assert shown.code == 2
    assert "no such task in lm-eval and" in shown.err
    assert "did you mean local_choices" in shown.err
    assert shown.err.count("\n") == 1


@needs_harness
def test_data_of_a_task_that_is_not_there(tercet, checkpoint, task_folder):
    (task_folder / "choices.jsonl").unlink()
    shown = tercet("eval", checkpoint, "--tasks", "local_choices", "--task-path", task_folder)
    assert shown.code == 2
    assert "choices.jsonl" in shown.err
    assert shown.err.count("\n") == 1


def test_without_the_harness_the_remedy_is_named(tercet, checkpoint, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("tercet.training.harness.version", missing)
    shown = tercet("eval", checkpoint, "--tasks", "arc_easy")
    assert shown.code == 2
    assert shown.err == "tercet: --tasks needs the package lm-eval: pip install 'tercet[eval]'\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "3"], "belong to --tasks"),
        (["--tasks", "x", "--context", "64"], "give one or the other"),
        (["--tasks", ","], "names no task"),
        (["--tasks", "x", "--task-path", "nowhere"], "--task-path nowhere is no folder"),
    ],
)
def test_options_that_do_not_go_together(tercet, checkpoint, options, message):
    shown = tercet("eval", checkpoint, *options)
    assert shown.code == 2
    assert message in shown.err
