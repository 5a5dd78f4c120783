"""The wheel, installed elsewhere and run outside the checkout, is the whole product."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import tercet
from installed_wheel import run


@pytest.fixture
def python_prints(wheel_environment, tmp_path) -> Callable[[str], str]:
    """Runs a line of Python in the new environment, outside the checkout."""
    return lambda code: run(wheel_environment / "bin" / "python", "-c", code, cwd=tmp_path).strip()


def test_it_is_the_wheel_that_is_imported(wheel_environment, python_prints):
    for module in ("tercet", "tercet.modeling", "tercet.tokenizer", "tercet.training", "tercet.hub", "tercet.explorer"):
        origin = python_prints(f"import importlib.util; print(importlib.util.find_spec({module!r}).origin)")
        assert Path(origin).is_relative_to(wheel_environment)


def test_version(wheel_environment, tmp_path):
    assert tercet.__version__ in run(wheel_environment / "bin" / "tercet", "--version", cwd=tmp_path)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("tercet.recipes", "demo.yaml"),
        ("tercet.recipes", "accelerate/one_node_fsdp2.yaml"),
        ("tercet.recipes", "slurm.sh"),
        ("tercet.hub", "hub_card.md"),
        ("tercet.tokenizer", "chat_template.jinja"),
        ("tercet.explorer", "page/page.html"),
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


@pytest.mark.slow
def test_demo_runs_outside_the_checkout(wheel_environment, tmp_path):
    output = tmp_path / "demo"
    run(wheel_environment / "bin" / "tercet", "demo", "--steps", "3", "--output", output, cwd=tmp_path)
    assert json.loads((output / "config.json").read_text(encoding="utf-8"))["model_type"] == "tercet"
    assert (output / "model.safetensors").stat().st_size > 100_000
    assert (output / "tokenizer.json").is_file()
