"""What the weight files of a checkpoint folder are, and what they hold, without loading them."""

import json
import math
from pathlib import Path

from tercet.training.errors import UserError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Longer names and notes than any model has; a damaged file may announce more than there is memory for.
_MAX_HEADER_BYTES = 100_000_000


def weight_names(folder: Path) -> list[str]:
    """The files that `from_pretrained` reads: one, or the index and those that it names.

    Raises:
        UserError: The index is damaged.
    """
    index = folder / INDEX_NAME
    if (folder / WEIGHTS_NAME).is_file() or not index.is_file():
        return [WEIGHTS_NAME]
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of weights: save the model again") from error
    return [INDEX_NAME, *shards]


def read_header(path: Path) -> bytes:
    """Names, shapes and notes of a safetensors file, as JSON that stands before its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, _MAX_HEADER_BYTES))


def count_parameters(folder: Path) -> int:
    """Elements of all tensors; weights that are tied are stored, and counted, once.

    Raises:
        UserError: A file is damaged.
    """
    count = 0
    for name in weight_names(folder):
        if name == INDEX_NAME:
            continue
        try:
            tensors = json.loads(read_header(folder / name))
            count += sum(math.prod(tensor["shape"]) for key, tensor in tensors.items() if key != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / name} is no whole file of weights: save the model again") from error
    return count
