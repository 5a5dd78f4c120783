"""Every mistake of a user's: one clear line that names the thing and the remedy, exit code 2, nothing half-written."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from small_runs import small_settings
from tercet.modeling import TercetCache, TercetConfig, TercetForCausalLM


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

    @pytest.mark.parametrize(
        "line",
        [
            "generate COPY The",
            "eval COPY --data TEXT",
            "train demo --set tokenizer.path=COPY --set data.path=TEXT --output OUT",
            "train sft --set model.from_checkpoint=COPY --set training.sequence_length=32 --output OUT",
            "tokenizer train --data TEXT --vocab-size 400 --report --compare COPY --output OUT",
        ],
    )
    def test_a_tokenizer_whose_merges_are_of_no_tokens(self, tercet, checkpoint, text_file, tmp_path, line):
        copy = shutil.copytree(checkpoint, tmp_path / "copy")
        tokenizer = json.loads((copy / "tokenizer.json").read_text("utf-8"))
        tokenizer["model"]["merges"].append(["zzzz", "qqqq"])
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
        places = {"COPY": copy, "TEXT": text_file, "OUT": tmp_path / "out"}
        for name, place in places.items():
            line = line.replace(name, str(place))
        assert_refused(tercet(*line.split()), str(copy), "tokenizer.json is damaged", "zzzz")
        assert not (tmp_path / "out").exists()

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

    @pytest.mark.parametrize("command", [["generate"], ["chat"], ["eval"], ["eval", "--tasks", "arc_easy"]])
    @pytest.mark.parametrize("device", ["nonsense", "meta"])
    def test_no_such_device(self, tercet, checkpoint, command, device):
        shown = tercet(command[0], checkpoint, *command[1:], "--device", device)
        assert_refused(shown, f"--device {device}", "cpu")

    @pytest.mark.parametrize("command", [["generate", "--max-new-tokens", 2], ["eval"], ["chat"]])
    def test_a_device_that_is_there(self, tercet, checkpoint, tmp_path, monkeypatch, command):
        monkeypatch.setattr("builtins.input", lambda prompt: "/quit")
        copy = shutil.copytree(checkpoint, tmp_path / "copy")
        shown = tercet(command[0], copy, *command[1:], "--device", "cpu")
        assert shown.code == 0, shown.err

    def test_card_of_a_folder_without_results(self, tercet, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "tercet"}))
        assert_refused(tercet("card", tmp_path), str(tmp_path))


class TestCacheOptions:
    @pytest.fixture
    def llama(self, untrained):
        sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return untrained(LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16)), "llama")

    @pytest.mark.parametrize("command", ["generate", "chat"])
    def test_no_such_kind(self, tercet, checkpoint, command):
        assert_refused(tercet(command, checkpoint, "--cache", "int2"), "int2", "full, int8, int4")

    @pytest.mark.parametrize("command", ["generate", "chat"])
    @pytest.mark.parametrize("option", [["--cache", "int8"], ["--compile"]])
    def test_another_family(self, tercet, llama, command, option):
        prompt = ["The"] if command == "generate" else []
        assert_refused(tercet(command, llama, *prompt, *option), option[0], "LlamaForCausalLM", "tercet import")

    def test_another_family_has_no_prompt_cache(self, tercet, llama, tmp_path):
        shown = tercet("generate", llama, "The", "--prompt-cache", tmp_path / "file")
        assert_refused(shown, "--prompt-cache", "LlamaForCausalLM")
        assert not (tmp_path / "file").exists()

    @pytest.mark.parametrize("command", ["generate", "chat"])
    def test_quantized_and_compiled(self, tercet, checkpoint, command):
        prompt = ["The", "--max-new-tokens", 4] if command == "generate" else []
        assert_refused(tercet(command, checkpoint, *prompt, "--compile", "--cache", "int8"), "--compile", "int8")

    def test_what_cannot_be_compiled(self, tercet, untrained):
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        model = TercetForCausalLM(TercetConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1,
                                               num_attention_heads=2, rope_parameters=rope))  # fmt: skip
        assert_refused(tercet("generate", untrained(model), "The", "--compile"), "--compile", "dynamic")


class TestPromptCache:
    @pytest.fixture
    def file(self, tercet, checkpoint, tmp_path):
        """A prompt cache of the checkpoint; it must be as it was in the end."""
        file = tmp_path / "prompt.safetensors"
        assert tercet("generate", checkpoint, "The string", "--max-new-tokens", 1, "--prompt-cache", file).code == 0
        content = file.read_bytes()
        yield file
        assert file.read_bytes() == content

    @pytest.fixture
    def refuses(self, tercet, checkpoint):
        def check(file, *words, folder=checkpoint, options=()):
            shown = tercet("generate", folder, "The string", "--max-new-tokens", 4, "--prompt-cache", file, *options)
            assert_refused(shown, str(file), *words)
            assert shown.out == ""

        return check

    def test_torn(self, refuses, file, tmp_path):
        for length in (0, 4, 100, file.stat().st_size - 1):
            (tmp_path / "torn").write_bytes(file.read_bytes()[:length])
            refuses(tmp_path / "torn", "torn")

    def test_damaged(self, refuses, file, tmp_path):
        content = bytearray(file.read_bytes())
        content[-1] ^= 255
        (tmp_path / "damaged").write_bytes(content)
        refuses(tmp_path / "damaged", "damaged")

    def test_no_cache(self, refuses, checkpoint, tmp_path):
        (tmp_path / "letter").write_text("dear all, this is a letter and no cache of anything")
        refuses(tmp_path / "letter", "no cache file")
        refuses(checkpoint / "model.safetensors", "no cache file")

    def test_another_architecture(self, refuses, file, untrained):
        model = TercetForCausalLM(TercetConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1,
                                               num_attention_heads=2))  # fmt: skip
        refuses(file, "another model", "hidden_size", folder=untrained(model))

    def test_other_weights(self, refuses, file, checkpoint, untrained):
        torch.manual_seed(1)
        model = TercetForCausalLM(TercetConfig.from_pretrained(checkpoint))
        refuses(file, "other weights", folder=untrained(model))

    def test_another_kind(self, refuses, file, tmp_path, tercet, checkpoint):
        refuses(file, "full", "int8", options=("--cache", "int8"))
        arguments = ["generate", checkpoint, "The string", "--max-new-tokens", 4, "--prompt-cache", tmp_path / "int8"]
        assert tercet(*arguments, "--cache", "int8").code == 0
        refuses(tmp_path / "int8", "int8", "full", options=("--cache", "full"))
        assert_refused(tercet(*arguments, "--compile"), "--compile", "int8")
        assert tercet(*arguments).code == 0

    @pytest.mark.parametrize("rows", [None, 2])
    def test_saved_without_its_prompt_or_with_several(self, refuses, checkpoint, tmp_path, rows):
        model = TercetForCausalLM.from_pretrained(checkpoint)
        ids = torch.ones(rows or 1, 3, dtype=torch.long)
        cache = TercetCache(model.config)
        with torch.no_grad():
            model(ids, cache=cache)
        cache.save(tmp_path / "file", model=model, input_ids=ids if rows else None)
        refuses(tmp_path / "file", "one prompt")

    def test_keys_that_depend_on_the_length(self, tercet, untrained, tmp_path):
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        model = TercetForCausalLM(TercetConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1,
                                               num_attention_heads=2, rope_parameters=rope))  # fmt: skip
        shown = tercet("generate", untrained(model), "The", "--prompt-cache", tmp_path / "file")
        assert_refused(shown, "--prompt-cache", "rope_type")

    def test_places_where_no_file_can_be(self, refuses, tmp_path):
        (tmp_path / "letter").write_text("dear all")
        refuses(tmp_path, "is a folder")
        refuses(tmp_path / "nowhere" / "file", "there is no folder")
        refuses(tmp_path / "letter" / "file", "there is no folder")
        refuses(tmp_path / ("x" * 300), "cannot be used")

    @pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that not even root can write to")
    def test_a_folder_that_cannot_be_written(self, refuses):
        refuses("/proc/self/prompt.safetensors", "writ")

    def test_a_failed_write_leaves_no_file(self, tercet, checkpoint, tmp_path, monkeypatch):
        def fail(*arguments, **keywords):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("tercet.modeling.cache_files_tercet.save_file", fail)
        arguments = ["generate", checkpoint, "The string", "--max-new-tokens", 4]
        shown = tercet(*arguments, "--prompt-cache", tmp_path / "file")
        assert_refused(shown, "cannot be written", "Permission denied")
        assert list(tmp_path.iterdir()) == []


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
        assert "the disk is full" in done.stderr
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
