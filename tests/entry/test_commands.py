"""What each command shows and leaves behind."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from small_runs import small_settings


def test_help_names_every_command(tercet):
    shown = tercet("--help")
    assert shown.code == 0
    for command in ("demo", "train", "tokenizer", "data", "eval", "generate", "chat", "card", "push", "info"):
        assert command in shown.out


@pytest.mark.parametrize(
    "command", [["demo"], ["train"], ["tokenizer", "train"], ["data", "prepare"], ["eval"], ["generate"], ["chat"],
                ["card"], ["push"], ["info"]],
)  # fmt: skip
def test_every_command_explains_itself(tercet, command):
    shown = tercet(*command, "--help")
    assert shown.code == 0
    assert "Usage" in shown.out


def test_train_ends_with_a_summary(tercet, text_file, tmp_path):
    folder = tmp_path / "run"
    shown = tercet("train", "shakespeare", *small_settings(f"data.path={text_file}"), "--output", folder)
    assert shown.code == 0, shown.err
    assert "bits per byte on held-out text" in shown.out
    assert f"tercet generate {folder}" in shown.out
    assert f"{folder}/loss.png" in shown.out
    assert (folder / "loss.png").is_file()


def test_generate_streams_the_continuation(tercet, checkpoint):
    arguments = ["generate", checkpoint, "The", "--max-new-tokens", 8, "--seed", 1]
    first, again = tercet(*arguments), tercet(*arguments)
    assert first.code == 0
    assert first.out.startswith("The")
    assert len(first.out) > len("The\n")
    assert first.out == again.out


def test_greedy_needs_no_seed(tercet, checkpoint):
    arguments = ["generate", checkpoint, "The", "--max-new-tokens", 8, "--temperature", 0]
    assert tercet(*arguments).out == tercet(*arguments).out


def test_generate_without_a_prompt_begins_a_document(tercet, checkpoint):
    assert tercet("generate", checkpoint, "--max-new-tokens", 4).code == 0


def test_eval_agrees_with_the_run_and_is_noted(tercet, checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    measured = json.loads((copy / "results.json").read_text())["evaluation"]
    shown = tercet("eval", copy)
    assert shown.code == 0, shown.err
    assert f"{measured['bits_per_byte']:.4f} bits per byte" in shown.out
    assert "noted in" in shown.out


def test_eval_on_other_text_is_noted_beside_the_runs_own(tercet, checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    before = json.loads((copy / "results.json").read_text())["evaluation"]
    (tmp_path / "other.txt").write_text("Some other text, twice. Some other text, twice.")
    for options in (["--data", tmp_path / "other.txt"], ["--data", tmp_path / "other.txt"], ["--context", 16]):
        shown = tercet("eval", copy, *options)
        assert shown.code == 0, shown.err
    record = json.loads((copy / "results.json").read_text())
    assert record["evaluation"] == before
    assert [(text["name"], text["context"]) for text in record["texts"]] == [("other.txt", 32), ("held-out text", 16)]
    assert record["texts"][0]["num_bytes"] == 47
    assert str(tmp_path) not in (copy / "results.json").read_text()
    assert tercet("card", copy).code == 0
    card = (copy / "README.md").read_text()
    assert "other.txt" not in card, "the name of a file may tell what nobody should know"
    for name, text in zip(("unnamed text 1", "held-out text"), record["texts"], strict=True):
        assert f"| {name} | {text['bits_per_byte']:.4f} |" in card


def test_info_tells_weights_from_hyperparameters(tercet, checkpoint):
    shown = tercet("info", checkpoint)
    assert shown.code == 0
    assert "q_proj" in shown.out
    assert "hidden_size" in shown.out


def test_card_is_written(tercet, checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "README.md").unlink()
    shown = tercet("card", copy, "--repo-id", "someone/small", "--license", "mit")
    assert shown.code == 0, shown.err
    assert "someone/small" in (copy / "README.md").read_text()


def test_tokenizer_train(tercet, text_file, tmp_path):
    shown = tercet("tokenizer", "train", text_file, "--vocab-size", 300, "--output", tmp_path / "tok")
    assert shown.code == 0, shown.err
    assert "300 tokens" in shown.out
    assert len(AutoTokenizer.from_pretrained(tmp_path / "tok")) == 300


def test_data_prepare_then_train(tercet, text_file, tmp_path):
    folder, settings = tmp_path / "run", small_settings(f"data.path={text_file}")
    assert tercet("data", "prepare", "shakespeare", *settings, "--output", folder).code == 0
    shards = {path.name: path.stat().st_mtime_ns for path in (folder / "data").iterdir()}
    shown = tercet("train", "shakespeare", *settings, "--output", folder)
    assert shown.code == 0, shown.err
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "data").iterdir()} == shards
