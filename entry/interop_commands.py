"""`tercet import` and `tercet export`, once torch may be imported."""

from pathlib import Path

import typer
from transformers import AutoConfig
from transformers.utils import logging

from tercet.hub_checkpoints import local_checkpoint
from tercet.interop.configs import FAMILIES, family_obstacles, narrowest_family
from tercet.interop.folders import Converted, check_destination, export_checkpoint, import_checkpoint
from tercet.modeling import TercetConfig
from tercet.training.errors import UserError

_GGUF_TYPES = ("f32", "f16", "q8_0")
_FORMATS = (*FAMILIES, "gguf", "onnx")

logging.disable_progress_bar()


def run_import(source: Path, destination: Path) -> None:
    """`tercet import`."""
    _report(source, import_checkpoint(local_checkpoint(source), destination))


def run_export(checkpoint: Path, destination: Path, to: str | None, gguf_type: str | None) -> None:
    """`tercet export`."""
    if to is not None and to not in _FORMATS:
        raise UserError(f"--to {to} is not known: choose one of {', '.join(_FORMATS)}")
    if gguf_type is not None and to != "gguf":
        raise UserError("--type is for --to gguf only: a native checkpoint keeps its dtype")
    checkpoint = local_checkpoint(checkpoint)
    if to == "gguf":
        _export_gguf(checkpoint, destination, gguf_type or "f16")
    elif to == "onnx":
        _export_onnx(checkpoint, destination)
    else:
        try:
            written = export_checkpoint(checkpoint, destination, to)
        except UserError as error:
            raise UserError(f"{error}{'' if to is None else _remedies(checkpoint, to)}") from error
        _report(checkpoint, written)


def _remedies(checkpoint: Path, to: str) -> str:
    """The family that can express a model of Tercet's, and how a model is trained that the wanted one can."""
    try:
        config = AutoConfig.from_pretrained(checkpoint)
        if not isinstance(config, TercetConfig) or not family_obstacles(config, FAMILIES[to]):
            return ""
        found = f" --to {narrowest_family(config).name} can."
        config.qk_norm = False  # which the presets' recipes leave on, and most families have not
        if not family_obstacles(config, FAMILIES[to]):
            found += f" A model trained with --set model.qk_norm=false can be exported --to {to}."
    except (OSError, ValueError, KeyError):  # what is wrong there has been said
        return ""
    return found


def _report(source: Path, written: Converted) -> None:
    typer.echo(f"{written.folder}: {written.model_class}, {written.num_parameters:,} parameters")
    if not written.has_tokenizer:
        typer.echo(f"note: {source} has no tokenizer, so neither has {written.folder}", err=True)


def _export_gguf(checkpoint: Path, destination: Path, gguf_type: str) -> None:
    if gguf_type not in _GGUF_TYPES:
        raise UserError(f"--type {gguf_type} is not supported: choose one of {', '.join(_GGUF_TYPES)}")
    from tercet.interop.gguf import write_gguf

    # In a folder that is there, the file gets a name of its own.
    if destination.is_dir():
        destination = destination / f"{checkpoint.resolve().name}-{gguf_type}.gguf"
    if destination.exists():
        raise UserError(f"{destination} exists: choose another destination")
    write_gguf(checkpoint, destination, gguf_type)
    typer.echo(f"{destination}: GGUF, {gguf_type}, {destination.stat().st_size:,} bytes")


def _export_onnx(checkpoint: Path, destination: Path) -> None:
    check_destination(destination)
    try:
        from tercet.interop.onnx import write_onnx
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    write_onnx(checkpoint, destination)
    num_bytes = sum(path.stat().st_size for path in destination.rglob("*") if path.is_file())
    typer.echo(f"{destination}: ONNX, {num_bytes:,} bytes")


def _not_installed(error: ModuleNotFoundError) -> UserError:
    return UserError(f"this needs {error.name}, which is not installed: pip install 'tercet[interop]'")
