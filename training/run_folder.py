"""The output folder of a run: whose it is, whether this run may write there, and what of it is Tercet's to remove.

`.tercet-run` marks a folder as a run's. A folder that holds anything else is never written to, and files in a run's
folder that Tercet did not write are never removed.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

import tercet
from tercet.training.atomic import TEMPORARY_PREFIX, write_atomically
from tercet.training.checkpoints import CHECKPOINTS, list_checkpoints
from tercet.training.curve import METRICS_NAME
from tercet.training.errors import UserError
from tercet.training.lock import LOCK_NAME, run_lock
from tercet.training.recipe import Recipe, recipe_to_yaml
from tercet.training.results import RESULTS_NAME
from tercet.training.samples import SAMPLES_NAME

MARKER_NAME = ".tercet-run"
RECIPE_NAME = "recipe.yaml"
DATA_NAME = "data"
CURVE_NAME = "loss.png"
TRACKERS_NAME = "trackers"

_TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Everything that a run writes, as patterns; the marker goes last.
_WRITTEN = (
    CHECKPOINTS, DATA_NAME, TRACKERS_NAME, RECIPE_NAME, RESULTS_NAME, METRICS_NAME, SAMPLES_NAME, CURVE_NAME,
    "README.md", "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "*_tercet.py", *_TOKENIZER_NAMES, f"{TEMPORARY_PREFIX}*", MARKER_NAME,
)  # fmt: skip

# What a run may change and still be the same run: the same rows in the same order, the same updates but for rounding.
_FREE_SECTIONS = ("output_dir", "samples", "card", "hub")
_FREE_TRAINING_FIELDS = (
    "per_device_batch_size", "device", "num_threads", "sharding", "gradient_checkpointing", "compile",
    "log_every", "evaluate_every", "sample_every", "save_every", "keep_last", "keep_every", "keep_best",
    "max_hours", "max_bad_steps", "spike_factor", "trackers",
)  # fmt: skip


class AnotherRecipeError(UserError):
    """The folder holds a run of another recipe.

    Attributes:
        branch_from: Its last checkpoint, where a run of this recipe can go on from that in a folder of its own: it has
            the same model and data. Otherwise None.
    """

    def __init__(self, output_dir: Path, different: Sequence[str]) -> None:
        super().__init__(
            f"{output_dir} holds a run of another recipe (different: {', '.join(different)}): "
            "choose another output folder, or --restart to remove that run and begin anew"
        )
        checkpoints = list_checkpoints(output_dir)
        can_branch = all(name == "training.num_steps" or name.startswith("optimizer.") for name in different)
        self.branch_from = checkpoints[-1] if checkpoints and can_branch else None


@contextmanager
def locked_run_folder(output_dir: Path) -> Iterator[None]:
    """The folder is made and is this process's alone inside: of two runs in one, the second is refused.

    Raises:
        UserError: The folder is a file or holds something else, or another run is at work in it.
    """
    _held(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    with run_lock(output_dir):
        yield


def open_run_folder(recipe: Recipe, output_dir: Path, *, restart: bool = False) -> None:
    """Make the folder a run's, or check that it is this run's already.

    Args:
        restart: Remove an earlier run of any recipe from the folder first.

    Raises:
        UserError: The folder is a file, holds something else, or holds a run of another recipe.
    """
    held = _held(output_dir)
    if restart:
        remove_run(output_dir)
    elif held:
        _take_up(recipe, output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(output_dir / MARKER_NAME, (json.dumps({"tercet_version": tercet.__version__}) + "\n").encode())
    if not is_finished(output_dir):  # a finished run keeps the recipe that it was trained with
        write_atomically(output_dir / RECIPE_NAME, recipe_to_yaml(recipe).encode())


def _held(output_dir: Path) -> list[str]:
    """What is in a folder that is a run's, or is to be one."""
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"{output_dir} is a file: choose another output folder")
    names = sorted(path.name for path in output_dir.iterdir()) if output_dir.is_dir() else []
    held = [name for name in names if name != LOCK_NAME]
    if held and MARKER_NAME not in held:
        raise UserError(f"{output_dir} holds something else ({', '.join(held[:3])}): choose another output folder")
    return held


def is_finished(output_dir: Path) -> bool:
    """Whether the folder holds a run that reached its end."""
    return all((output_dir / name).is_file() for name in ("config.json", RESULTS_NAME, "README.md"))


def remove_run(output_dir: Path) -> None:
    """Remove all that a run has written, and the folder if nothing else is in it."""
    if not (output_dir / MARKER_NAME).is_file():
        return
    for pattern in _WRITTEN:
        for path in output_dir.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    if not any(output_dir.iterdir()):
        output_dir.rmdir()


def _take_up(recipe: Recipe, output_dir: Path) -> None:
    """Check that what is there can be gone on with, and remove what another recipe has left before it trained."""
    try:
        earlier = yaml.safe_load((output_dir / RECIPE_NAME).read_text("utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        earlier = None
    different = differences(earlier, recipe)
    if not list_checkpoints(output_dir) and not is_finished(output_dir):
        # A tokenizer of other text or another size; prepared data notices by itself.
        if any(name.partition(".")[0] in ("data", "tokenizer", "everything") for name in different):
            for name in _TOKENIZER_NAMES:
                (output_dir / name).unlink(missing_ok=True)
        return
    if different:
        raise AnotherRecipeError(output_dir, different)


def differences(earlier: Any, recipe: Recipe) -> list[str]:
    """Names of the fields that decide what is trained, and in which a recipe differs from an earlier one.

    Args:
        earlier: What a `recipe.yaml` holds; anything that is no recipe differs in "everything".
    """
    if not isinstance(earlier, dict):
        return ["everything"]
    # Keys that the version which wrote it did not know have their defaults, as they had in effect.
    with contextlib.suppress(ValidationError):
        earlier = Recipe.model_validate(earlier).model_dump(mode="json")
    now = recipe.model_dump(mode="json")
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
