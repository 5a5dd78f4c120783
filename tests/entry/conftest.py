"""The command as a user runs it, and a checkpoint to run it on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

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
