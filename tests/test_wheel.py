"""The wheel, installed elsewhere and run outside the checkout, is the whole product."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import tercet

NOT_SOURCE = shutil.ignore_patterns(
    ".*", "out", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs", "benchmarks"
)


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints; fails with all that it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(root, tmp_path_factory) -> Path:
    """A new virtual environment that holds the wheel and, by a path entry, the libraries of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves build/ and *.egg-info where it runs: not in the checkout
    shutil.copytree(root, source, ignore=NOT_SOURCE)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", source, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")

    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    python = venv / "bin" / "python"
    # Installed before the path entry is there: pip would find this environment's tercet and call it done.
    run(
        sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check",
        "install", "--no-deps", "--no-index", wheel, cwd=folder,
    )  # fmt: skip
    site_packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    libraries = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    # A path entry does not run the .pth files of the folder it names, so the editable install there stays unseen.
    (site_packages / "libraries.pth").write_text("".join(f"{path}\n" for path in libraries), encoding="utf-8")
    shutil.rmtree(source)
    return venv


@pytest.fixture
def python_prints(environment, tmp_path) -> Callable[[str], str]:
    """Runs a line of Python in the new environment, outside the checkout."""
    return lambda code: run(environment / "bin" / "python", "-c", code, cwd=tmp_path).strip()


def test_it_is_the_wheel_that_is_imported(environment, python_prints):
    for module in ("tercet", "tercet.modeling", "tercet.tokenizer", "tercet.training", "tercet.hub"):
        origin = python_prints(f"import importlib.util; print(importlib.util.find_spec({module!r}).origin)")
        assert Path(origin).is_relative_to(environment)


def test_version(environment, tmp_path):
    assert tercet.__version__ in run(environment / "bin" / "tercet", "--version", cwd=tmp_path)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("tercet.recipes", "demo.yaml"),
        ("tercet.recipes", "accelerate/one_node_fsdp2.yaml"),
        ("tercet.recipes", "slurm.sh"),
        ("tercet.hub", "hub_card.md"),
        ("tercet.tokenizer", "chat_template.jinja"),
        ("tercet", "py.typed"),
    ],
)
def test_data_files_travel(python_prints, package, name):
    code = f"from importlib.resources import files; print(files({package!r}).joinpath({name!r}).is_file())"
    assert python_prints(code) == "True"


def test_every_recipe_travels(root, python_prints):
    listed = python_prints(
        "from importlib.resources import files; print(*(f.name for f in files('tercet.recipes').iterdir()))"
    )
    assert {path.name for path in (root / "recipes").glob("*.yaml")} <= set(listed.split())


def test_demo_runs_outside_the_checkout(environment, tmp_path):
    output = tmp_path / "demo"
    run(environment / "bin" / "tercet", "demo", "--steps", "3", "--output", output, cwd=tmp_path)
    assert json.loads((output / "config.json").read_text(encoding="utf-8"))["model_type"] == "tercet"
    assert (output / "model.safetensors").stat().st_size > 100_000
    assert (output / "tokenizer.json").is_file()
