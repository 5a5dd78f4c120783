"""The command as a user runs it, and checkpoints to run it on."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from small_runs import SMALL


@dataclass(frozen=True)
class Shown:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def tercet(monkeypatch, capsys) -> Callable[..., Shown]:
    """Runs `tercet ...` in this process, through its entry point."""
    from tercet.cli import main

    def run(*arguments: object) -> Shown:
        monkeypatch.setattr("sys.argv", ["tercet", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        else:
            code = 0
        shown = capsys.readouterr()
        return Shown(code, shown.out, shown.err)

    return run


@pytest.fixture(scope="session")
def text_file(small_corpus, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("\n\n".join(small_corpus[:20]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def checkpoint(text_file, tmp_path_factory) -> Path:
    """A finished run of the shakespeare recipe on a small text. Shared: a test that changes it works on a copy."""
    from tercet.training.pipeline import train
    from tercet.training.recipe import load_recipe

    folder = tmp_path_factory.mktemp("runs") / "small"
    train(load_recipe("shakespeare", [*SMALL, f"data.path={text_file}"]), output_dir=folder, say=lambda line: None)
    return folder


@pytest.fixture
def untrained(checkpoint, tmp_path) -> Callable[[PreTrainedModel], Path]:
    """Saves a model of 300 tokens with a tokenizer that has a chat template."""

    def save(model: PreTrainedModel, name: str = "untrained") -> Path:
        folder = tmp_path / name
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(checkpoint / file, folder / file)
        return folder

    return save


@pytest.fixture
def fed(monkeypatch) -> list[list[int]]:
    """Token ids of every call of a model that `generate` or `chat` loads, in order."""
    from tercet import loading

    calls: list[list[int]] = []

    def record(module: torch.nn.Module, arguments: tuple, keywords: dict) -> None:
        input_ids = arguments[0] if arguments else keywords["input_ids"]
        calls.append(input_ids[0].tolist())

    def load(folder: Path, device: str | None = None) -> tuple:
        model, tokenizer = loading.load_checkpoint_folder(folder, device)
        model.register_forward_pre_hook(record, with_kwargs=True)
        return model, tokenizer

    monkeypatch.setattr("tercet.generation.load_checkpoint_folder", load)
    monkeypatch.setattr("tercet.chat.load_checkpoint_folder", load)
    return calls
