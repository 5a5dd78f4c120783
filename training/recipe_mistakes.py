"""A mistake in a recipe, in one voice: `KEY is VALUE: expected ...`, `unknown key KEY; did you mean KEY?`.

Keys are always told with their sections, as they are written on a command line, and the nearest right one is looked for
in all sections: whoever writes `lr` or `training.learning_rate` is answered with `optimizer.learning_rate`.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from tercet.training.recipe_keys import MODEL, config_fields, expected, field_at, keys_of, kind_of, model_keys

# What GPT-2's config, nanoGPT, transformers' Trainer and others call it.
_ELSEWHERE = {
    "lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "muon_lr": "optimizer.matrix_learning_rate",
    "min_lr": "optimizer.final_fraction",
    "wd": "optimizer.weight_decay",
    "optim": "optimizer.name",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "grad_clip": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm",
    "lr_scheduler_type": "optimizer.schedule",
    "scheduler": "optimizer.schedule",
    "warmup": "optimizer.warmup_steps",
    "warmup_iters": "optimizer.warmup_steps",
    "steps": "training.num_steps",
    "max_steps": "training.num_steps",
    "max_iters": "training.num_steps",
    "iters": "training.num_steps",
    "epochs": "training.num_steps",
    "num_epochs": "training.num_steps",
    "num_train_epochs": "training.num_steps",
    "batch_size": "training.global_batch_size",
    "train_batch_size": "training.global_batch_size",
    "micro_batch_size": "training.per_device_batch_size",
    "per_device_train_batch_size": "training.per_device_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "block_size": "training.sequence_length",
    "context": "training.sequence_length",
    "context_length": "training.sequence_length",
    "seq_len": "training.sequence_length",
    "seq_length": "training.sequence_length",
    "max_seq_len": "training.sequence_length",
    "max_seq_length": "training.sequence_length",
    "eval_interval": "training.evaluate_every",
    "eval_steps": "training.evaluate_every",
    "eval_every": "training.evaluate_every",
    "log_interval": "training.log_every",
    "logging_steps": "training.log_every",
    "save_steps": "training.save_every",
    "save_interval": "training.save_every",
    "save_total_limit": "training.keep_last",
    "dtype": "training.precision",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "report_to": "training.trackers",
    "torch_compile": "training.compile",
    "resume_from": "training.branch_from",
    "n_layer": "model.num_hidden_layers",
    "n_layers": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "layers": "model.num_hidden_layers",
    "heads": "model.num_attention_heads",
    "depth": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "n_kv_head": "model.num_key_value_heads",
    "n_kv_heads": "model.num_key_value_heads",
    "num_kv_heads": "model.num_key_value_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "embed_dim": "model.hidden_size",
    "dim": "model.hidden_size",
    "n_inner": "model.intermediate_size",
    "d_ff": "model.intermediate_size",
    "ffn_dim": "model.intermediate_size",
    "n_positions": "model.max_position_embeddings",
    "n_ctx": "model.max_position_embeddings",
    "rope_theta": "model.rope_parameters",
    "rms_norm_eps": "model.norm_eps",
    "layer_norm_epsilon": "model.norm_eps",
    "activation_function": "model.hidden_act",
    "dropout": "model.hidden_dropout",
    "resid_pdrop": "model.hidden_dropout",
    "attn_pdrop": "model.attention_dropout",
    "embd_pdrop": "model.embedding_dropout",
    "out_dir": "output_dir",
    "output": "output_dir",
    "dataset": "data.path",
    "input_file": "data.path",
    "file": "data.path",
    "prompt": "samples.prompts",
    "repo": "hub.repo_id",
    "hub_model_id": "hub.repo_id",
}
_CLOSE = 0.6
_SAME_SECTION = 0.15
"""How much nearer a key is counted for being of the section that was written."""


def unknown_key(name: str, recipe: type[BaseModel]) -> str:
    """What to say of a key that no recipe has.

    Args:
        name: With its sections, as it was written.
        recipe: The class of recipes.
    """
    known = [key.name for key in keys_of(recipe)]
    section, _, last = name.rpartition(".")
    # Keys of a list's entries are written with a number.
    place = ".".join("N" if part.isdigit() else part for part in section.split("."))
    found = _nearest(place, last, known, tuple(recipe.model_fields))
    if found is not None:
        return f"unknown key {name}; did you mean {found.replace(place, section, 1) if place else found}?"
    own = [key for key in known if key.rpartition(".")[0] == place] if place else list(recipe.model_fields)
    return f"unknown key {name}; known: {', '.join(own)}"


def _nearest(place: str, last: str, known: Sequence[str], sections: Sequence[str]) -> str | None:
    """The key that is most likely meant, of all sections; a section, where the name is written as one."""
    lower = last.lower().replace("-", "_")
    same = [name for name in known if name.rpartition(".")[2] == lower and ".N." not in name]
    if not place and (near := difflib.get_close_matches(lower, sections, n=1, cutoff=0.8)):
        return near[0]
    if same:
        return same[0]
    if lower in _ELSEWHERE:
        return _ELSEWHERE[lower]
    scored = []
    for name in known:
        prefix, _, leaf = name.rpartition(".")
        if ".N." in name and prefix != place:
            continue
        ratio = difflib.SequenceMatcher(None, lower, leaf).ratio()
        scored.append((ratio + (_SAME_SECTION if prefix == place and ratio > 0.5 else 0), name))
    score, best = max(scored, key=lambda pair: pair[0])
    return best if score >= _CLOSE else None


def model_mistakes(fields: Mapping[str, Any], recipe: type[BaseModel]) -> list[str]:
    """What is wrong with the section `model`, each key for itself; that fields agree is checked by the config."""
    known = {key.name.removeprefix(f"{MODEL}."): key for key in model_keys()}
    types = {field.name: field.type for field in config_fields()}
    mistakes = []
    for name, value in fields.items():
        if name not in known:
            mistakes.append(unknown_key(f"{MODEL}.{name}", recipe))
        elif name == "preset" and value not in ("modern", "classic"):
            mistakes.append(f"{MODEL}.preset is {value!r}: choose modern or classic")
        elif name in types and not _is_of_kind(value, types[name]):
            mistakes.append(_wrong_kind(f"{MODEL}.{name}", value, kind_of(types[name])))
    return mistakes


def _is_of_kind(value: Any, annotation: Any) -> bool:
    if "mapping" in kind_of(annotation):
        return value is None or isinstance(value, Mapping)
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def explain(errors: Iterable[ErrorDetails], recipe: type[BaseModel]) -> list[str]:
    """pydantic's errors in words, one for each key."""
    return list(dict.fromkeys(_explain(item, recipe) for item in errors))


def _explain(item: ErrorDetails, recipe: type[BaseModel]) -> str:
    location = [str(part) for part in item["loc"]]
    if item["type"] == "extra_forbidden":
        return unknown_key(".".join(location), recipe)
    if item["type"] == "missing":
        return f"{'.'.join(location)} is missing"
    name, field = field_at(recipe, location)
    if item["type"] != "value_error" and field is not None:
        kind = kind_of(field.annotation, field.metadata)
        if name.rpartition(".")[2].isdigit() and kind.startswith("list of "):
            return f"{name} is {item['input']!r}: {name.rpartition('.')[0]} is a {kind}"
        return _wrong_kind(name, item["input"], kind)
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not location:
        return message
    value = "" if isinstance(item["input"], (dict, BaseModel)) else f" is {item['input']!r}"
    return f"{'.'.join(location)}{value}: {message}"


def _wrong_kind(name: str, value: Any, kind: str) -> str:
    hint = ""
    if isinstance(value, str) and "number" in kind and _is_number(value):
        hint = f" (YAML reads {value} as text: write it with a point, such as 1.0e-5)"
    return f"{name} is {value!r}: {expected(kind)}{hint}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
