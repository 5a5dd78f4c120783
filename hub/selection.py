"""What of a checkpoint folder is published: files that are named here, and no others.

A run's folder holds much that is nobody else's: optimizer states, random states, the prepared text, locks. What is not
in the table below stays at home, whatever else lies in the folder.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from tercet.hub.card_record import CURVE_NAME
from tercet.hub.options import NATIVE_FAMILIES
from tercet.hub.weights import INDEX_NAME, WEIGHTS_NAME, weight_names
from tercet.training.atomic import write_atomically
from tercet.training.curve import METRICS_NAME, plot_losses
from tercet.training.errors import UserError
from tercet.training.lock import LOCK_NAME
from tercet.training.results import RESULTS_NAME, RunResults

CARD_NAME = "README.md"
RECIPE_NAME = "recipe.yaml"
CONFIG_NAME = "config.json"
LICENSE_PATTERN = "LICENSE*"
_CHECKPOINTS = "checkpoints"

_WHAT = (
    (CARD_NAME, "card"),
    (CONFIG_NAME, "config"),
    ("generation_config.json", "generation settings"),
    (WEIGHTS_NAME, "weights"),
    ("model-*.safetensors", "weights"),
    (INDEX_NAME, "weights"),
    ("*_tercet.py", "code"),
    ("tokenizer.json", "tokenizer"),
    ("tokenizer_config.json", "tokenizer"),
    ("special_tokens_map.json", "tokenizer"),
    ("chat_template.jinja", "tokenizer"),
    ("vocab.json", "tokenizer"),
    ("merges.txt", "tokenizer"),
    (RECIPE_NAME, "recipe"),
    (RESULTS_NAME, "measurements"),
    (METRICS_NAME, "metrics"),
    (CURVE_NAME, "curve"),
    (LICENSE_PATTERN, "licence"),
    ("NOTICE*", "licence"),
)
_RECORD = ("recipe", "measurements", "metrics", "curve", "licence")
# Never published, not even when asked for: what only the run itself can use, or what tells about the machine.
_PRIVATE_FOLDERS = ("state", _CHECKPOINTS, "data", "trackers")
_PRIVATE_NAMES = ("optimizer*", "rng*", "scheduler*", "training_args*", "run.json", "*.lock", "*.pt", "*.pth", "*.pkl")


@dataclass(frozen=True)
class PublishedFile:
    """A file as it will be on the Hub.

    Attributes:
        path: In the repository, with forward slashes.
        source: The file that holds its content.
        what: What it is, in a word or two.
    """

    path: str
    source: Path
    what: str

    @property
    def size(self) -> int:
        """Bytes."""
        return self.source.stat().st_size


def what_is(name: str) -> str | None:
    """What a file at the top of a checkpoint is; None if it is none of a checkpoint's published ones."""
    return next((what for pattern, what in _WHAT if fnmatchcase(name, pattern)), None)


def published_files(folder: Path) -> list[PublishedFile]:
    """All files below a staged folder, weights last, so that what is small is seen first.

    Raises:
        FileNotFoundError: A link leads nowhere: left out, it would look as if the model had no such file.
    """
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            path.resolve(strict=True)
        if path.is_file():
            relative = path.relative_to(folder).as_posix()
            files.append(PublishedFile(relative, path, what_is(path.name) or "included"))
    return sorted(files, key=lambda file: (file.what == "weights", file.path != CARD_NAME, file.path))


def check_checkpoint(folder: Path, *, is_own_run: bool = False) -> None:
    """Refuse a folder that is no whole checkpoint.

    Args:
        is_own_run: Whoever pushes is the run that writes the folder, and has finished with it.

    Raises:
        UserError: Names what is missing, or says that the folder is being written.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give one that `tercet train` or `tercet import` wrote")
    if not is_own_run and _is_locked(folder / LOCK_NAME):
        raise UserError(f"{folder} is being trained, and its files may change: {_unfinished_remedy(folder)}")
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder} has no {CONFIG_NAME}, so it is no finished model: {_unfinished_remedy(folder)}")
    has_record(folder)
    for name in ["tokenizer.json", "tokenizer_config.json", *weight_names(folder), *_code_names(folder)]:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}, so it is not whole: save the model again, or copy the folder again"
            )


def has_record(folder: Path) -> bool:
    """Whether a run's recipe and results are in the folder; `tercet import` and `tercet export` write neither.

    Raises:
        UserError: One of them is there alone.
    """
    has_recipe, has_results = (folder / RECIPE_NAME).is_file(), (folder / RESULTS_NAME).is_file()
    if has_recipe and not has_results:
        raise UserError(
            f"{folder} has no {RESULTS_NAME}, so nothing is known of what was measured: give the folder of a finished "
            "run, or a checkpoint that this version wrote"
        )
    if has_results and not has_recipe:
        raise UserError(f"{folder} has no {RECIPE_NAME}, so it is no whole run: copy the folder again")
    return has_recipe


def _is_locked(path: Path) -> bool:
    """Whether a run holds its folder at this moment."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks, on which no run begins
        return False
    finally:
        os.close(descriptor)


