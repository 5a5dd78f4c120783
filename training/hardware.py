"""The machine and the libraries that ran, for the record of a run; and how much memory is left."""

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tercet.training.results import Hardware, Versions

if TYPE_CHECKING:
    import torch


def describe_hardware(device: "torch.device | str" = "cpu", num_processes: int = 1) -> Hardware:
    """Name the device, the processor and the threads in use.

    Args:
        device: Where the model ran; an accelerator is recorded by its own name, such as "NVIDIA H200".
        num_processes: The world size that really ran, not the one that was asked for.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        name = "cpu"
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = device.type
    return Hardware(
        device=name,
        processor=processor_name(),
        num_processes=num_processes,
        num_threads=torch.get_num_threads(),
        num_cores=usable_cores(),
    )


def processor_name() -> str:
    """The processor's model name, or the architecture where the system tells no more."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if answer:
            return answer
    return platform.processor() or platform.machine() or "unknown"


def usable_cores() -> int:
    """Cores this process may run on; fewer than the machine has under `taskset` or a scheduler."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> Versions:
    """Versions of what decides the numbers, read from the installed packages without importing them."""
    names = ("torch", "transformers", "tokenizers", "datasets", "accelerate")
    return Versions(python=platform.python_version(), **{name: version(name) for name in names})


def free_memory_bytes(device: "torch.device | str" = "cpu") -> int:
    """What a process may still take of a device's memory, or of the machine's within its container's limit."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return min([psutil.virtual_memory().available, *_free_of_container()])


def _free_of_container() -> list[int]:
    """Bytes left under the limit of this process's control group, where it has one."""
    for limit_name, used_name, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            limit = (root / limit_name).read_text().strip()
            used = int((root / used_name).read_text())
            statistics = (root / limit_name).parent.joinpath("memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        # Cached files count as used and go as soon as someone needs the room.
        cached = next((int(line.split()[1]) for line in statistics if line.startswith(f"{reclaimable} ")), 0)
        if limit.isdigit():
            return [max(int(limit) - used + cached, 0)]
    return []


def supports_bfloat16(on_cpu: bool) -> bool:
    """Whether bfloat16 products are computed by the CPU, or by the accelerator, and not emulated in software."""
    import torch

    if not on_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(_cpu_flags() & {"amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16", "svebf16"})


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.lower().split()) for line in lines if line.startswith(("flags", "Features"))), set())


def measure_matmul_flops(device: "torch.device", *, size: int = 1024, seconds: float = 0.3) -> float:
    """FLOP/s that float32 (on accelerators, bfloat16) matrix products reach here: what MFU is a share of."""
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if device.type != "cpu":
        size *= 8
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best, spent = 0.0, 0.0
    torch.matmul(left, right)
    while spent < seconds:
        started = time.perf_counter()
        torch.matmul(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        duration = time.perf_counter() - started
        best, spent = max(best, 2 * size**3 / duration), spent + duration
    return best


class PeakRate:
    """FLOP/s of matrix products that all devices reach together: the best seen, of which MFU is a share.

    A machine that is busy for a moment, or clocks down, gives a rate that is too low; none gives one too high. So the
    rate is measured again now and then, and what the model itself reaches counts as well.

    Attributes:
        flops: FLOP/s, of all processes.
    """

    def __init__(self, device: "torch.device", num_processes: int = 1, *, pause_s: float = 10.0) -> None:
        self._device, self._num_processes, self._pause_s = device, num_processes, pause_s
        self.flops = measure_matmul_flops(device) * num_processes
        self._measured_at = time.monotonic()

    def measure_again(self) -> None:
        """Take a tenth of a second for another try, on a CPU and not oftener than every `pause_s`.

        An accelerator is not shared as a rule, and its matrices might not fit beside a model in training.
        """
        if self._device.type != "cpu" or time.monotonic() - self._measured_at < self._pause_s:
            return
        self.flops = max(self.flops, measure_matmul_flops(self._device, seconds=0.1) * self._num_processes)
        self._measured_at = time.monotonic()

    def share(self, flops: float) -> float:
        """MFU at so many FLOP/s of the model, at most 1: a model that is faster shows that the peak is higher."""
        self.flops = max(self.flops, flops)
        return flops / self.flops
