"""A run that begins with the weights and the tokenizer of a checkpoint: `model: {from_checkpoint: out/demo}`.

The checkpoint decides the model and its tokenizer; the recipe may repeat what it decides and not contradict it. What a
run began with is part of what it is: the recipe that a run keeps has the whole config and the hash of the weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercet.modeling import TercetConfig
from tercet.training.errors import UserError

FROM_CHECKPOINT = "from_checkpoint"
WEIGHTS_HASH = "weights_sha256"
STARTING_FIELDS = (FROM_CHECKPOINT, WEIGHTS_HASH)
"""Keys of a recipe's model section that are no fields of the config."""

_HUB = "hf://"
# What training may do otherwise than the run before: it changes no weight's shape or meaning.
_FREE_FIELDS = ("attention_dropout", "hidden_dropout", "embedding_dropout")
# These follow from the tokenizer, whether or not it grows.
_OF_TOKENIZER = ("bos_token_id", "eos_token_id", "pad_token_id")
_SMALL_FILES = ["*.json", "*.jinja"]


def complete_fields(fields: Mapping[str, Any], config_fields: frozenset[str], where: str) -> Mapping[str, Any]:
    """A recipe's fields with what its checkpoint decides: the model's config, and whose tokenizer it is.

    Args:
        fields: As they were read; returned as they are where they name no checkpoint.
        config_fields: Names of the config's fields.
        where: Names the recipe in messages.

    Raises:
        UserError: No checkpoint there, or one that Tercet does not train on, or a field that contradicts it.
    """
    model, tokenizer = dict(fields.get("model") or {}), dict(fields.get("tokenizer") or {})
    name = model.get(FROM_CHECKPOINT)
    if name is None:
        if model.get(WEIGHTS_HASH) is not None:
            raise UserError(f"{where}: model.{WEIGHTS_HASH} says nothing without model.{FROM_CHECKPOINT}: remove it")
        return fields
    decided = config_fields - {*_OF_TOKENIZER}
    try:
        config = read_config(name)
    except UserError:
        if WEIGHTS_HASH in model and decided <= model.keys():
            return fields  # the record of a run, which says all of it
        raise
    theirs = {field: getattr(config, field) for field in sorted(decided)}
    if "preset" in model:
        raise UserError(f"{where}: model.preset has no effect beside model.{FROM_CHECKPOINT}: remove it")
    ours = {field: value for field, value in model.items() if field not in STARTING_FIELDS}
    if ours.keys() & {*_OF_TOKENIZER}:
        field = next(field for field in _OF_TOKENIZER if field in ours)
        raise UserError(f"{where}: model.{field} is the tokenizer's to say: remove it")
    for field, value in ours.items():
        if field not in _FREE_FIELDS and value != theirs[field]:
            raise UserError(
                f"{where}: model.{field} is {value!r}, and {name} has {theirs[field]!r}: remove the field, or give a "
                "checkpoint that has it"
            )
    said = [field for field, value in tokenizer.items() if value is not None]
    if said and tokenizer.get("path") != name:  # with it, this is the record of a run, and has every default
        field = "path" if "path" in said else said[0]
        raise UserError(f"{where}: tokenizer.{field} has no effect, for {name} brings its own tokenizer: remove it")
    started = {key: model[key] for key in STARTING_FIELDS if key in model}
    return {**fields, "model": {**started, **theirs, **ours}, "tokenizer": {**tokenizer, "path": name}}


def read_config(name: str) -> TercetConfig:
    """The config of a checkpoint.

    Raises:
        UserError: None is there, or it is of another family, or its weights are not in safetensors.
    """
    folder = checkpoint_folder(name, with_weights=False)
    path = folder / "config.json"
    if not path.is_file():
        unfinished = sorted((folder / "checkpoints").glob("step-*"))
        remedy = f"let that run end, or give {unfinished[-1]}" if unfinished else "give what `tercet train` wrote"
        raise UserError(f"model.{FROM_CHECKPOINT} {name} holds no checkpoint (no config.json): {remedy}")
    try:
        model_type = json.loads(path.read_text("utf-8"))["model_type"]
        if model_type == "tercet":
            return TercetConfig.from_pretrained(folder)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path} is no model config ({' '.join(str(error).split())[:200]})") from error
    raise UserError(
        f"model.{FROM_CHECKPOINT} {name} holds a {model_type} model: `tercet import {name} NEW` makes a Tercet "
        "checkpoint of it, with equal logits"
    )


def checkpoint_folder(name: str, *, with_weights: bool) -> Path:
    """The checkpoint's folder here; of a model on the Hub, a snapshot in the Hugging Face cache.

    Args:
        with_weights: Whether a snapshot needs the weights, too.

    Raises:
        UserError: No such folder, or the Hub does not give it.
    """
    if not isinstance(name, str):
        raise UserError(f"model.{FROM_CHECKPOINT} is {name!r}: give a folder, or hf://user/name")
    if name.startswith(_HUB):
        return _snapshot(name.removeprefix(_HUB), with_weights=with_weights)
    path = Path(name).expanduser()
    if not path.is_dir():
        first = "; `tercet demo` makes it" if name == "out/demo" else ""
        on_hub = (
            f" (a model on the Hub is written {_HUB}{name})" if name.count("/") == 1 and name[0] not in "./~" else ""
        )
        raise UserError(f"model.{FROM_CHECKPOINT} {name} is no folder here{on_hub}{first}")
    return path


def _snapshot(name: str, *, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, _, revision = name.partition("@")
    patterns = [*_SMALL_FILES, *(["*.safetensors"] if with_weights else [])]
    try:
        # Folders may hold the same weights again, as a native export.
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=patterns, ignore_patterns=["*/*"])
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"model.{FROM_CHECKPOINT} {_HUB}{name} cannot be had from the Hub: {reason}") from error
