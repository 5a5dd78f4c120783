"""The machine that a recipe is planned for: its device, its memory and its disk."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from tercet.training.errors import UserError
from tercet.training.hardware import free_memory_bytes, supports_bfloat16
from tercet.training.recipe import Recipe


@dataclass(frozen=True)
class Machine:
    """What the recipe is planned for.

    Attributes:
        name: For a reader.
        device: Where to time steps; None if the machine is another one.
        memory_bytes: Free on each device; on a CPU all processes share it.
        disk_bytes: Free where the run's folder will be; None if that is on another machine.
        bfloat16: Whether a recipe with `precision: auto` computes in it there.
        on_cpu: Whether the device is one.
    """

    name: str
    device: torch.device | None
    memory_bytes: int
    disk_bytes: int | None
    bfloat16: bool
    on_cpu: bool


def this_machine(recipe: Recipe, folder: Path) -> Machine:
    """The machine that this runs on.

    Raises:
        UserError: The recipe wants a device that is not here.
    """
    has_cuda = torch.cuda.is_available()
    if recipe.training.device == "cuda" and not has_cuda:
        raise UserError(
            "training.device is cuda and no CUDA device is here: plan for another machine with --device-memory, or "
            "use --set training.device=cpu"
        )
    device = torch.device("cuda" if has_cuda and recipe.training.device != "cpu" else "cpu")
    on_cpu = device.type == "cpu"
    name = "this machine's CPU" if on_cpu else torch.cuda.get_device_name(device)
    bfloat16 = recipe.training.precision == "bfloat16" or (
        recipe.training.precision == "auto" and not on_cpu and supports_bfloat16(on_cpu)
    )
    return Machine(name, device, free_memory_bytes(device), free_disk_bytes(folder), bfloat16, on_cpu)


def other_machine(recipe: Recipe, memory_bytes: int) -> Machine:
    """A machine whose devices are accelerators with so much memory each."""
    bfloat16 = recipe.training.precision != "float32"
    return Machine("another machine", None, memory_bytes, None, bfloat16, on_cpu=False)


def free_disk_bytes(folder: Path) -> int:
    """Free space where a folder is or would be."""
    place = folder.expanduser().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
