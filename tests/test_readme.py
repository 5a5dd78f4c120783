"""The README is executed: its commands run, its Python runs, its links lead somewhere, its figures have a source."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from small_runs import small_settings

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    str(path.relative_to(ROOT)) for path in (*sorted(ROOT.glob("[A-Z]*.md")), *sorted((ROOT / "docs").glob("*.md")))
]
# What sets the machine up rather than uses the package; `make demo` is run by hand and by a fresh clone.
SET_UP = ("git clone", "make ", "source ", "accelerate launch")


def blocks(language: str) -> list[str]:
    """All but those of the walk to the Hub, which tests/hub/test_walk.py runs against one."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for text in found if "YOU/" not in text]


@pytest.fixture(scope="module")
def folder(small_corpus, tmp_path_factory) -> Path:
    """Where the README's commands run: the text it names is there."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "YOUR.txt").write_text("\n\n".join(small_corpus[:20]), encoding="utf-8")
    return folder


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, env={**os.environ, "HF_MODULES_CACHE": str(folder / "hf")}
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow  # a minute: each of them, with Python's start and its libraries
def test_the_commands_run(folder):
    """In the order in which they stand; training is cut down to seconds by more of the same --set options."""
    run([sys.executable, "-m", "tercet", "demo", "--steps", "4"], folder)
    commands = [line for block in blocks("bash") for line in block.splitlines() if line and not line.startswith(SET_UP)]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "tercet", command
        if words[1] == "train":
            words += small_settings()
        assert run([sys.executable, "-m", *words], folder).strip(), command


@pytest.mark.parametrize("index", range(len(blocks("python"))))
def test_the_python_runs(folder, index):
    if not (folder / "out" / "demo").exists():
        run([sys.executable, "-m", "tercet", "demo", "--steps", "4"], folder)
    run([sys.executable, "-c", blocks("python")[index]], folder)


def test_launchers_name_what_is_there():
    import importlib.util

    from tercet.training.recipe import load_recipe

    (command,) = [line for block in blocks("bash") for line in block.splitlines() if "accelerate launch" in line]
    words = shlex.split(command)
    assert importlib.util.find_spec(f"{words[words.index('-m') + 1]}.__main__") is not None
    assert load_recipe(words[words.index("-m") + 2], [words[-1]]).data.path == "FOLDER"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_to_fill_in(page):
    """Neither a note to the writer nor a word in capitals where a figure or a picture was to come."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not re.findall(r"\b(?:TODO|TBD|XXX)\b|^[A-Z]+(?:_[A-Z]+)*$", text, re.MULTILINE)
