"""The front matter of a card, and what the Hub has against it."""

import re
from typing import Any

import yaml

# The values that the Hub takes for `license`.
_LICENSES = (
    "apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 "
    "bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 "
    "cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 "
    "cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 "
    "cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl "
    "gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr "
    "mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr "
    "deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma "
    "unknown other"
)
LICENSES = frozenset(_LICENSES.split())
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
_STRINGS = ("language", "tags", "datasets", "metrics", "license", "base_model")


def front_matter(text: str) -> Any:
    """What stands between the two lines of --- at a card's beginning; {} where there are none.

    Raises:
        yaml.YAMLError: If it is no YAML.
    """
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    return (yaml.safe_load(match.group(1)) or {}) if match else {}


def complaints(text: str) -> tuple[list[str], list[str]]:
    """Errors, for which the Hub refuses a card, and warnings."""
    try:
        card = front_matter(text)
    except yaml.YAMLError as error:
        return [f"The front matter is no YAML: {error}"], []
    if not isinstance(card, dict):
        return ["The front matter is no mapping"], []
    if not card:
        return [], ["The card has no front matter"]
    errors = []
    for key in _STRINGS:
        values = card.get(key)
        for value in values if isinstance(values, list) else [values] if values is not None else []:
            if not isinstance(value, str) or not value:
                errors.append(f'"{key}" holds {value!r}, which is no string')
            elif key == "license" and value not in LICENSES:
                errors.append(f'"license" must be one of those that the Hub knows, and not {value!r}')
            elif key == "datasets" and not _DATASET.fullmatch(value):
                errors.append(f'"datasets" holds {value!r}, which is no name of a dataset')
    if card.get("license") == "other" and not card.get("license_name"):
        errors.append('"license_name" must be there where "license" is "other"')
    for key in ("pipeline_tag", "library_name", "license_name"):
        if card.get(key) is not None and not isinstance(card[key], str):
            errors.append(f'"{key}" must be a string')
    if "model-index" in card:
        errors += _complaints_of_results(card["model-index"])
    warnings = [] if "license" in card else ["The card names no license"]
    return errors, warnings


def _complaints_of_results(models: Any) -> list[str]:
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        return ['"model-index" must be a list of models']
    errors = []
    for model in models:
        if not isinstance(model.get("name"), str):
            errors.append('"model-index[].name" must be a string')
        for result in model.get("results") or [{}]:
            for path in ("task.type", "dataset.type", "dataset.name"):
                outer, inner = path.split(".")
                if not isinstance((result.get(outer) or {}).get(inner), str):
                    errors.append(f'"model-index[].results[].{path}" must be a string')
            for metric in result.get("metrics") or [{}]:
                if not isinstance(metric.get("type"), str) or metric.get("value") is None:
                    errors.append('"model-index[].results[].metrics[]" must have a type and a value')
    return errors
