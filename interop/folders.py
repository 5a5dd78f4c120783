"""Checkpoint folders of native families in and out: model, tokenizer, chat template, generation settings.

The source is read strictly: transformers fills missing tensors with random numbers and goes on, here that is an
error. The destination is written under another name beside it and renamed: it is there whole, or not at all.
"""

import json
import os
import pickle
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedModel

from tercet.interop.configs import FAMILIES
from tercet.interop.families import family_named, from_native, to_native
from tercet.interop.gguf_reading import read_config
from tercet.interop.tensors import check_tensor_names
from tercet.interop.tokenizer_files import check_vocabulary, load_tokenizer, write_tokenizer
from tercet.modeling import TercetForCausalLM
from tercet.training.atomic import make_readable
from tercet.training.errors import UserError, as_user_error

_GENERATION = "generation_config.json"
# What a damaged or foreign checkpoint raises on its way through transformers, safetensors and torch.
_LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, AssertionError,
                   EOFError, StrictDataclassError, SafetensorError, pickle.UnpicklingError, struct.error)  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        model_class: The class that the new folder loads as.
        has_tokenizer: False where the source had none.
    """

    folder: Path
    model_class: str
    num_parameters: int
    has_tokenizer: bool


def import_checkpoint(source: Path, destination: Path) -> Converted:
    """Write a native checkpoint as a Tercet checkpoint.

    Args:
        source: A folder of a known family, or a GGUF file that transformers reads as one.
        destination: Not there yet, or an empty folder.

    Raises:
        UserError: The source is damaged, incomplete, of an unknown family or uses what Tercet has not; the tokenizer
            does not fit; the destination is taken.
    """
    source, destination = Path(source), Path(destination)
    check_destination(destination)
    if source.is_dir() and _model_type(source) == "tercet":
        raise UserError(f"{source} is a Tercet checkpoint already: tercet export writes it as a native one")
    native = load_model(source)
    with as_user_error(str(source)):
        model = from_native(native)
    return _write(model, source, destination)


def export_checkpoint(source: Path, destination: Path, family: str | None = None) -> Converted:
    """Write a checkpoint as one of a native family, which needs no custom code.

    Args:
        source: A Tercet checkpoint, or one of another native family.
        destination: Not there yet, or an empty folder.
        family: gpt2, llama, mistral, qwen2, qwen3 or smollm3; None takes the first of these that can express it.

    Raises:
        UserError: As `import_checkpoint`; or the family cannot express the model (names the fields).
    """
    source, destination = Path(source), Path(destination)
    if family is not None:
        with as_user_error("--to"):
            family_named(family)
    check_destination(destination)
    model = load_model(source)
    with as_user_error(str(source)):
        ours = model if isinstance(model, TercetForCausalLM) else from_native(model)
        native = to_native(ours, family)
    return _write(native, source, destination)


def check_destination(destination: Path) -> None:
    """Refuse a destination that holds something.

    Raises:
        UserError: It is a file, or a folder that is not empty.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} exists and is not an empty folder: choose another destination")


def load_model(source: Path) -> PreTrainedModel:
    """The model of a folder or a GGUF file, Tercet's or of a known family, in its own dtype, with every tensor loaded.

    Raises:
        UserError: It does not load, or its tensors are not exactly those of its config (lists them).
    """
    arguments: dict[str, Any] = {"dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True}
    if source.is_file() and source.suffix == ".gguf":
        loader: Any = AutoModelForCausalLM
        folder = source.parent
        # Without this, weights stay in their blocks on machines that have the kernels for it.
        dense = GgufConfig(dequantize=True)
        arguments |= {"gguf_file": source.name, "quantization_config": dense, "dtype": torch.float32}
        try:
            arguments["config"] = read_config(source)
        except _LOADING_ERRORS as error:
            raise UserError(f"{source} does not load: {_first_line(error)}") from error
    else:
        name = _model_type(source)
        loader, folder = TercetForCausalLM if name == "tercet" else FAMILIES[name].model_class, source
    try:
        model, loading = loader.from_pretrained(folder, **arguments)
    except _LOADING_ERRORS as error:
        raise UserError(f"{source} does not load: {_first_line(error)}") from error
    with as_user_error(str(source)):
        check_tensor_names(loading["missing_keys"], loading["unexpected_keys"], loading["mismatched_keys"])
    return model.eval()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _model_type(source: Path) -> str:
    """`model_type` of a folder, Tercet's or that of a known family."""
    if not source.exists():
        raise UserError(f"{source} does not exist: give a checkpoint")
    if not source.is_dir():
        raise UserError(f"{source} is no folder: give one with config.json and weights, as save_pretrained writes it")
    path = source / "config.json"
    if not path.is_file():
        raise UserError(f"{source} holds no checkpoint: there is no config.json")
    try:
        config = json.loads(path.read_text("utf-8"))
        model_type, architectures = config["model_type"], config.get("architectures") or []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no model config") from error
    if model_type != "tercet" and model_type not in FAMILIES:
        raise UserError(f"{source} is of family {model_type!r}; known are {', '.join(FAMILIES)}")
    if architectures and not any(name.endswith(("ForCausalLM", "LMHeadModel", "GPT2Model")) for name in architectures):
        raise UserError(f"{source} holds {', '.join(architectures)}, and a causal language model is needed")
    return model_type


def _write(model: PreTrainedModel, source: Path, destination: Path) -> Converted:
    tokenizer = load_tokenizer(source)
    if tokenizer is not None:
        embedding: Any = model.get_input_embeddings()
        check_vocabulary(tokenizer, embedding.weight.shape[0], source)
    with written_whole(destination) as folder:
        settings = source / _GENERATION
        if settings.is_file():
            # The file itself travels: transformers reads some settings that it then refuses to write.
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder)
        if settings.is_file():
            shutil.copyfile(settings, folder / _GENERATION)
        if tokenizer is not None:
            write_tokenizer(tokenizer, source, folder)
    return Converted(destination, type(model).__name__, model.num_parameters(), tokenizer is not None)


@contextmanager
def written_whole(destination: Path) -> Iterator[Path]:
    """A folder to write in, beside `destination`; it takes that name when all went well, and goes away otherwise.

    Args:
        destination: Not there yet, or an empty folder; its parents are made.

    Raises:
        UserError: No folder can be made there.
    """
    destination = destination.absolute()
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".writing-{destination.name}-"))
    except OSError as error:
        raise UserError(f"{destination} cannot be written: {error.strerror or error}") from error
    try:
        yield temporary
        make_readable(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        _sync_tree(temporary)
        os.replace(temporary, destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync_tree(folder: Path) -> None:
    """Ask the system to put files and entries on the disk before the folder gets its name."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
