"""Loads a checkpoint folder for the commands, through the Auto classes, with errors that a user can act on."""

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import tercet.modeling  # noqa: F401 - registers Tercet's classes with the Auto classes
from tercet.tokenizer.reading import as_value_error
from tercet.training.counts import counted
from tercet.training.errors import UserError


def load_checkpoint_folder(folder: Path, device: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model, in evaluation mode on `device` or else the best at hand, and tokenizer of a folder.

    Raises:
        UserError: No such device or folder, no checkpoint, another architecture, damaged weights, no tokenizer.
    """
    if device is not None:
        check_device(device)
    check_is_causal_lm(folder)
    logging.disable_progress_bar()
    try:
        with as_value_error():
            tokenizer = AutoTokenizer.from_pretrained(folder)
        model, loading = cast(Any, AutoModelForCausalLM).from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{folder} does not load: {reason}") from error
    if missing := sorted(loading["missing_keys"]):
        # transformers fills them with random numbers and goes on.
        raise UserError(
            f"{folder} lacks {counted(len(missing), 'weight')}, such as {missing[0]}: it is not a whole checkpoint"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), tokenizer


def check_device(name: str) -> None:
    """Refuse a device that this machine, or the torch that is installed, does not have.

    Raises:
        UserError: Names it, and what to choose.
    """
    try:
        is_here = torch.empty(1, device=name).device.type != "meta"
    except (RuntimeError, AssertionError, NotImplementedError):
        is_here = False
    if not is_here:
        raise UserError(f"--device {name} is not here: choose cpu, or cuda or mps on a machine that has it")


def check_is_causal_lm(folder: Path) -> None:
    """Refuse what is no folder with a decoder-only language model.

    Raises:
        UserError: Says what is there instead, and the remedy.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give a checkpoint, such as out/demo after `tercet demo`")
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise UserError(f"{folder} holds no checkpoint (no config.json): give the folder that `tercet train` wrote")
    try:
        config = json.loads(config_path.read_text("utf-8"))
        model_type, architectures = config["model_type"], config.get("architectures") or []
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{config_path} is no model config") from error
    is_known = model_type == "tercet" or model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures) or not architectures
    if not (is_known and is_causal):
        found = ", ".join(architectures) or model_type
        raise UserError(f"{folder} holds {found}, and a decoder-only language model (…ForCausalLM) is needed")
