"""The training loop: steps, and between them what a run owes its user: a bar, metrics, evaluations, checkpoints.

Everything that decides a weight is a function of the recipe and the step number, or is in the checkpoint: a run that
was stopped and started again ends with the bits of one that was not (same machine, same number of processes).
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self, cast

import torch
from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tercet.tokenizer import token_ids
from tercet.training.accounting import flops_per_token
from tercet.training.arrangement import arrange
from tercet.training.atomic import write_atomically
from tercet.training.batches import PackedBatches
from tercet.training.checkpoints import RunState, list_checkpoints, load_checkpoint, save_checkpoint
from tercet.training.curve import METRICS_NAME
from tercet.training.errors import UserError
from tercet.training.evaluation import evaluate
from tercet.training.optimizers import make_optimizers
from tercet.training.packing import PackedDataset
from tercet.training.recipe import Recipe
from tercet.training.results import Evaluation
from tercet.training.schedules import learning_rate_factor
from tercet.training.step import DivergedError, StepResult, set_learning_rates, training_step
from tercet.training.token_set import PreparedData


@dataclass(frozen=True)
class LoopOutcome:
    """How a call of `run_loop` ended.

    Attributes:
        state: Where the run stands.
        interrupted_by: Name of the signal that stopped it, None if it reached its last step.
        checkpoint: The newest checkpoint.
        loss_nats: Training loss of the last step.
        evaluation: Of the last step, None if the run did not get there or there is nothing to evaluate on.
        tokens_per_second: Over all training time of the run, evaluations and checkpoints left out.
        mfu: FLOPs of the model per second over the device's measured rate for matrix products.
    """

    state: RunState
    interrupted_by: str | None
    checkpoint: Path | None
    loss_nats: float
    evaluation: Evaluation | None
    tokens_per_second: float
    mfu: float


class TrainingLoop:
    """A run from its newest checkpoint, or from the start, to the recipe's last step or until a signal.

    Args:
        recipe: What to do.
        output_dir: Gets `metrics.jsonl` and `checkpoints/`.
        model: New weights; those of a checkpoint are loaded into it.
        tokenizer: Gives the ids that start documents and fill rows.
        data: What to train and to evaluate on.
        accelerator: Knows device, processes and precision.
        write_model: Writes the folder that transformers loads.
        peak_flops: FLOP/s of matrix products that the devices of all processes reach together, for the MFU.

    Raises:
        UserError: Less text than one row, or a global batch that does not divide among the processes.
    """

    def __init__(
        self,
        recipe: Recipe,
        output_dir: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        data: PreparedData,
        accelerator: Accelerator,
        write_model: Callable[[Path], None],
        peak_flops: float,
    ) -> None:
        training, optimizer = recipe.training, recipe.optimizer
        self.recipe, self.output_dir, self.model, self.accelerator = recipe, output_dir, model, accelerator
        self.data, self.write_model, self.peak_flops = data, write_model, peak_flops
        self.special = token_ids(tokenizer).for_rows()
        model.to(accelerator.device)
        model.train()
        self.optimizers = make_optimizers(
            model,
            name=optimizer.name,
            learning_rate=optimizer.learning_rate,
            matrix_learning_rate=optimizer.matrix_learning_rate,
            weight_decay=optimizer.weight_decay,
            betas=optimizer.betas,
        )
        arrangement = arrange(
            data.train,
            training.sequence_length,
            packing=training.packing,
            seed=recipe.seed,
            weights=recipe.data.weights(),
        )
        self.packing = arrangement.packing
        self.batches = PackedBatches(
            PackedDataset(data.train, self.packing, **self.special),
            seed=recipe.seed,
            global_batch_size=training.global_batch_size,
            per_device_batch_size=training.per_device_batch_size,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            order=arrangement.order,
            with_document_bounds="flash" in (model.config._attn_implementation or ""),
        )
        self.metrics = MetricsFile(output_dir / METRICS_NAME) if accelerator.is_main_process else None
        self.flops_per_token = flops_per_token(model.config, training.sequence_length, training=True)
        self.evaluation: Evaluation | None = None
        self.logged = RunState()

    def run(self) -> LoopOutcome:
        """Train.

        Raises:
            UserError: The checkpoint is damaged or of other data, or training diverged.
        """
        state, checkpoint = self._resume()
        wrapped: Any = self.accelerator.prepare(
            torch.compile(self.model) if self.recipe.training.compile else self.model
        )
        if self.metrics is not None:
            self.metrics.drop_after(state.step)
        with stop_signals() as stop, self._bar(state.step) as bar:
            bar.say(self._opening_line(state))
            for micro_batches in self.batches.steps(state.step, self.recipe.training.num_steps):
                started = time.perf_counter()
                self._set_learning_rate(state.step)
                try:
                    result = training_step(
                        wrapped, self.optimizers, micro_batches, self.accelerator,
                        clip_norm=self.recipe.optimizer.clip_norm,
                    )  # fmt: skip
                except DivergedError as error:
                    raise UserError(
                        f"training diverged in step {state.step + 1}: {error}. Lower optimizer.learning_rate or "
                        f"optimizer.matrix_learning_rate; last good checkpoint: {checkpoint or 'none'}"
                    ) from error
                state = replace(
                    state,
                    step=state.step + 1,
                    tokens_seen=state.tokens_seen + int(result.num_tokens),
                    duration_s=state.duration_s + time.perf_counter() - started,
                    loss_nats=float(result.loss_nats),
                )
                stopping = self._any_process_stops(stop)
                checkpoint = self._after_step(state, result, bar, checkpoint, stopping is not None)
                if stopping is not None:
                    break
        interrupted_by = stop.received if state.step < self.recipe.training.num_steps else None
        speed = state.tokens_seen / max(state.duration_s, 1e-9)
        return LoopOutcome(
            state,
            interrupted_by,
            checkpoint,
            state.loss_nats,
            self.evaluation,
            speed,
            speed * self.flops_per_token / self.peak_flops,
        )

    def _resume(self) -> tuple[RunState, Path | None]:
        found = list_checkpoints(self.output_dir)
        fingerprint = self.data.fingerprint
        if not found:
            return RunState(num_processes=self.accelerator.num_processes, data_fingerprint=fingerprint), None
        state = load_checkpoint(found[-1], model=self.model, optimizers=self.optimizers, accelerator=self.accelerator)
        if state.data_fingerprint != fingerprint:
            raise UserError(
                f"the text has changed since {found[-1]} was saved, and the run cannot go on in it as if it had not: "
                "restore the text, choose another output folder, or --restart"
            )
        return replace(state, num_processes=self.accelerator.num_processes), found[-1]

    def _after_step(
        self, state: RunState, result: StepResult, bar: "Progress", checkpoint: Path | None, stopping: bool
    ) -> Path | None:
        training = self.recipe.training
        is_last = state.step == training.num_steps
        if state.step % training.log_every == 0 or is_last or state.step == 1:
            self._log(state, result, bar)
        bar.advance()
        if (state.step % training.evaluate_every == 0 or is_last) and self.data.validation.num_tokens:
            self.evaluation = self._evaluate()
            self._log_evaluation(state, self.evaluation, bar)
            if not is_last:
                self.evaluation = None
        if state.step % training.save_every == 0 or is_last or stopping:
            checkpoint = save_checkpoint(
                self.output_dir,
                state,
                write_model=self.write_model,
                model=self.model,
                optimizers=self.optimizers,
                accelerator=self.accelerator,
                keep_last=training.keep_last,
            )
        return checkpoint

    def _evaluate(self) -> Evaluation:
        training = self.recipe.training
        return evaluate(
            self.model,
            self.data.validation,
            sequence_length=training.sequence_length,
            accelerator=self.accelerator,
            eos_token_id=self.special["eos_token_id"],
            pad_token_id=self.special["pad_token_id"],
        )

    def _set_learning_rate(self, step: int) -> None:
        optimizer = self.recipe.optimizer
        factor = learning_rate_factor(
            step,
            self.recipe.training.num_steps,
            schedule=optimizer.schedule,
            warmup=optimizer.warmup_steps,
            decay_fraction=optimizer.decay_fraction,
            final_fraction=optimizer.final_fraction,
        )
        set_learning_rates(self.optimizers, factor)

    def _log(self, state: RunState, result: StepResult, bar: "Progress") -> None:
        since = self.logged if self.logged.step else replace(state, tokens_seen=0, duration_s=0.0)
        speed = (state.tokens_seen - since.tokens_seen) / max(state.duration_s - since.duration_s, 1e-9)
        self.logged = state
        mfu = speed * self.flops_per_token / self.peak_flops
        bar.show(state.step, {"loss": f"{state.loss_nats:.3f}", "tok/s": f"{speed:,.0f}", "mfu": f"{mfu:.0%}"})
        record = {
            "step": state.step,
            "tokens": state.tokens_seen,
            "loss_nats": state.loss_nats,
            "learning_rate": self.optimizers[-1].param_groups[0]["lr"],
            "grad_norm": float(result.grad_norm),
            "tokens_per_second": round(speed, 1),
            "mfu": round(mfu, 4),
            "duration_s": round(state.duration_s, 3),
        }
        self._record(record, state.step)

    def _log_evaluation(self, state: RunState, evaluation: Evaluation, bar: "Progress") -> None:
        record = {
            "step": state.step,
            "tokens": state.tokens_seen,
            "validation_loss_nats": evaluation.loss_nats,
            "validation_bits_per_byte": evaluation.bits_per_byte,
        }
        self._record(record, state.step)
        bar.say(
            f"step {state.step:>6}   validation loss {evaluation.loss_nats:.4f} nats a token, "
            f"{evaluation.bits_per_byte:.4f} bits a byte"
        )

    def _record(self, record: dict[str, Any], step: int) -> None:
        if self.metrics is not None:
            self.metrics.append(record)
        self.accelerator.log({key: value for key, value in record.items() if key != "step"}, step=step)

    def _any_process_stops(self, stop: "StopRequest") -> str | None:
        if self.accelerator.num_processes == 1:
            return stop.received
        flag = torch.tensor(float(stop.received is not None), device=self.accelerator.device)
        if float(cast(Any, self.accelerator.reduce(flag, reduction="sum"))) == 0:
            return None
        stop.received = stop.received or "a signal to another process"
        return stop.received

    def _opening_line(self, state: RunState) -> str:
        training, accelerator = self.recipe.training, self.accelerator
        start = "from the start" if state.step == 0 else f"going on from step {state.step}"
        return (
            f"{accelerator.num_processes} process(es) on {accelerator.device.type}, "
            f"{training.per_device_batch_size} rows x {self.batches.accumulation_steps} accumulated x "
            f"{accelerator.num_processes} = {training.global_batch_size} rows of {training.sequence_length} tokens "
            f"a step; "
            f"{self.packing.num_rows:,} rows an epoch, {self.packing.padding_fraction:.2%} padding; {start}"
        )

    def _bar(self, step: int) -> "Progress":
        return Progress(self.recipe.training.num_steps, step, is_main=self.accelerator.is_main_process)


class Progress:
    """One bar for a whole run on a terminal; where there is none, a line for each logged step."""

    def __init__(self, num_steps: int, step: int, *, is_main: bool) -> None:
        self._num_steps, self._is_main = num_steps, is_main
        self._bar = tqdm(
            total=num_steps, initial=step, desc="Training", unit="step", smoothing=0.05, dynamic_ncols=True,
            disable=None if is_main else True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self) -> None:
        """One step done."""
        self._bar.update()

    def show(self, step: int, values: dict[str, str]) -> None:
        """Show the values of a step."""
        if not self._bar.disable:
            self._bar.set_postfix(values, refresh=False)
        elif self._is_main:
            print(f"step {step:>6}/{self._num_steps}   " + "  ".join(f"{k} {v}" for k, v in values.items()), flush=True)

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

    def drop_after(self, step: int) -> None:
        """Forget what a killed run logged after the checkpoint that the run now goes on from; torn lines, too."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text("utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        write_atomically(self.path, "".join(kept).encode())


class StopRequest:
    """Whether a signal has asked the run to stop, and which."""

    received: str | None = None


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request, answered after the step that runs; a second SIGINT acts at once."""
    request = StopRequest()
    previous: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        if request.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.received = signal.Signals(number).name

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            previous[number] = signal.signal(number, ask)
        except ValueError:  # not in the main thread, where signals do not arrive anyway
            continue
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