def _unfinished_remedy(folder: Path) -> str:
    steps = sorted((folder / _CHECKPOINTS).glob("step-*"))
    if steps:
        return f"let that run end, or give {steps[-1]}"
    return "give what `tercet train` or `tercet import` wrote"


def _code_names(folder: Path) -> list[str]:
    """The code that the config names, by which readers load a model that transformers does not know."""
    path = folder / CONFIG_NAME
    try:
        config = json.loads(path.read_text("utf-8"))
        model_type, classes = config.get("model_type"), config.get("auto_map") or {}
        names = sorted({f"{target.split('.')[0]}.py" for target in classes.values()})
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is no model config ({error}): save the model again") from None
    if model_type not in ("tercet", *NATIVE_FAMILIES):
        raise UserError(f"{folder} holds a model of type {model_type}: known are tercet, {', '.join(NATIVE_FAMILIES)}")
    return names


def stage(folder: Path, target: Path, *, include: Iterable[str] = ()) -> None:
    """Put what is published of a checkpoint into a folder of its own, but for the card.

    Large files are links to those of the checkpoint. A checkpoint inside a run (`RUN/checkpoints/step-...`) gets the
    run's metrics up to its step; a curve is drawn where there is none.

    Args:
        target: Made if missing.
        include: Further files of the folder, as names or patterns.

    Raises:
        UserError: A pattern matches nothing, or what is never published.
    """
    weights = weight_names(folder)
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        what = what_is(path.name)
        if not path.is_file() or what is None or path.name in (CARD_NAME, METRICS_NAME):
            continue
        if what != "weights" or path.name in weights:
            _place(path, target / path.name)
    for path in _included(folder, include):
        _place(path, target / path.relative_to(folder))
    _stage_metrics(folder, target)


def stage_record(folder: Path, target: Path) -> None:
    """Of a checkpoint, what tells how its weights came about: for an export, whose model files are others."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and what_is(path.name) in _RECORD and path.name != METRICS_NAME:
            _place(path, target / path.name)
    _stage_metrics(folder, target)


def _place(path: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    if what_is(path.name) == "weights":
        destination.symlink_to(path.resolve())
    else:  # small, and may be changed on its way
        shutil.copyfile(path, destination)


def _included(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        if PurePosixPath(pattern).is_absolute() or ".." in PurePosixPath(pattern).parts:
            raise UserError(f"--include {pattern} leads out of {folder}: name files inside it")
        try:
            found = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
        except ValueError as error:
            raise UserError(f"--include {pattern!r} is no pattern ({error}): name files, such as '*.ipynb'") from None
        if not found:
            raise UserError(f"--include {pattern} matches no file in {folder}: name files inside it")
        for path in found:
            relative = path.relative_to(folder)
            if _is_private(relative):
                raise UserError(f"--include {pattern} names {relative}, which is the run's own and never published")
            if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"--include {pattern} names {relative}, which links to a file elsewhere: copy it here")
            if what_is(path.name) is None or len(relative.parts) > 1:
                yield path


def _is_private(relative: Path) -> bool:
    return (
        relative.parts[0] in _PRIVATE_FOLDERS
        or any(part.startswith(".") for part in relative.parts)
        or any(fnmatchcase(relative.name, pattern) for pattern in _PRIVATE_NAMES)
    )


def _stage_metrics(folder: Path, target: Path) -> None:
    """The metrics up to the checkpoint's step, and their curve: the run may have gone on since."""
    metrics = folder / METRICS_NAME
    if not metrics.is_file() and folder.resolve().parent.name == _CHECKPOINTS:
        metrics = folder.resolve().parent.parent / METRICS_NAME
    if not metrics.is_file() or not has_record(folder):
        return
    last_step = RunResults.load(folder / RESULTS_NAME).training.num_steps
    kept, has_loss = [], False
    for line in metrics.read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
            is_kept = int(record["step"]) <= last_step
        except (ValueError, KeyError, TypeError):  # torn by a kill
            continue
        if is_kept:
            kept.append(line + "\n")
            has_loss = has_loss or "loss_nats" in record
    if not has_loss:  # nothing was logged yet
        return
    write_atomically(target / METRICS_NAME, "".join(kept).encode())
    if not (target / CURVE_NAME).is_file():
        plot_losses(target / METRICS_NAME, target / CURVE_NAME)
