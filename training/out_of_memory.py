"""Out of memory, as one line: what was asked for, what would fit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tercet.training.counts import counted
from tercet.training.errors import UserError
from tercet.training.recipe import Recipe

# "Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.20 GiB is free."
_CUDA_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_CUDA_FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
# Memory that PyTorch's allocator does not give out: pinned, of the driver, of the libraries of CUDA.
_CUDA_REFUSED = re.compile(r"CUDA error: out of memory|CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED")
# "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
_CPU_ASKED = re.compile(r"(?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes")


class OutOfMemoryError(UserError):
    """What the recipe asks for does not fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory was not there, the device's or the machine's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    patterns = (_CPU_ASKED, _CUDA_REFUSED)
    return isinstance(error, RuntimeError) and any(pattern.search(str(error)) for pattern in patterns)


@contextmanager
def explain_out_of_memory(recipe: Recipe, num_processes: int) -> Iterator[None]:
    """Say what would fit where training runs out of memory inside.

    Args:
        recipe: What is trained.
        num_processes: World size.

    Raises:
        OutOfMemoryError: Instead of any error that means the same.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(describe_out_of_memory(error, recipe, num_processes)) from error


def describe_out_of_memory(error: BaseException, recipe: Recipe, num_processes: int) -> str:
    """What was asked for and what would fit, in one line."""
    training = recipe.training
    asked = (
        f"out of memory{_amounts(str(error))} with {counted(training.per_device_batch_size, 'row')} of "
        f"{training.sequence_length} tokens at a time in each process"
    )
    return (
        f"{asked}: use {'; or '.join(_remedies(recipe, num_processes))}; checkpoints are kept, and the same command "
        "with such a setting goes on from the newest"
    )


def _amounts(message: str) -> str:
    if match := _CPU_ASKED.search(message):
        return f": {int(match.group(1)) / 2**30:.2f} GiB were asked for"
    asked, free = _CUDA_ASKED.search(message), _CUDA_FREE.search(message)
    parts = [f"{asked.group(1)} were asked for"] if asked else []
    if free:
        parts.append(f"{free.group(2)} of {free.group(1)} were free")
    return f": {', '.join(parts)}" if parts else ""


def _remedies(recipe: Recipe, num_processes: int) -> list[str]:
    """Settings that need less, the cheapest first; none of them changes what is learned."""
    training = recipe.training
    remedies = []
    if training.per_device_batch_size > 1:
        rows = fewer_rows(training.per_device_batch_size, list(training.batch_sizes()), num_processes)
        remedies.append(
            f"--set training.per_device_batch_size={rows} (the global batch stays {training.global_batch_size})"
        )
    if not training.gradient_checkpointing:
        remedies.append("--set training.gradient_checkpointing=true")
    if num_processes == 1 or training.sharding == "none":
        where = "" if num_processes > 1 else " on several devices"
        remedies.append(f"--set training.sharding=full{where}")
    elif not remedies:
        remedies.append("more devices")
    return remedies


def fewer_rows(per_device_batch_size: int, global_batch_sizes: list[int], num_processes: int) -> int:
    """The most rows, at most half of those that did not fit, that divide every global batch among the processes."""
    for rows in range(per_device_batch_size // 2, 1, -1):
        if all(size % (rows * num_processes) == 0 for size in global_batch_sizes):
            return rows
    return 1
