"""The output folder of a run: whose it is, and whether this run may write there.

`recipe.yaml` marks a folder as a run's. A folder that holds anything else is never written to.
"""

import shutil
from pathlib import Path
from typing import Any

import yaml

from tercet.training.atomic import write_atomically
from tercet.training.checkpoints import list_checkpoints
from tercet.training.errors import UserError
from tercet.training.recipe import Recipe, recipe_to_yaml
from tercet.training.results import RESULTS_NAME

RECIPE_NAME = "recipe.yaml"
DATA_NAME = "data"

# What a run may change and still be the same run: none of it decides a weight.
_FREE_SECTIONS = ("output_dir", "samples", "card")
_FREE_TRAINING_FIELDS = ("per_device_batch_size", "device", "num_threads", "log_every", "evaluate_every", "save_every",
                         "keep_last", "trackers", "compile")  # fmt: skip


def open_run_folder(recipe: Recipe, output_dir: Path, *, restart: bool = False) -> None:
    """Make the folder a run's, or check that it is this run's already.

    Args:
        restart: Remove an earlier run of any recipe from the folder first.

    Raises:
        UserError: The folder is a file, holds something else, or holds a run of another recipe.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"{output_dir} is a file: choose another output folder")
    is_run = (output_dir / RECIPE_NAME).is_file()
    others = [path.name for path in output_dir.iterdir()] if output_dir.is_dir() else []
    if others and not is_run:
        raise UserError(
            f"{output_dir} holds something else ({', '.join(sorted(others)[:3])}): choose another output folder"
        )
    if is_run and restart:
        shutil.rmtree(output_dir)
        is_run = False
    if is_run:
        _check_same_run(recipe, output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(output_dir / RECIPE_NAME, recipe_to_yaml(recipe).encode())


def is_finished(output_dir: Path) -> bool:
    """Whether the folder holds a run that reached its end."""
    return all((output_dir / name).is_file() for name in ("config.json", RESULTS_NAME, "README.md"))


def _check_same_run(recipe: Recipe, output_dir: Path) -> None:
    try:
        earlier = yaml.safe_load((output_dir / RECIPE_NAME).read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{output_dir / RECIPE_NAME} is not readable: choose another output folder") from error
    if not list_checkpoints(output_dir) and not is_finished(output_dir):
        return  # nothing trained yet that another recipe could contradict
    different = _differences(earlier, recipe.model_dump(mode="json"))
    if different:
        raise UserError(
            f"{output_dir} holds a run of another recipe (different: {', '.join(different)}): "
            "choose another output folder, or --restart to remove that run and begin anew"
        )


def _differences(earlier: Any, now: dict[str, Any]) -> list[str]:
    """Names of the fields that decide weights and differ."""
    if not isinstance(earlier, dict):
        return ["everything"]
    names = []
    for section in sorted({*earlier, *now} - set(_FREE_SECTIONS)):
        old, new = earlier.get(section), now.get(section)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            free = _FREE_TRAINING_FIELDS if section == "training" else ()
            names += [f"{section}.{key}" for key in sorted({*old, *new} - set(free)) if old.get(key) != new.get(key)]
        else:
            names.append(section)
    return names


__all__ = ["DATA_NAME", "RECIPE_NAME", "is_finished", "open_run_folder"]
