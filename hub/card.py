"""Fills `hub_card.md` with what a run measured, and checks the result offline.

Only the checkpoint folder is read: `config.json`, `recipe.yaml`, `results.json`, and, where they are there,
`metrics.jsonl` and `loss.png`. A value that was not measured has no line in the card; a hole is an error. A folder that
no run wrote, such as `tercet import` makes, has neither recipe nor results: its card says so.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tercet.hub.card_text import public, shortened_yaml
from tercet.hub.card_values import Loading, Origin, Subject, card_context, card_data
from tercet.hub.licenses import check_known
from tercet.hub.selection import CARD_NAME, CONFIG_NAME, LICENSE_PATTERN, RECIPE_NAME, has_record
from tercet.training.atomic import write_atomically
from tercet.training.errors import UserError
from tercet.training.results import HELD_OUT_TEXT, RESULTS_NAME, RunResults

TEMPLATE_NAME = "hub_card.md"
_FROM_MAIN = Loading()
_REQUIRED = ("license", "library_name", "pipeline_tag", "tags")


def build_card(
    checkpoint: Path,
    *,
    repo_id: str | None = None,
    license: str | None = None,
    loading: Loading = _FROM_MAIN,
    named: Sequence[str] = (),
) -> str:
    """The text of the model card of a checkpoint folder, checked.

    Args:
        checkpoint: A folder that `tercet train` or `tercet import` wrote.
        repo_id: The Hub repository that the reader will load from; without it, the folder's own name.
        license: The licence of the weights as the Hub spells it ("apache-2.0"). Nobody can measure it: without it, and
            without `card.license` in the recipe, the card says "unknown".
        loading: What else the reader must know to load it.
        named: Names of files that `tercet eval` scored and that the card may tell.

    Raises:
        UserError: One line that says what is wrong, where, and what to do.
    """
    folder = Path(checkpoint)
    subject, recipe, results = read_subject(folder, repo_id=repo_id, license=license, loading=loading)
    if results is not None:
        results = without_names(results, named)
    context = card_context(folder, subject, recipe, results)
    text = _render(card_data(subject, results).to_yaml(), context)
    check_card(text)
    return text


def read_subject(
    checkpoint: Path, *, repo_id: str | None = None, license: str | None = None, loading: Loading = _FROM_MAIN
) -> tuple[Subject, str | None, RunResults | None]:
    """What `build_card` writes about, the recipe's text and the results; the last two None where no run is on record.

    Raises:
        UserError: As `build_card`.
    """
    import yaml

    config = _read_config(checkpoint)
    recipe = results = None
    fields: dict[str, Any] = {}
    if has_record(checkpoint):
        recipe = _read_recipe(checkpoint / RECIPE_NAME)
        results = RunResults.load(checkpoint / RESULTS_NAME)
        fields = yaml.safe_load(recipe)
    declared = fields.get("card") or {}
    name = repo_id.rpartition("/")[2] if repo_id else declared.get("name") or checkpoint.resolve().name
    license = license or declared.get("license")
    license_file = next((path.name for path in sorted(checkpoint.glob(LICENSE_PATTERN))), None)
    subject = Subject(name, repo_id, config, license, license_file, Origin.of(fields), loading)
    return subject, recipe, results


def write_card(checkpoint: Path, *, repo_id: str | None = None, license: str | None = None) -> Path:
    """Write `build_card`'s text as `README.md` into the folder, whole or not at all; returns its path."""
    path = Path(checkpoint) / CARD_NAME
    if license is not None:
        check_known(license)
    write_atomically(path, build_card(checkpoint, repo_id=repo_id, license=license).encode())
    return path


def without_names(results: RunResults, named: Sequence[str]) -> RunResults:
    """The results without names of files that were scored and never published: a name may tell what nobody should know.

    Args:
        named: Names that may be told; those of datasets on the Hub always may.
    """
    texts, count = [], 0
    for text in results.texts:
        if text.hub_id is None and text.name not in (HELD_OUT_TEXT, *named):
            count += 1
            text = text.model_copy(update={"name": f"unnamed text {count}"})
        texts.append(text)
    return results.model_copy(update={"texts": texts})


