"""`tercet generate --prompt-cache FILE`: keys and values of a prompt, computed once and read back.

A file holds the prompt without its last token, which is fed in any case: its logits choose the first new one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import typer
from safetensors import SafetensorError

from tercet.caches import FULL, crop_to, keys_depend_on_length, kind_of, num_reusable
from tercet.modeling import TercetCache, TercetForCausalLM, read_prompt_ids
from tercet.training.atomic import is_disk_full
from tercet.training.errors import UserError, as_user_error

_OPTION = "--prompt-cache"


def check_path(path: Path) -> None:
    """Refuse, before anything is computed, a place that no file can be read from or written to.

    Raises:
        UserError: A folder; or its own folder is not there or not writable.
    """
    with _file_errors("used", path):
        is_folder, is_there = path.is_dir(), path.exists()
    if is_folder:
        raise UserError(f"{_OPTION} {path} is a folder: give a file, such as {path / 'prompt.safetensors'}")
    if is_there:
        return
    if not path.parent.is_dir():
        raise UserError(f"{_OPTION} {path}: there is no folder {path.parent}: make it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{_OPTION} {path}: the folder {path.parent} is not writable: choose another")


def open_cache(
    path: Path, model: TercetForCausalLM, ids: torch.Tensor, kind: str | None
) -> tuple[TercetCache, torch.Tensor | None]:
    """The cache of a file, cropped to what it has in common with a prompt, or an empty one if there is no file.

    Args:
        path: The file.
        model: Must be the one that made the file.
        ids: The prompt, (1, T).
        kind: The value of --cache, if the user gave one.

    Returns:
        The cache, and the ids of the file's whole prompt, (1, positions); None if there is no file.

    Raises:
        UserError: The file is torn, no cache, of another model or kind, or of several prompts.
    """
    if keys_depend_on_length(model):
        raise UserError(
            f"{_OPTION}: this model's rope_type rotates by the length of the text, and no prompt can be kept"
        )
    if not path.exists():
        return _empty_cache(model, kind or FULL), None
    with _file_errors("read", path), as_user_error(_OPTION):
        saved_ids = read_prompt_ids(path)
        if saved_ids is None or len(saved_ids) != 1:
            raise UserError(f"{_OPTION} {path} was not saved with one prompt (`input_ids`): give another file")
        # The prompt is demanded again: between the two readings someone may have replaced the file.
        cache = TercetCache.load(path, model.config, input_ids=saved_ids, model=model, device=model.device)
    if kind not in (None, kind_of(cache)):
        raise UserError(
            f"{_OPTION} {path} holds a cache of kind {kind_of(cache)}, and --cache is {kind}: leave --cache out, or "
            "give another file"
        )
    if not crop_to(cache, num_reusable(saved_ids, ids)):
        typer.echo(
            f"note: attention slides, and {path} does not hold what this prompt needs of its beginning", err=True
        )
        cache = _empty_cache(model, kind_of(cache))
    return cache, saved_ids


def fill_and_save(
    path: Path, model: TercetForCausalLM, ids: torch.Tensor, cache: TercetCache, saved_ids: torch.Tensor | None
) -> None:
    """Compute what the cache lacks of a prompt's tokens but the last; write the file if it is new or grows.

    Args:
        path: The file.
        model: What computes.
        ids: The prompt, (1, T).
        cache: Holds a beginning of the prompt.
        saved_ids: The prompt in the file, as `open_cache` returned it.

    Raises:
        UserError: The file cannot be written.
    """
    num_read, num_kept = cache.length, ids.shape[1] - 1
    if num_read < num_kept:
        with torch.no_grad():
            model(ids[:, num_read:-1], cache=cache, logits_to_keep=1)
    num_saved = 0 if saved_ids is None else saved_ids.shape[1]
    is_beginning = num_read == num_saved
    if is_beginning and num_kept > num_saved:
        with _file_errors("written", path):
            cache.save(path, input_ids=ids, model=model)
    typer.echo(_report(path, ids.shape[1], num_read, num_saved), err=True)


def _report(path: Path, num_prompt: int, num_read: int, num_saved: int) -> str:
    num_kept = num_prompt - 1
    if num_saved == 0:
        done = f"{num_kept:,} of {num_prompt:,} tokens written to {path}" if num_kept else "one token, nothing to keep"
        return f"prompt cache: {done}"
    line = f"prompt cache: {num_read:,} of {num_prompt:,} tokens read from {path}"
    if num_read < num_saved:
        return f"{line}, which stays as it is with its own {num_saved:,}"
    return f"{line}, {num_kept - num_read:,} added to it" if num_kept > num_read else line


def _empty_cache(model: TercetForCausalLM, kind: str) -> TercetCache:
    return TercetCache(model.config, quantization=None if kind == FULL else kind)


@contextmanager
def _file_errors(done: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        if is_disk_full(error):
            raise
        raise UserError(f"{_OPTION} {path} cannot be {done}: {error}") from error
