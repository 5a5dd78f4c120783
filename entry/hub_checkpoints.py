"""A checkpoint that a command was given: a folder here, or a model on the Hub, which is brought here first."""

import re
from pathlib import Path

from tercet.training.errors import UserError

# What a command needs of a model: never code, which is not run, nor weights that unpickling could run code from.
_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = "*.safetensors"
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?")


def is_hub_name(checkpoint: Path) -> bool:
    """Whether a model on the Hub is meant: "gpt2", "owner/name", "name@revision", and no such path is here.

    Something in a folder that is here is a path, if a wrong one: a slip in `out/demo` shall fetch no stranger's model.
    """
    is_path = checkpoint.exists() or (len(checkpoint.parts) > 1 and checkpoint.parent.exists())
    return not is_path and checkpoint.suffix != ".gguf" and _NAME.fullmatch(str(checkpoint)) is not None


def local_checkpoint(checkpoint: Path, *, with_weights: bool = True) -> Path:
    """The folder itself, or where the Hugging Face cache holds the model of that name, downloaded if it must be.

    Args:
        checkpoint: A folder, or "owner/name" or "name" on the Hub, with "@revision" behind it if not the newest.
        with_weights: Whether the weights are needed, too.

    Raises:
        UserError: Neither is there, or the Hub does not give it.
    """
    if not is_hub_name(checkpoint):
        return checkpoint
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    repository, _, revision = str(checkpoint).partition("@")
    disable_progress_bars()
    try:
        # Folders may hold the same weights again, as a native export.
        return Path(
            snapshot_download(
                repository, revision=revision or None, ignore_patterns=["*/*"],
                allow_patterns=[*_FILES, *([_WEIGHTS] if with_weights else [])],
            )
        )  # fmt: skip
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"{checkpoint} is no folder here, and as a model on the Hub it is not in the cache and the Hub cannot be "
            "reached: give a checkpoint, such as out/demo after `tercet demo`, or a name of the Hub when there is a "
            "network and HF_HUB_OFFLINE is not set"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{checkpoint} is no folder here and no model on the Hub that may be read: give a checkpoint, such as "
            "out/demo after `tercet demo`, or a name of the Hub; for a private one set HF_TOKEN"
        ) from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{checkpoint} is no folder here, and the Hub does not give the model ({reason})") from error
