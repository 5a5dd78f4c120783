"""What a push will publish, made and checked on this machine alone: no network, no token."""

import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tercet.hub.card import build_card, without_names
from tercet.hub.card_values import Loading
from tercet.hub.inspection import inspect, refuse, shorten_paths
from tercet.hub.licenses import LICENSES_PAGE
from tercet.hub.options import MAIN, PushOptions, check_names
from tercet.hub.selection import (
    CARD_NAME,
    CONFIG_NAME,
    LICENSE_PATTERN,
    RECIPE_NAME,
    PublishedFile,
    check_checkpoint,
    has_record,
    published_files,
    stage,
    stage_record,
)
from tercet.training.errors import UserError
from tercet.training.results import RESULTS_NAME, RunResults

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True)
class Prepared:
    """A push that only has to be sent.

    Attributes:
        files: All of them, in a folder that goes away with `prepared_push`.
        message: Of the commit.
        tags: To put on it.
        model_type: Of the model at the top.
        needs_code: Whether readers must trust its code.
        notes: What a user should know, a line each.
    """

    files: list[PublishedFile]
    message: str
    tags: tuple[str, ...]
    model_type: str
    needs_code: bool
    notes: list[str]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)


@contextmanager
def prepared_push(checkpoint: Path, options: PushOptions) -> Iterator[Prepared]:
    """Select, export, write the card; look for holes. Inside, the files are there to be sent.

    Raises:
        UserError: The folder is no checkpoint, a name is none, the card has a hole, an export is not possible.
    """
    checkpoint = Path(checkpoint)
    check_names(options)
    check_checkpoint(checkpoint, is_own_run=options.from_recipe)
    with tempfile.TemporaryDirectory(prefix="tercet-push-") as temporary, _told_if_removed(checkpoint):
        folder = Path(temporary) / "files"
        _stage_all(checkpoint, folder, options)
        notes = []
        if options.shorten_paths and (names := shorten_paths(folder)):
            notes.append(f"absolute paths are cut to their last part in {', '.join(names)}")
        if has_record(folder):
            notes += _hide_names(folder / RESULTS_NAME, options)
        license = declared_license(folder, options)
        loading = Loading(
            None if options.branch == MAIN else options.branch, options.export if options.beside else None
        )
        card = build_card(folder, repo_id=options.repo_id, license=license, loading=loading, named=options.allow)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        results = RunResults.load(folder / RESULTS_NAME) if has_record(folder) else None
        config = json.loads((folder / CONFIG_NAME).read_text("utf-8"))
        yield Prepared(
            files=published_files(folder),
            message=options.message or _message(results, config["model_type"]),
            tags=_tags(results, options),
            model_type=config["model_type"],
            needs_code="auto_map" in config,
            notes=notes,
        )


def _hide_names(path: Path, options: PushOptions) -> list[str]:
    """Take names of files that were scored out of the results, but for those that are allowed; returns a note."""
    results = RunResults.load(path)
    public = without_names(results, options.allow)
    hidden = [text.name for text, shown in zip(results.texts, public.texts, strict=True) if text.name != shown.name]
    if not hidden:
        return []
    public.save(path)
    allow = options.spelled(f"--allow {shlex.quote(hidden[0])}", f"allow: [{hidden[0]!r}]")
    return [f"measured on {', '.join(hidden)}, whose names are not published ({allow} publishes one)"]


@contextmanager
def _told_if_removed(checkpoint: Path) -> Iterator[None]:
    """A run removes its older checkpoints, also while they are read."""
    try:
        yield
    except FileNotFoundError as error:
        gone = Path(error.filename or checkpoint).name
        raise UserError(
            f"{checkpoint} changed while it was read ({gone} is gone): give a checkpoint that stays"
        ) from error


def check_publishable(prepared: Prepared, options: PushOptions, token: str | None = None) -> None:
    """Refuse files, names of files and a message that hold secrets or absolute paths.

    Raises:
        UserError: Names the first place.
    """
    refuse(inspect(prepared.files, allow=options.allow, token=token, message=prepared.message), options)


def _stage_all(checkpoint: Path, folder: Path, options: PushOptions) -> None:
    if options.export is None or options.beside:
        stage(checkpoint, folder, include=options.include)
    if options.export is None:
        return
    # torch, and some seconds.
    from tercet.interop.folders import export_checkpoint

    if options.include and not options.beside:
        raise UserError("--include belongs to the checkpoint, and --export publishes another model: add --beside")
    try:
        export_checkpoint(checkpoint, folder / options.export if options.beside else folder, options.export)
    except UserError as error:
        raise UserError(f"{error}{_other_family(checkpoint)}") from error
    if not options.beside:
        stage_record(checkpoint, folder)


def _other_family(checkpoint: Path) -> str:
    """The export that would work, as a remedy; nothing if none does."""
    from transformers import AutoConfig

    from tercet.interop.configs import narrowest_family
    from tercet.modeling import TercetConfig

    try:
        config = AutoConfig.from_pretrained(checkpoint)
        family = narrowest_family(config).name if isinstance(config, TercetConfig) else None
    except (OSError, ValueError):
        family = None
    return f" --export {family} can." if family else ""


def declared_license(folder: Path, options: PushOptions) -> str | None:
    """The licence that is declared; a published model without one may be used by nobody.

    Raises:
        UserError: None is, or what the Hub cannot know.
    """
    declared = None
    if (folder / RECIPE_NAME).is_file():
        try:
            recipe = yaml.safe_load((folder / RECIPE_NAME).read_text("utf-8"))
            declared = (recipe.get("card") or {}).get("license")
        except (yaml.YAMLError, UnicodeDecodeError, AttributeError):
            return options.license  # build_card says what is wrong with the recipe
    license = options.license or declared
    if not license or license == "unknown":
        remedy = "--license, such as --license apache-2.0, or card.license in the recipe"
        if options.from_recipe:
            remedy = "card.license, such as apache-2.0"
        raise UserError(f"the card would say license: unknown, so nobody could use the model: give {remedy}")
    if not isinstance(license, str) or not _LICENSE.fullmatch(license):
        raise UserError(
            f"{license!r} is no licence as the Hub spells them: give apache-2.0, mit, cc-by-4.0, or another of "
            f"{LICENSES_PAGE}"
        )
    if license == "other" and not any(folder.glob(LICENSE_PATTERN)):
        raise UserError("licence 'other' means a text of its own: put it into the folder, as LICENSE, or give another")
    return license


def _message(results: RunResults | None, model_type: str) -> str:
    if results is None:
        return f"A {model_type} model"
    measured = "" if results.evaluation is None else f": {results.evaluation.bits_per_byte:.4f} bits per byte"
    return f"Step {results.training.num_steps:,}{measured}"


def _tags(results: RunResults | None, options: PushOptions) -> tuple[str, ...]:
    tags = [] if options.tag is None else [options.tag]
    if options.tag_step:
        if results is None:
            raise UserError("--tag-step has no step to name, as no run is on record here: give --tag NAME")
        tags.append(f"step-{results.training.num_steps}")
    return tuple(dict.fromkeys(tags))
