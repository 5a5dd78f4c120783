"""Every key that a recipe may have, read off the sections themselves: name, kind, default and what it is for.

The reference (`tercet recipe --keys`, docs/recipe.md) and the messages about wrong keys and values come from here.
"""

import dataclasses
import functools
import inspect
import json
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tercet.modeling import TercetConfig
from tercet.training.from_checkpoint import FROM_CHECKPOINT, WEIGHTS_HASH

MODEL = "model"
"""The section whose keys are the fields of the model's config."""

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", dict: "mapping", list: "list"}
_COUNTABLE = ("whole number", "number", "list", "section", "mapping")
# What the recipe says of these where it says nothing, and why.
_FROM_RUN = {
    "vocab_size": ("tokens of the tokenizer", "rows of the token embedding"),
    "max_position_embeddings": ("training.sequence_length", ""),
    "use_cache": ("true", "whether generation keeps keys and values; training never does"),
    "pad_token_id": ("the tokenizer's", "id of the padding token"),
    "bos_token_id": ("the tokenizer's", "id of the token that begins a document"),
    "eos_token_id": ("the tokenizer's", "id of the token that ends a document"),
}


class RecipeKey(NamedTuple):
    """A key of a recipe, in words.

    Attributes:
        name: With its sections, such as "training.num_steps"; N stands for a number in a list.
        kind: What a value looks like.
        default: As YAML writes it; "required" where there is none.
        description: What it is for; may be empty.
    """

    name: str
    kind: str
    default: str
    description: str


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[RecipeKey]:
    """The keys of a section and of those inside it, in their order; of the model's config for the key `model`."""
    for name, field in section.model_fields.items():
        full, inner = f"{prefix}{name}", section_in(field.annotation)
        if full == MODEL:
            yield from model_keys()
        elif inner is None:
            yield RecipeKey(full, kind_of(field.annotation, field.metadata), _default(field), field.description or "")
        elif get_origin(field.annotation) is tuple:
            yield RecipeKey(full, "list of sections", _default(field), field.description or "")
            yield from keys_of(inner, f"{full}.N.")
        else:
            yield from keys_of(inner, f"{full}.")


@functools.cache
def model_keys() -> tuple[RecipeKey, ...]:
    """The keys of the section `model`: how to begin, then the fields of the config."""
    described = _config_descriptions()
    keys = [
        RecipeKey(
            f"{MODEL}.preset", "one of modern, classic", "modern",
            "modern: the defaults below; classic: GPT-2's choices (norm_type: layer_norm, position_embedding_type: "
            "learned, mlp_type: plain, hidden_act: gelu_new, biases, no qk_norm)",
        ),
        RecipeKey(
            f"{MODEL}.{FROM_CHECKPOINT}", "text", "null",
            "begin with the weights, config and tokenizer of this folder, or of hf://user/name[@revision]",
        ),
        RecipeKey(f"{MODEL}.{WEIGHTS_HASH}", "text", "null", "SHA-256 of those weights; a run writes it itself"),
    ]  # fmt: skip
    for field in config_fields():
        default, description = _FROM_RUN.get(field.name, ("", ""))
        keys.append(
            RecipeKey(
                f"{MODEL}.{field.name}",
                kind_of(field.type),
                default or written(field.default),
                description or described.get(field.name, ""),
            )
        )
    return tuple(keys)


@functools.cache
def config_fields() -> tuple[dataclasses.Field[Any], ...]:
    """The fields that TercetConfig has of its own, with their defaults."""
    from transformers import PretrainedConfig

    inherited = {field.name for field in dataclasses.fields(PretrainedConfig)}
    return tuple(field for field in dataclasses.fields(TercetConfig) if field.name not in inherited)


def field_at(section: type[BaseModel], location: Sequence[str]) -> tuple[str, FieldInfo | None]:
    """The field that a place in a recipe is in, and its dotted name; no field where the place is a section.

    Args:
        location: As pydantic tells it: names and indices, and behind them possibly the member of a union.
    """
    here: type[BaseModel] | None = section
    field, names, is_list = None, [], False
    for part in location:
        if not (is_list if part.isdigit() else here is not None and part in here.model_fields):
            break
        names.append(part)
        if here is not None and not part.isdigit():
            field = here.model_fields[part]
            here = section_in(field.annotation)
            is_list = get_origin(field.annotation) is tuple
    return ".".join(names), field


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone, as a choice beside null, or in a list."""
    for candidate in (annotation, *get_args(annotation)):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


def kind_of(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a value looks like, in words: "whole number ≥ 1", "one of muon, adamw".

    Args:
        annotation: The field's type.
        metadata: Limits beside it.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0], [limit for item in arguments[1:] for limit in getattr(item, "metadata", [item])])
    if origin in (Union, types.UnionType):
        kinds = [kind_of(argument, metadata) for argument in arguments if argument is not type(None)]
        # A mapping described more closely is a mapping; a number takes a whole one.
        kinds = [kind for kind in dict.fromkeys(kinds) if kind != "whole number" or "number" not in kinds]
        return " or ".join(kinds).replace("true or false or", "true, false or")
    if origin is Literal:
        choices = [written(choice) for choice in arguments]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin in (tuple, list):
        inner = kind_of(arguments[0]).removeprefix("one of ")
        plural = inner.replace("number", "numbers", 1).replace("section", "sections", 1)
        count = f"{len(arguments)} " if origin is tuple and arguments[-1] is not ... else ""
        return f"list of {count}{plural}"
    if section_in(annotation) is not None:
        return "section"
    base = origin or annotation
    word = next((word for known, word in _WORDS.items() if base is known), "mapping")
    limits = [
        f"{sign} {written(getattr(item, name))}"
        for item in metadata
        for name, sign in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return " ".join([word, " and ".join(limits)]).strip() if base in (int, float) else word


def expected(kind: str) -> str:
    """The end of a message about a value of another kind."""
    return f"expected {'a ' if kind.startswith(_COUNTABLE) else ''}{kind}"


def written(value: Any) -> str:
    """A value as YAML has it, on one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        # YAML reads 1e-06 as text: a float needs its point.
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    return json.dumps(value)


def _default(field: FieldInfo) -> str:
    return "required" if field.default is PydanticUndefined else written(field.default)


def _config_descriptions() -> dict[str, str]:
    """What the config's own docstring says of each field."""
    text = inspect.cleandoc(TercetConfig.__doc__ or "").partition("Args:\n")[2].partition("\nRaises:")[0]
    found = {}
    for names, body in re.findall(r"^ {4}(\w+(?:, \w+)*) \(.*\):\n((?: {8}.*\n?)+)", text, re.MULTILINE):
        for name in names.split(", "):
            words = " ".join(body.split()).removesuffix(".")
            # In one voice with the other sections; an abbreviation keeps its letters.
            found[name] = words[0].lower() + words[1:] if words[1:2].islower() else words
    return found
