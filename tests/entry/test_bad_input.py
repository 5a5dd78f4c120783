"""Every mistake of a user's: one clear line that names the thing and the remedy, exit code 2, nothing half-written."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from small_runs import small_settings


def assert_refused(shown, *words):
    assert shown.code == 2, (shown.out, shown.err)
    lines = [line for line in shown.err.splitlines() if line.strip()]
    assert len(lines) == 1, shown.err
    assert lines[0].startswith("tercet: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture
def train_on(tercet, tmp_path):
    """Trains on a file of this content, with these settings; the output folder must not be there afterwards."""

    def run(content: bytes | None, *settings: str, name: str = "text.txt"):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        shown = tercet(
            "train", "shakespeare", *small_settings(f"data.path={path}", *settings), "--output", tmp_path / "out"
        )
        assert not (tmp_path / "out").exists()
        return shown

    return run


ENOUGH = b"The quick brown fox jumps over the lazy dog. " * 400


class TestText:
    def test_missing(self, train_on):
        assert_refused(train_on(None), "text.txt")

    def test_empty(self, train_on):
        assert_refused(train_on(b""), "text.txt", "empty")

    def test_binary(self, train_on):
        assert_refused(train_on(b"\x7fELF\x00\x00\x01" * 100), "text.txt")

    def test_wrong_encoding(self, train_on):
        assert_refused(train_on("Grüße aus Köln".encode("latin-1") * 50), "text.txt", "UTF-8")

    def test_no_json(self, train_on):
        assert_refused(train_on(b'{"text": "fine"}\n{"text": broken\n', name="text.jsonl"), "text.jsonl", "2")

    def test_missing_column(self, train_on):
        assert_refused(train_on(b'{"body": "fine"}\n' * 3, name="text.jsonl"), "text", "body")

    def test_smaller_than_a_row(self, train_on):
        text = "".join(chr(33 + index % 90) for index in range(300)).encode()
        shown = train_on(text, "tokenizer.vocab_size=260", "training.sequence_length=4096", "model.hidden_size=8")
        assert_refused(shown, "4096", "sequence_length")

    def test_smaller_than_its_vocabulary(self, train_on):
        assert_refused(train_on(ENOUGH, "tokenizer.vocab_size=5000"), "tokenizer.vocab_size", "5000")


class TestRecipe:
    def test_unknown_key(self, train_on):
        assert_refused(train_on(ENOUGH, "training.lerning_rate=1"), "training.lerning_rate")

    def test_meaningless_combination(self, train_on):
        assert_refused(train_on(ENOUGH, "model.num_attention_heads=3"), "hidden_size", "num_attention_heads")

    def test_no_such_recipe(self, tercet):
        assert_refused(tercet("train", "nothing.yaml"), "nothing.yaml", "demo")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
    def test_device_that_is_not_there(self, train_on):
        assert_refused(train_on(ENOUGH, "training.device=cuda"), "training.device", "cuda")


def test_output_folder_that_holds_something_else(tercet, text_file, tmp_path):
    (tmp_path / "letter.txt").write_text("dear all")
    shown = tercet("train", "shakespeare", *small_settings(f"data.path={text_file}"), "--output", tmp_path)
    assert_refused(shown, str(tmp_path), "letter.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


class TestCheckpoint:
    @pytest.mark.parametrize("command", ["generate", "eval", "info", "chat"])
    def test_no_folder(self, tercet, tmp_path, command):
        assert_refused(tercet(command, tmp_path / "nothing"), "nothing")

    @pytest.mark.parametrize("command", ["generate", "eval", "info"])
    def test_empty_folder(self, tercet, tmp_path, command):
        assert_refused(tercet(command, tmp_path), str(tmp_path))

    @pytest.mark.parametrize("command", ["generate", "eval", "info"])
    def test_another_architecture(self, tercet, tmp_path, command):
        BertForMaskedLM(
            BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        ).save_pretrained(tmp_path)
        assert_refused(tercet(command, tmp_path), "BertForMaskedLM")

    def test_damaged_weights(self, tercet, checkpoint, tmp_path):
        import shutil

        copy = shutil.copytree(checkpoint, tmp_path / "copy")
        weights = (copy / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        assert_refused(tercet("generate", copy, "The"), str(copy))

    def test_a_model_of_other_shape_cannot_be_resumed(self, tercet, text_file, tmp_path):
        settings = small_settings(f"data.path={text_file}")
        assert tercet("train", "shakespeare", *settings, "--output", tmp_path / "out").code == 0
        shown = tercet("train", "shakespeare", *settings, "--set", "model.hidden_size=32", "--output", tmp_path / "out")
        assert_refused(shown, "model.hidden_size", "--restart")

    def test_more_tokens_than_learned_positions(self, tercet, checkpoint, tmp_path):
        import shutil

        GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=1, n_positions=16)).save_pretrained(
            tmp_path
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(checkpoint / name, tmp_path / name)
        assert_refused(tercet("generate", tmp_path, "The", "--max-new-tokens", 100), "16 learned positions")

    def test_card_of_a_folder_without_results(self, tercet, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "tercet"}))
        assert_refused(tercet("card", tmp_path), str(tmp_path))


def test_tokenizer_vocabulary_too_small(tercet, text_file, tmp_path):
    shown = tercet("tokenizer", "train", text_file, "--vocab-size", 100, "--output", tmp_path / "tok")
    assert_refused(shown, "100", "260")
    assert not (tmp_path / "tok").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can only be mounted by root")
def test_full_disk(text_file, tmp_path):
    """A real file system with room for the tokenizer and the data, not for the checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mount is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        command = [sys.executable, "-m", "tercet", "train", "shakespeare",
                   *small_settings(f"data.path={text_file}", "model.hidden_size=128", "model.intermediate_size=512"),
                   "--output", str(disk / "out")]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
        assert done.returncode == 2, done.stderr
        assert "tercet: the disk is full" in done.stderr
        assert "Traceback" not in done.stderr
        assert not list((disk / "out").glob("checkpoints/*"))
        assert not (disk / "out" / "config.json").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_ctrl_c_before_training_is_one_line(tercet, text_file, tmp_path, monkeypatch):
    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("tercet.training.preparation.train_tokenizer", interrupt)
    shown = tercet("train", "shakespeare", *small_settings(f"data.path={text_file}"), "--output", tmp_path / "out")
    assert_refused(shown, "stopped", "same command")
