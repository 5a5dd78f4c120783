"""`tercet plan` as a user sees it; `tercet train --max-hours`."""

import json

import pytest

from small_runs import small_settings
from tercet.training.recipe import load_recipe


def test_the_tables_and_the_same_as_json(tercet, text_file, tmp_path):
    arguments = ["plan", "shakespeare", *small_settings(f"data.path={text_file}"), "--output", tmp_path / "run"]
    shown = tercet(*arguments)
    assert shown.code == 0, shown.err
    for part in ("Parameters", "Memory", "Work", "Disk", "optimizer states", "compute-optimal", "time of the run"):
        assert part in shown.out
    figures = json.loads(tercet(*arguments, "--no-timing", "--json").out)
    assert f"{figures['num_parameters']:,}" in shown.out
    assert figures["duration"] is None
    assert figures["num_tokens"] == 4 * 4 * 32
    assert figures["memory"]["peak"] > sum(figures["parameters"].values()) * 4
    assert not (tmp_path / "run").exists()  # a plan leaves nothing


def test_what_cannot_fit_is_one_line_and_exit_code_2(tercet, text_file):
    settings = small_settings(f"data.path={text_file}")
    shown = tercet("plan", "shakespeare", *settings, "--device-memory", "1MB", "--json")
    assert shown.code == 2
    assert shown.err.startswith("tercet: memory: the step needs ")
    assert "are free on another machine; what would fit: " in shown.err
    assert shown.err.count("\n") == 1
    assert json.loads(shown.out)["problems"]


def test_time_of_another_machine(tercet):
    arguments = ["plan", "small", "--set", "data.path=someone/texts", "--device-memory", "80GB"]
    shown = tercet(*arguments, "--peak-flops", "989e12", "--mfu", "0.5", "--processes", "8", "--json")
    assert shown.code == 0, shown.err
    figures = json.loads(shown.out)
    assert figures["corpus"]["num_tokens"] is None
    assert figures["duration"]["run_s"] == pytest.approx(figures["flops_per_run"] / (0.5 * 989e12 * 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mfu", "0.5"], "--mfu is a part of --peak-flops"),
        (["--device-memory", "much"], "--device-memory 'much' is no size"),
        (["--processes", "5"], "is not a multiple of"),
        (["--set", "data.path=nowhere.txt"], "nowhere.txt does not exist"),
    ],
)
def test_mistakes(tercet, options, message):
    shown = tercet("plan", "demo", "--no-timing", *options)
    assert shown.code == 2
    assert message in shown.err


@pytest.mark.parametrize("name", ["demo", "shakespeare", "small", "base", "large"])
def test_recipes_name_their_true_number_of_parameters(root, name):
    from tercet.training.plan import parameters_by_part

    recipe = load_recipe(name)
    counted = sum(parameters_by_part(recipe.model_config_for(recipe.tokenizer.vocab_size, {})).values())
    head = (root / "recipes" / f"{name}.yaml").read_text().partition("output_dir")[0]
    assert f"{counted:,} parameters" in head


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("base", 1), ("base", 8), ("large", 8), ("large", 32)])
def test_the_large_recipes_fit_where_they_are_meant_to_run(tercet, name, processes):
    shown = tercet(
        "plan", name, "--set", "data.path=someone/texts", "--device-memory", "80GB", "--processes", processes, "--json"
    )
    assert shown.code == 0, shown.err
    figures = json.loads(shown.out)
    assert figures["problems"] == []
    # Neither far from what its size can use, nor from what its devices hold.
    assert 1 <= figures["num_tokens"] / figures["optimal_tokens"] < 5
    assert figures["memory"]["peak"] > 8 * 2**30


def test_max_hours_is_the_recipes(tercet, text_file, tmp_path):
    folder = tmp_path / "run"
    settings = small_settings(f"data.path={text_file}")
    shown = tercet("train", "shakespeare", *settings, "--output", folder, "--max-hours", "5")
    assert shown.code == 0, shown.err
    assert load_recipe(str(folder / "recipe.yaml")).training.max_hours == 5
