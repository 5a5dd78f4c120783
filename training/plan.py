"""What a recipe will cost before anything runs: parameters, memory, FLOPs, tokens, time, disk; and what cannot fit."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.accounting import flops_per_token, num_parameters, parameter_table
from tercet.training.errors import UserError
from tercet.training.fitting import peak, what_would_fit
from tercet.training.hardware import measure_matmul_flops
from tercet.training.memory import StepMemory, step_memory
from tercet.training.plan_machine import Machine
from tercet.training.recipe import Recipe
from tercet.training.run_folder import DATA_NAME, RECIPE_NAME
from tercet.training.sources import stored_bytes
from tercet.training.timing import time_step
from tercet.training.token_set import MANIFEST, read_manifest

TOKENS_PER_PARAMETER = 20
"""Of a compute-optimal run, about (arXiv:2203.15556, table 3)."""
BYTES_PER_TOKEN = 4
"""Assumed of text that nobody has tokenized yet."""
USUAL_MFU = 0.4
"""Assumed where a device's peak is given and nothing was timed."""


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on once: None where only reading tells. `how` says how they were counted or estimated."""

    num_tokens: int | None
    how: str
    is_prepared: bool = False


@dataclass(frozen=True)
class Duration:
    """Seconds of a step and of all steps; `how` says by what, `unevenness` why they are rough, if they are."""

    step_s: float
    run_s: float
    tokens_per_second: float
    how: str
    unevenness: str = ""


@dataclass(frozen=True)
class Disk:
    """Bytes that the run will write, and how many checkpoints are there at most at one time."""

    shards: int
    checkpoint: int
    num_checkpoints: int
    model: int

    @property
    def total(self) -> int:
        """All of them together."""
        return self.shards + self.checkpoint * self.num_checkpoints + self.model


@dataclass(frozen=True)
class Plan:
    """All figures of a recipe.

    Attributes:
        parameters: By part of the model; their sum is the model's.
        memory: Of one process.
        flops_per_token, flops_per_step, flops_per_run: Of training, by `accounting.flops_per_token`.
        num_tokens: Of all steps, padding included.
        problems: One line for each thing that cannot fit: what is asked, what is there, what would fit.
    """

    num_processes: int
    machine: Machine
    parameters: dict[str, int]
    memory: StepMemory
    flops_per_token: int
    flops_per_step: int
    flops_per_run: int
    tokens_per_step: int
    num_tokens: int
    corpus: Corpus
    duration: Duration | None
    disk: Disk
    problems: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """All trainable numbers."""
        return sum(self.parameters.values())

    @property
    def memory_asked(self) -> int:
        """Of one device; on a CPU, which its processes share, of all of them."""
        each = self.memory.peak * (self.num_processes if self.machine.on_cpu else 1)
        return each + (self.memory.snapshot if self.machine.on_cpu else 0)

    @property
    def optimal_tokens(self) -> int:
        """Of a compute-optimal run of this model."""
        return TOKENS_PER_PARAMETER * self.num_parameters

    @property
    def epochs(self) -> float | None:
        """How often the run reads its text, where that is known or estimated."""
        return self.num_tokens / self.corpus.num_tokens if self.corpus.num_tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        machine = {**asdict(self.machine), "device": str(self.machine.device) if self.machine.device else None}
        return {
            **asdict(self),
            "machine": machine,
            "memory": {**self.memory.to_dict(), "asked": self.memory_asked},
            "disk": {**asdict(self.disk), "total": self.disk.total},
            "num_parameters": self.num_parameters,
            "optimal_tokens": self.optimal_tokens,
            "epochs": self.epochs,
        }


def make_plan(
    recipe: Recipe,
    folder: Path,
    machine: Machine,
    *,
    vocab_size: int,
    num_processes: int = 1,
    timed: bool = True,
    peak_flops: float | None = None,
    mfu: float | None = None,
) -> Plan:
    """Plan a recipe.

    Args:
        folder: Of the run; text that was prepared there is counted and not estimated.
        vocab_size: Of the tokenizer.
        num_processes: World size.
        timed: Run a few steps on the machine's device, where it is at hand and they fit.
        peak_flops: FLOP/s of a device, to estimate the time by instead of timing.
        mfu: Part of `peak_flops` that training reaches; `USUAL_MFU` if not given.

    Raises:
        UserError: A global batch that does not divide among the processes, text that is not there.
    """
    training = recipe.training
    for size in training.batch_sizes():
        if size % (training.per_device_batch_size * num_processes):
            raise UserError(
                f"training.global_batch_size ({size}) is not a multiple of training.per_device_batch_size "
                f"({training.per_device_batch_size}) x {num_processes} processes: choose a smaller "
                "training.per_device_batch_size"
            )
    config = recipe.model_config_for(vocab_size, {})
    memory = step_memory(recipe, config, num_processes=num_processes, bfloat16=machine.bfloat16, on_cpu=machine.on_cpu)
    per_token = flops_per_token(config, training.sequence_length, training=True)
    tokens_per_step = training.global_batch_size * training.sequence_length
    num_tokens = training.batch_sizes().before(training.num_steps) * training.sequence_length
    corpus = corpus_of(recipe, folder)
    disk = _disk(recipe, vocab_size, memory, num_processes, corpus, num_tokens)
    problems = [
        *_memory_problem(recipe, config, memory, machine, num_processes),
        *_disk_problem(recipe, disk, machine),
    ]
    duration = None
    if peak_flops is not None:
        share = mfu or USUAL_MFU
        step_s = per_token * tokens_per_step / (peak_flops * share * num_processes)
        how = f"by FLOPs, at {share:.0%} of {peak_flops / 1e12:,.4g} TFLOP/s a device"
        duration = _duration(step_s, num_tokens, tokens_per_step, how)
    elif timed and machine.device is not None and not problems:
        duration = _timed(recipe, config, machine, num_processes, num_tokens, tokens_per_step, per_token)
    return Plan(
        num_processes=num_processes,
        machine=machine,
        parameters=parameters_by_part(config),
        memory=memory,
        flops_per_token=per_token,
        flops_per_step=per_token * tokens_per_step,
        flops_per_run=per_token * num_tokens,
        tokens_per_step=tokens_per_step,
        num_tokens=num_tokens,
        corpus=corpus,
        duration=duration,
        disk=disk,
        problems=tuple(problems),
    )


def parameters_by_part(config: TercetConfig) -> dict[str, int]:
    """Trainable numbers of embeddings, attention, feed-forward, norms and, where it is no embedding, head."""
    with torch.device("meta"):
        model = TercetForCausalLM(config)
    parts: dict[str, int] = dict.fromkeys(("embeddings", "attention", "feed-forward", "norms", "head"), 0)
    for row in parameter_table(model):
        inside = (("self_attn", "attention"), ("mlp", "feed-forward"), ("embed", "embeddings"), ("lm_head", "head"))
        part = next((part for name, part in inside if row.name.startswith(name)), "norms")
        parts[part] += row.num_parameters
    assert sum(parts.values()) == num_parameters(model)
    return parts


def corpus_of(recipe: Recipe, folder: Path) -> Corpus:
    """Tokens of the training split: counted where they are prepared, else estimated from the files' bytes.

    Raises:
        DataError: A source that is not there.
    """
    sizes = [stored_bytes(source) for source in recipe.data.all_sources()]
    if recipe.data.stream:
        return Corpus(None, "a stream: only reading it tells")
    data = folder / DATA_NAME
    if (data / MANIFEST).is_file() and _is_of_the_same_text(recipe, folder):
        manifest = read_manifest(data)
        stored = sum(counts["tokens"] for counts in manifest["by_source"].values())
        trained = round(stored * (1 - recipe.data.validation_fraction))
        return Corpus(trained, f"counted in {data}, less {recipe.data.validation_fraction:g} held out", True)
    if None in sizes:
        return Corpus(None, "a dataset on the Hub: only reading it tells")
    num_bytes = sum(size for size in sizes if size is not None)
    trained = int(num_bytes / BYTES_PER_TOKEN * (1 - recipe.data.validation_fraction))
    return Corpus(
        trained,
        f"estimated: {num_bytes:,} bytes of files / {BYTES_PER_TOKEN}, less {recipe.data.validation_fraction:g} held "
        "out; compressed ones hold more",
    )


def _is_of_the_same_text(recipe: Recipe, folder: Path) -> bool:
    """Whether what is prepared in the folder was prepared for this recipe's text and vocabulary."""
    try:
        earlier = yaml.safe_load((folder / RECIPE_NAME).read_text("utf-8"))
        now = recipe.model_dump(mode="json")
        return all(earlier[section] == now[section] for section in ("data", "tokenizer"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        return False


def _disk(
    recipe: Recipe, vocab_size: int, memory: StepMemory, num_processes: int, corpus: Corpus, num_tokens: int
) -> Disk:
    training = recipe.training
    # The snapshot that a checkpoint is written from is the whole state, whatever each process holds.
    per_save = math.lcm(training.save_every, training.keep_every) if training.keep_every else None
    kept = training.keep_last + 1  # the next one is whole before the oldest goes
    kept += training.num_steps // per_save if per_save else 0
    kept += training.keep_best
    saves = -(-training.num_steps // training.save_every)
    is_shared = num_processes > 1 and training.sharding == "full"
    weights = memory.weights * (num_processes if is_shared else 1)
    tokens = 0 if corpus.is_prepared else corpus.num_tokens or num_tokens
    if recipe.data.stream:
        tokens = int(recipe.data.stream_sample_mb * 1e6 / BYTES_PER_TOKEN)
    item = 2 if vocab_size <= 1 << 16 else 4
    return Disk(tokens * item, memory.snapshot, min(kept, saves + 1 if training.keep_best else saves), weights)


def _memory_problem(
    recipe: Recipe, config: TercetConfig, memory: StepMemory, machine: Machine, num_processes: int
) -> list[str]:
    available = machine.memory_bytes
    if machine.on_cpu:
        # Each process has its part of what is left beside the snapshot of the main one.
        available = (available - memory.snapshot) // num_processes + memory.snapshot
    asked = peak(memory, on_cpu=machine.on_cpu)
    if asked <= available:
        return []
    remedies = what_would_fit(
        recipe, config, memory, available, num_processes=num_processes, bfloat16=machine.bfloat16, on_cpu=machine.on_cpu
    )
    each = " a process" if machine.on_cpu and num_processes > 1 else "" if machine.on_cpu else " a device"
    return [
        f"memory: the step needs {gibibytes(asked)}{each} and {gibibytes(available)} are free on {machine.name}; "
        f"what would fit: {'; or '.join(remedies)}"
    ]


def _disk_problem(recipe: Recipe, disk: Disk, machine: Machine) -> list[str]:
    if machine.disk_bytes is None or disk.total <= machine.disk_bytes:
        return []
    room = machine.disk_bytes - disk.shards - disk.model
    fitting = max(room // max(disk.checkpoint, 1), 0)
    if fitting >= 2:
        without = " --set training.keep_every=null" if recipe.training.keep_every else ""
        best = " --set training.keep_best=false" if recipe.training.keep_best else ""
        keep = min(recipe.training.keep_last, fitting - 1)
        remedy = f"--set training.keep_last={keep}{without}{best}"
    else:
        remedy = f"an --output on a disk with {gibibytes(disk.shards + disk.model + 2 * disk.checkpoint)} free"
    return [
        f"disk: the run writes up to {gibibytes(disk.total)} ({disk.num_checkpoints} checkpoints of "
        f"{gibibytes(disk.checkpoint)}) and {gibibytes(machine.disk_bytes)} are free; what would fit: {remedy}"
    ]


def _timed(
    recipe: Recipe,
    config: TercetConfig,
    machine: Machine,
    num_processes: int,
    num_tokens: int,
    tokens_per_step: int,
    per_token: int,
) -> Duration:
    assert machine.device is not None
    training = recipe.training
    # A micro-batch that would take minutes tells no more than its FLOPs do.
    rate = measure_matmul_flops(machine.device)
    if per_token * training.sequence_length / rate > _LONGEST_ROW_S:
        step_s = per_token * tokens_per_step / (rate * USUAL_MFU * num_processes)
        how = f"by FLOPs, at {USUAL_MFU:.0%} of the {rate / 1e9:,.0f} GFLOP/s measured here: one row takes too long"
        return _duration(step_s, num_tokens, tokens_per_step, how)
    timing = time_step(recipe, config, machine.device, num_processes=num_processes, bfloat16=machine.bfloat16)
    speed = tokens_per_step / timing.step_s
    share = speed * per_token / (timing.matmul_flops * num_processes)
    fewer = f" of {timing.rows} rows" if timing.rows < training.per_device_batch_size else ""
    how = (
        f"the fastest of {timing.num_timed} timed micro-batches{fewer} and updates on {machine.name}, "
        f"{min(share, 1):.0%} of its matrix-product rate"
    )
    if num_processes > 1:
        how += f"; {num_processes} processes are taken to be as fast each, and to wait for nothing"
    return _duration(timing.step_s, num_tokens, tokens_per_step, how, timing.unevenness())


_LONGEST_ROW_S = 20.0


def _duration(step_s: float, num_tokens: int, tokens_per_step: int, how: str, unevenness: str = "") -> Duration:
    speed = tokens_per_step / step_s
    return Duration(step_s, num_tokens / speed, speed, how, unevenness)


def gibibytes(size: int) -> str:
    """Bytes for a line of text."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"


__all__ = [
    "Corpus",
    "Disk",
    "Duration",
    "Plan",
    "corpus_of",
    "gibibytes",
    "make_plan",
    "parameters_by_part",
]
