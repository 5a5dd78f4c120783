"""What a run begins with that starts from a checkpoint: its weights, known by their hash, and its tokenizer."""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.tokenizer import MESSAGE_END, MESSAGE_START, PADDING
from tercet.tokenizer.reading import as_value_error
from tercet.training.chat_messages import tercet_chat_format
from tercet.training.counts import counted
from tercet.training.errors import UserError
from tercet.training.from_checkpoint import FROM_CHECKPOINT, WEIGHTS_HASH, checkpoint_folder
from tercet.training.recipe import Recipe

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def with_weights_hash(recipe: Recipe, accelerator: Accelerator) -> Recipe:
    """The recipe with the hash of the weights that it begins with; all processes call this.

    Raises:
        UserError: The recipe has another hash already: the weights have changed since.
    """
    name = recipe.model.get(FROM_CHECKPOINT)
    if name is None:
        return recipe
    found: list[Any] = [None, ""]
    if accelerator.is_main_process:
        try:
            found[0] = weights_hash(checkpoint_folder(name, with_weights=True))
        except UserError as error:
            found[1] = str(error)
    digest, mistake = broadcast_object_list(found)
    if mistake:
        raise UserError(mistake)
    expected = recipe.model.get(WEIGHTS_HASH)
    if expected not in (None, digest):
        raise UserError(
            f"model.{FROM_CHECKPOINT} {name} has other weights (SHA-256 {digest[:12]}…) than model.{WEIGHTS_HASH} says "
            f"({str(expected)[:12]}…): restore them, or remove model.{WEIGHTS_HASH}"
        )
    return recipe.model_copy(update={"model": {**recipe.model, WEIGHTS_HASH: digest}})


def weights_hash(folder: Path) -> str:
    """SHA-256 of a folder's weights: of the one file, as `sha256sum` and the Hub show it, or of all shards' together.

    Raises:
        UserError: There are no weights in safetensors.
    """
    if (folder / _WEIGHTS).is_file():
        return _sha256(folder / _WEIGHTS)
    try:
        names = sorted(set(json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values()))
        lines = "".join(f"{_sha256(folder / name)}  {name}\n" for name in names)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{folder} holds no weights ({_WEIGHTS}): give a whole checkpoint") from error
    return hashlib.sha256(lines.encode()).hexdigest()


def starting_tokenizer(recipe: Recipe) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """The checkpoint's tokenizer, and the names of tokens that it lacked and now has.

    Rows need a padding token of its own; conversations need a chat template, and a tokenizer without one gets ChatML
    and its two tokens.

    Raises:
        UserError: No tokenizer there, or one without end of text.
    """
    name = recipe.model[FROM_CHECKPOINT]
    folder = checkpoint_folder(name, with_weights=False)
    try:
        with as_value_error():
            tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{name} holds no tokenizer that AutoTokenizer loads ({str(error).splitlines()[0]})") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in {name} has no end-of-text token (eos_token): set one and save it again")
    known = set(tokenizer.get_vocab())
    wanted = []
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": PADDING})
        wanted.append(PADDING)
    if is_chat(recipe) and tokenizer.chat_template is None:
        tokens = [MESSAGE_START, MESSAGE_END]
        tokenizer.add_special_tokens({"extra_special_tokens": tokens}, replace_extra_special_tokens=False)
        tokenizer.chat_template = tercet_chat_format().template
        wanted += tokens
    return tokenizer, [token for token in wanted if token not in known]


def is_chat(recipe: Recipe) -> bool:
    """Whether the recipe's data has conversations."""
    return any(source.messages_column is not None for source in recipe.data.all_sources())


def starting_model(recipe: Recipe, config: TercetConfig) -> TercetForCausalLM:
    """The checkpoint's weights in float32; rows of embeddings and head are added where the vocabulary has grown.

    New rows are drawn from a normal distribution with mean and covariance of the old ones, as transformers does
    (`resize_token_embeddings`), by torch's random state.

    Args:
        config: The recipe's for its tokenizer.

    Raises:
        UserError: The weights are damaged or not all there.
    """
    name = recipe.model[FROM_CHECKPOINT]
    folder = checkpoint_folder(name, with_weights=True)
    theirs = TercetConfig.from_dict({**config.to_dict(), "vocab_size": recipe.model["vocab_size"]})
    try:
        model, loading = cast(Any, TercetForCausalLM).from_pretrained(
            folder, config=theirs, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model.{FROM_CHECKPOINT} {name} does not load: {str(error).splitlines()[0]}") from error
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"{name} lacks {counted(len(missing), 'weight')}, such as {missing[0]}: it is not a whole checkpoint"
        )
    if config.vocab_size > theirs.vocab_size:
        model.resize_token_embeddings(config.vocab_size)
    model.config.name_or_path = ""  # where it lay on this machine is nobody's business
    return model


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
