"""What a run shows and records while it goes on."""

import json
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from tqdm import tqdm

from tercet.training.atomic import write_atomically
from tercet.training.counts import counted
from tercet.training.recipe import Recipe
from tercet.training.results import Evaluation
from tercet.training.run_state import RunState


def opening_lines(recipe: Recipe, accelerator: Accelerator, epoch: str, step: int) -> list[str]:
    """What a run is about to do: where, in which batches, how long.

    Args:
        recipe: Of the run.
        accelerator: Knows processes, device and precision.
        epoch: What an epoch is; see `StepBatches.describe`.
        step: Steps done.
    """
    training, num_processes = recipe.training, accelerator.num_processes
    rows, at_once = training.global_batch_size, training.per_device_batch_size * num_processes
    machine = [f"{counted(num_processes, 'process', 'processes')} on {accelerator.device.type}"]
    if num_processes > 1:
        machine.append("weights sharded (FSDP2)" if training.sharding == "full" else "weights in every process (DDP)")
    elif training.sharding == "full":
        machine.append("no sharding: one process")
    machine.append("bfloat16" if accelerator.mixed_precision == "bf16" else "float32")
    batch = f"{counted(rows, 'row')} of {training.sequence_length} tokens, {rows * training.sequence_length:,} a step"
    if rows > training.per_device_batch_size:
        batch += f": {counted(training.per_device_batch_size, 'row')} x {rows // at_once} accumulated"
        batch += f" x {num_processes} processes" if num_processes > 1 else ""
    if training.batch_size_warmup:
        batch += f"; grows from {counted(training.batch_size_warmup[0].global_batch_size, 'row')}"
    start = "from the start" if step == 0 else f"going on from step {step}"
    return [
        f"Machine    {', '.join(machine)}",
        f"Batch      {batch}",
        f"Training   {counted(training.num_steps, 'step')}, {start}; {epoch}",
    ]


def shown_values(
    loss_nats: float, tokens_per_second: float, mfu: float, grad_norm: float, learning_rate: float
) -> dict[str, str]:
    """What the bar shows of a step."""
    return {
        "loss": f"{loss_nats:.3f}",
        "tok/s": f"{tokens_per_second:,.0f}",
        "mfu": f"{mfu:.0%}",
        "grad": f"{grad_norm:.2f}",
        "lr": f"{learning_rate:.1e}",
    }


def evaluation_record(state: RunState, evaluation: Evaluation) -> dict[str, Any]:
    """What is recorded of an evaluation, of all text and of each source."""
    record = {
        "step": state.step,
        "tokens": state.tokens_seen,
        "validation_loss_nats": evaluation.loss_nats,
        "validation_bits_per_byte": evaluation.bits_per_byte,
    }
    for label, measured in evaluation.by_source.items():
        record[f"validation_bits_per_byte/{label}"] = measured.bits_per_byte
    return record


_FIRST_STEPS = 5


class Progress:
    """One bar for a whole run on a terminal; where there is none, a line for each logged step."""

    def __init__(self, num_steps: int, *, is_main: bool) -> None:
        self._num_steps, self._is_main, self._num_advanced = num_steps, is_main, 0
        self._bar = tqdm(
            total=num_steps, desc="Training", unit="step", smoothing=0.05, dynamic_ncols=True,
            disable=None if is_main else True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin_at(self, step: int) -> None:
        """So many steps were done before."""
        self._bar.reset()
        self._bar.initial = self._bar.n = self._bar.last_print_n = step

    def advance(self) -> None:
        """One step done."""
        self._num_advanced += 1
        self._bar.update()

    def show(self, step: int, values: dict[str, str], seconds_left: float) -> None:
        """Show the values of a step. The bar itself says how long it will take; a line says `seconds_left`.

        Not of the first steps, which also load and compile: they took up to 15 times as long as those after them.
        """
        if not self._bar.disable:
            self._bar.set_postfix(values, refresh=False)
        elif self._is_main:
            shown = "  ".join(f"{name} {value}" for name, value in values.items())
            if self._num_advanced >= _FIRST_STEPS:
                shown += f"  left {tqdm.format_interval(int(seconds_left))}"
            print(f"step {step:>6}/{self._num_steps}   {shown}", flush=True)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(line)
        elif self._is_main:
            print(line, flush=True)


class MetricsFile:
    """`metrics.jsonl`: a line a record, flushed as written, so that a killed run loses none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """What was recorded, in its order; torn lines are left out."""
        if not self.path.exists():
            return []
        records = []
        for line in self.path.read_text("utf-8").splitlines():
            try:
                record = json.loads(line)
                int(record["step"])
            except (ValueError, KeyError, TypeError):
                continue
            records.append(record)
        return records

    def drop_after(self, step: int) -> None:
        """Forget what a killed run logged after the checkpoint that the run now goes on from; torn lines, too."""
        if self.path.exists():
            kept = [json.dumps(record) + "\n" for record in self.records() if record["step"] <= step]
            write_atomically(self.path, "".join(kept).encode())
