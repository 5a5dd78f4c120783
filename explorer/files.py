"""A trace in a folder: words and numbers in `trace.json`, tensors in `activations.safetensors`."""

import dataclasses
import json
import os
import types
import typing
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tercet.explorer.record import Activations, Trace
from tercet.training.atomic import make_readable, place_files, temporary_folder
from tercet.training.errors import UserError

RECORD_NAME = "trace.json"
TENSORS_NAME = "activations.safetensors"
FORMAT = 4


def save_trace(trace: Trace, folder: str | os.PathLike) -> Path:
    """Write a trace into a folder, which is made if it is not there; other files in it stay.

    A trace that is there is replaced; until the new one is whole, a reader finds the old one or none.

    Raises:
        UserError: The folder cannot be made or written.
    """
    folder = Path(folder)
    present = [name for name in _tensor_names() if getattr(trace.activations, name) is not None]
    tensors = {name: getattr(trace.activations, name).contiguous() for name in present}
    fields = {field.name: getattr(trace, field.name) for field in dataclasses.fields(trace)}
    del fields["activations"]
    # Shapes stand in both files, so that one of another run is not taken for this one's.
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    content = {"format": FORMAT, "activations": shapes, **{name: _plain(value) for name, value in fields.items()}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder) as temporary:
            save_file(tensors, Path(temporary, TENSORS_NAME))
            record = json.dumps(content, ensure_ascii=False, allow_nan=False)
            Path(temporary, RECORD_NAME).write_text(record, encoding="utf-8")
            make_readable(Path(temporary))
            # Named last, removed first: a record always has its tensors beside it.
            Path(folder, RECORD_NAME).unlink(missing_ok=True)
            place_files(Path(temporary), folder, last=RECORD_NAME)
    except (NotADirectoryError, FileExistsError, PermissionError) as error:
        raise UserError(f"the trace cannot be written into {folder}: {error.strerror}") from error
    return folder


def load_trace(folder: str | os.PathLike) -> Trace:
    """Read a trace that `save_trace` wrote.

    Raises:
        UserError: There is none, it is damaged, or it is of another version.
    """
    path = Path(folder, RECORD_NAME)
    if not path.is_file():
        raise UserError(f"{folder} holds no trace (no {RECORD_NAME}): give a folder that --save-trace wrote")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format")
        if found != FORMAT:
            raise UserError(f"{path} is of format {found}, and this version of Tercet reads {FORMAT}: record it again")
        shapes = content.pop("activations")
        tensors = load_file(Path(folder, TENSORS_NAME))
        if {name: list(tensor.shape) for name, tensor in tensors.items()} != shapes:
            raise ValueError(f"{TENSORS_NAME} is of another trace")
        activations = Activations(**{name: tensors.get(name) for name in _tensor_names()})  # pyright: ignore
        _check_present(activations)
        return _record(Trace, {**content, "activations": activations})
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the trace in {folder} is damaged ({reason}): record it again") from error


def _tensor_names() -> list[str]:
    return [field.name for field in dataclasses.fields(Activations)]


def _check_present(activations: Activations) -> None:
    needed = [field.name for field in dataclasses.fields(Activations) if field.type is torch.Tensor]
    missing = [name for name in needed if getattr(activations, name) is None]
    if missing:
        raise ValueError(f"{missing[0]} is missing")


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, tuples as lists, keys as strings: what JSON holds."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value


def _record(kind: type, content: Any) -> Any:
    """The dataclass `kind` of its fields' plain values."""
    types_of = typing.get_type_hints(kind)
    if unknown := content.keys() - types_of.keys():
        raise ValueError(f"{kind.__name__} has no {min(unknown)}")
    return kind(**{name: _typed(types_of[name], value) for name, value in content.items()})


def _typed(kind: Any, value: Any) -> Any:
    """A plain value as the type that a field names; `kind` is what type hints are, of which types are some."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _typed(next(part for part in arguments if part is not type(None)), value)
    if origin is tuple:
        return tuple(_typed(arguments[0], part) for part in value)
    if origin is dict:
        return {_typed(arguments[0], key): _typed(arguments[1], part) for key, part in value.items()}
    if dataclasses.is_dataclass(kind) and not isinstance(value, Activations):
        return _record(typing.cast(type, kind), value)
    if kind is object or isinstance(value, typing.cast(type, kind)):
        return value
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        return kind(value)
    raise ValueError(f"{str(value)[:40]!r} is not a {kind}")