def check_card(text: str) -> None:
    """Check a card as far as that goes without the Hub.

    Fenced code is left out of the search for holes: samples and recipes are verbatim and may hold anything.

    Raises:
        UserError: One line that names the first thing wrong.
    """
    import yaml
    from huggingface_hub import ModelCard

    if not text.startswith("---\n"):
        raise UserError("the card has no front matter: its first line must be ---")
    try:
        data = ModelCard(text).data.to_dict()
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the card's front matter does not parse: {' '.join(str(error).split())}") from None
    for field in _REQUIRED:
        if not data.get(field):
            raise UserError(f"the card's front matter has no {field}: add it")
    if data["pipeline_tag"] != "text-generation":
        raise UserError(f"the card's pipeline_tag is {data['pipeline_tag']!r}: it must be text-generation")
    _refuse_holes(data, "front matter")
    prose = _without_fences(text)
    for mark in ("{{", "{%"):
        if mark in prose:
            raise UserError(f"the card holds {mark}, a template's mark that was not filled: render it with build_card")
    # A whole cell, or a whole value after a colon; "None of them" in a description is plain English.
    hole = re.search(r"[|:=]\s*\**(None|nan|NaN|-?inf)\**\s*(?:[|.,;]|$)", prose, re.MULTILINE)
    if hole:
        line = prose.count("\n", 0, hole.start()) + 1
        raise UserError(f"the card's line {line} (code left out) shows {hole[1]} for a value: measure it or drop it")


def template_path() -> Path:
    """Where the template lies: beside this file in an installed wheel, at the root in a checkout."""
    here = Path(__file__).resolve()
    for path in (here.with_name(TEMPLATE_NAME), here.parent.parent / TEMPLATE_NAME):
        if path.is_file():
            return path
    raise UserError(f"{TEMPLATE_NAME} is missing beside {here.name}: install Tercet again")


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give one that `tercet train` or `tercet import` wrote")
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise UserError(f"{folder} has no {CONFIG_NAME}, so it is no checkpoint: give what `tercet train` wrote")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): save the model again") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{path} names no model_type: save the model again")
    return config


def _read_recipe(path: Path) -> str:
    """The recipe's text, absolute paths cut to their last part: a card must not tell how a machine is laid out."""
    import yaml

    try:
        text = shortened_yaml(path.read_text(encoding="utf-8"), public)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML ({' '.join(str(error).split())}): copy the recipe there again") from None
    if not isinstance(yaml.safe_load(text), dict):
        raise UserError(f"{path} holds no recipe: copy the recipe there again")
    return text


def _render(front_matter: str, context: dict[str, Any]) -> str:
    import jinja2

    path = template_path()

    def refuse_none(value: Any) -> Any:
        if value is None:
            raise UserError(f"{path.name} prints a value that was not measured: make its line conditional")
        return value

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, finalize=refuse_none)
    try:
        text = environment.from_string(path.read_text(encoding="utf-8")).render(card_data=front_matter, **context)
    except jinja2.TemplateError as error:
        raise UserError(f"{path.name} cannot be filled: {error}; mend the template") from None
    return text.rstrip() + "\n"


def _refuse_holes(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_holes(item, f"{place}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_holes(item, f"{place}[{index}]")
    elif value is None or (isinstance(value, float) and not math.isfinite(value)) or value in ("None", "nan", "NaN"):
        raise UserError(f"the card's {place} is {value}: measure it or drop it")


def _without_fences(text: str) -> str:
    return re.sub(r"^(`{3,})[^`\n]*\n.*?^\1`*[ \t]*$\n?", "", text, flags=re.MULTILINE | re.DOTALL)
