"""The training loop: steps, and between them what a run owes its user: a bar, metrics, evaluations, checkpoints.

Everything that decides a weight is a function of the recipe and the step number, or is in the checkpoint: a run that
was stopped and started again ends with the bits of one that was not (same machine, same number of processes).
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tercet.tokenizer import special_ids, token_ids
from tercet.training.acceleration import compile_model
from tercet.training.accounting import flops_per_token
from tercet.training.agreement import Agreement
from tercet.training.counts import counted
from tercet.training.curve import METRICS_NAME
from tercet.training.deadline import Deadline
from tercet.training.documents import DataError
from tercet.training.ema import WeightAverage
from tercet.training.errors import UserError
from tercet.training.evaluation import NotFiniteError, evaluate
from tercet.training.hardware import PeakRate
from tercet.training.optimizers import optimizers_of_recipe
from tercet.training.progress import MetricsFile, Progress, evaluation_record, opening_lines, shown_values
from tercet.training.publishing import Publisher
from tercet.training.recipe import Recipe
from tercet.training.restart import starting_point
from tercet.training.results import Evaluation, RunResults
from tercet.training.run_state import LoopOutcome, RunState
from tercet.training.samples import SAMPLES_NAME, document_start, make_samples, message_start, record_samples
from tercet.training.saver import Saver
from tercet.training.saving import WriteModel
from tercet.training.schedules import learning_rate_factor
from tercet.training.sharding import is_sharded, shard_model, whole_model
from tercet.training.signals import StopRequest, stop_signals
from tercet.training.starting_weights import is_chat
from tercet.training.step import set_learning_rates, training_step
from tercet.training.step_batches import StepBatches
from tercet.training.token_set import PreparedData
from tercet.training.watch import PendingSteps, SpikeWatch, StepReading, describe_bad_step

# Results of so many steps at most wait on the device to be read.
_MAX_PENDING = 1000


class TrainingLoop:
    """A run from its newest checkpoint, or from the start, to the recipe's last step, a signal, or its deadline.

    Args:
        recipe: What to do.
        output_dir: Gets `metrics.jsonl` and `checkpoints/`.
        model: New weights; those of a checkpoint are loaded into it.
        tokenizer: Gives the ids that start documents and fill rows.
        data: What to evaluate on, and what its batches are of.
        batches: What to train on, this process's part of it.
        accelerator: Knows device, processes and precision.
        write_model: Writes the folder that transformers loads, from weights; called in another thread.
        peak: FLOP/s of matrix products that the devices of all processes reach together, for the MFU.
        started: When the run's time began (`time.monotonic`), for `training.max_hours`; None: now.
        measure: Makes the record that goes into a checkpoint, of how the loop stands and an evaluation of its weights.
        publisher: Pushes checkpoints; the main process's.
    """

    def __init__(
        self,
        recipe: Recipe,
        output_dir: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        data: PreparedData,
        batches: StepBatches,
        accelerator: Accelerator,
        write_model: WriteModel,
        peak: PeakRate,
        started: float | None = None,
        measure: Callable[[LoopOutcome, Evaluation | None], RunResults] | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        training = recipe.training
        self.recipe, self.output_dir, self.model, self.accelerator = recipe, output_dir, model, accelerator
        self.data, self.tokenizer, self.peak = data, tokenizer, peak
        self.special = token_ids(tokenizer).for_rows()
        model.to(accelerator.device)
        model.train()
        if training.sharding == "full":
            shard_model(model, accelerator)
        self.optimizers = optimizers_of_recipe(recipe.optimizer, model)
        self.average = WeightAverage(model, recipe.optimizer.ema_decay) if recipe.optimizer.ema_decay else None
        self.batches = batches
        self.positions: list[dict[str, Any]] | None = None  # of the batches in every process, where they have one
        self.metrics = MetricsFile(output_dir / METRICS_NAME)
        self.agreement = Agreement(accelerator)
        self.saver = Saver(
            training, output_dir, model, self.optimizers, self.average, accelerator, self.agreement, write_model,
            None if publisher is None else publisher.offer,
        )  # fmt: skip
        self.measure, self.publisher = measure, publisher
        self.deadline = Deadline(
            time.monotonic() if started is None else started,
            None if training.max_hours is None else training.max_hours * 3600,
            self.saver.longest_s,
        )
        self.flops_per_token = flops_per_token(model.config, training.sequence_length, training=True)
        self.evaluation: Evaluation | None = None
        self.evaluated_at: int | None = None
        self.pending = PendingSteps()
        self.state = self.logged = RunState()
        self.spikes = SpikeWatch(training.spike_factor)
        self._clock = 0.0

    def run(self) -> LoopOutcome:
        """Train.

        Raises:
            UserError: The checkpoint is of other data, a checkpoint could not be written, or too many steps in a row
                had a gradient that is not finite.
        """
        num_steps = self.recipe.training.num_steps
        stopped_by = None
        with stop_signals() as stop, self._bar() as bar:
            self._resume(bar)
            wrapped = self._wrap(bar)
            for line in opening_lines(self.recipe, self.accelerator, self.batches.describe(), self.state.step):
                bar.say(line)
            self._clock = time.perf_counter()
            with self.saver:
                for micro_batches in self._micro_batches():
                    self._set_learning_rate()
                    result = training_step(
                        wrapped, self.optimizers, micro_batches, self.accelerator,
                        clip_norm=self.recipe.optimizer.clip_norm, z_loss=self.recipe.optimizer.z_loss,
                    )  # fmt: skip
                    self.state = replace(self.state, step=self.state.step + 1)
                    self.pending.add(self.state.step, result)
                    if self.average is not None:
                        self.average.update(self.state.step, result.is_finite)
                    stopped_by = self._after_step(bar, stop)
                    if stopped_by is not None:
                        break
        is_at_end = self.state.step == num_steps
        if is_at_end and self.average is not None:
            # What the folder will hold; the checkpoint has both.
            self.average.put_in()
        return self._outcome(None if is_at_end else stopped_by)

    def _outcome(self, interrupted_by: str | None) -> LoopOutcome:
        state = self.state
        speed = state.tokens_seen / max(state.duration_s, 1e-9)
        is_at_end = state.step == self.recipe.training.num_steps == self.evaluated_at
        return LoopOutcome(
            state,
            interrupted_by=interrupted_by,
            checkpoint=self.saver.newest,
            loss_nats=state.loss_nats,
            positions=self.positions,
            evaluation=self.evaluation if is_at_end else None,
            tokens_per_second=speed,
            mfu=self.peak.share(speed * self.flops_per_token),
            stalled_s=self.saver.stalled_s,
        )

    def _resume(self, bar: Progress) -> None:
        state, self.saver.newest = starting_point(
            self.recipe,
            self.output_dir,
            self.data,
            model=self.model,
            optimizers=self.optimizers,
            average=self.average,
            accelerator=self.accelerator,
            agreement=self.agreement,
            batches=self.batches,
            say=bar.say,
        )
        self.positions = self._gather_positions()
        self.state = self.logged = state
        bar.begin_at(state.step)
        if self.accelerator.is_main_process:
            self.metrics.drop_after(state.step)
            losses = [record["loss_nats"] for record in self.metrics.records() if "loss_nats" in record]
            self.spikes = SpikeWatch(self.recipe.training.spike_factor, losses)

    def _wrap(self, bar: Progress) -> Any:
        model = compile_model(self.model, bar.say) if self.recipe.training.compile else self.model
        # A sharded model exchanges gradients itself.
        return model if is_sharded(self.model) else self.accelerator.prepare(model)

    def _after_step(self, bar: Progress, stop: StopRequest) -> str | None:
        """What falls due after a step; returns what stops the run, if anything does."""
        training, step = self.recipe.training, self.state.step
        is_last = step == training.num_steps
        logs = step % training.log_every == 0 or is_last or step == 1
        evaluates = (step % training.evaluate_every == 0 or is_last) and self.data.validation.num_tokens > 0
        samples = training.sample_every is not None and step % training.sample_every == 0
        stopped_by = None if evaluates or samples else self._stopped_by(stop)
        pushes = self.recipe.hub is not None and self.recipe.hub.is_due(step)
        may_save = step % training.save_every == 0 or is_last or pushes or stopped_by is not None
        # On a CPU reading costs nothing, so a step that goes wrong is noticed at once.
        on_cpu = self.accelerator.device.type == "cpu"
        if on_cpu or logs or evaluates or samples or may_save or len(self.pending) >= _MAX_PENDING:
            reading = self._read(bar)
            if logs and reading.is_finite:
                self._log(reading, bar)
        bar.advance()
        is_best = evaluates and self._evaluate(bar)
        if samples:
            self._show_samples(bar)
        if evaluates or samples:  # which take long
            stopped_by = self._stopped_by(stop)
        if may_save or stopped_by is not None or (is_best and training.keep_best):
            self._save(is_final=is_last or stopped_by is not None)
        if evaluates or samples or may_save:
            self.peak.measure_again()
            self._clock = time.perf_counter()
        if self.publisher is not None:
            self.publisher.poll()
        self.deadline.step_done()
        return stopped_by

    def _micro_batches(self) -> Iterator[list[dict[str, Any]]]:
        try:
            yield from self.batches.steps(self.state.step, self.recipe.training.num_steps)
        except DataError as error:
            goes_on = f"from {self.saver.newest}" if self.saver.newest else "from the start"
            raise DataError(f"{error} The same command goes on {goes_on}.") from error

    def _gather_positions(self) -> list[dict[str, Any]] | None:
        position = self.batches.state_dict()
        return None if position is None else gather_object([position])

    def _save(self, *, is_final: bool) -> None:
        self.positions = self._gather_positions()
        measure = None
        if self.measure is not None:
            # An average was evaluated, and a checkpoint's model is not the average.
            is_of_these = self.evaluated_at == self.state.step and self.average is None
            measure = partial(self.measure, self._outcome(None), self.evaluation if is_of_these else None)
        self.saver.save(self.state, self.positions, is_final=is_final, measure=measure)

    def _read(self, bar: Progress) -> StepReading:
        """Take in all steps since the last reading; returns the last."""
        readings = self.pending.read()
        now = time.perf_counter()
        state = replace(self.state, duration_s=self.state.duration_s + now - self._clock)
        self._clock = now
        for reading in readings:
            if reading.is_finite:
                self.state = state = replace(
                    state,
                    tokens_seen=state.tokens_seen + reading.num_tokens,
                    loss_nats=reading.loss_nats,
                    num_bad_in_row=0,
                )
                continue
            self.state = state = replace(
                state, num_bad_steps=state.num_bad_steps + 1, num_bad_in_row=state.num_bad_in_row + 1
            )
            self._report_bad_step(reading, bar)
        return readings[-1]

    def _report_bad_step(self, reading: StepReading, bar: Progress) -> None:
        """Say which step was left out; too many in a row end the run."""
        what = f"loss {reading.loss_nats:.4g}, gradient norm {reading.grad_norm:.4g}"
        self._record({"step": reading.step, "left_out": True, "num_bad_steps": self.state.num_bad_steps})
        allowed = self.recipe.training.max_bad_steps
        if self.state.num_bad_in_row <= allowed:
            bar.say(f"step {reading.step:>6}   left out: not finite ({what}); {self.state.num_bad_in_row} in a row")
            return
        # Worked out only now: it reads the rows again.
        documents = describe_bad_step(self.model, self.batches, reading.step - 1, self.accelerator, self.tokenizer)
        raise UserError(
            f"training diverged in step {reading.step}: {what} ({counted(self.state.num_bad_in_row, 'such step')} in a "
            f"row, training.max_bad_steps is {allowed}); {documents}. Lower optimizer.learning_rate or "
            f"optimizer.matrix_learning_rate, or leave the documents out; last checkpoint: {self.saver.newest}"
        )

    def _evaluate(self, bar: Progress) -> bool:
        """Evaluate and record; returns whether no evaluation before was better."""
        with self.average.in_place() if self.average is not None else nullcontext():
            try:
                evaluation = evaluate(
                    self.model,
                    self.data.validation,
                    sequence_length=self.recipe.training.sequence_length,
                    accelerator=self.accelerator,
                    eos_token_id=self.special["eos_token_id"],
                    pad_token_id=self.special["pad_token_id"],
                    special_ids=special_ids(self.tokenizer),
                )
            except NotFiniteError as error:  # as a step whose loss is not finite, it ends no run
                self._record({"step": self.state.step, "validation_not_finite": True})
                bar.say(f"step {self.state.step:>6}   validation: {error}")
                return False
        state = self.state
        is_best = state.best_bits_per_byte is None or evaluation.bits_per_byte < state.best_bits_per_byte
        if is_best:
            self.state = replace(state, best_bits_per_byte=evaluation.bits_per_byte, best_step=state.step)
        self.evaluation, self.evaluated_at = evaluation, state.step
        self._record(evaluation_record(state, evaluation))
        bar.say(
            f"step {state.step:>6}   validation loss {evaluation.loss_nats:.4f} nats per token, "
            f"{evaluation.bits_per_byte:.4f} bits per byte{' (averaged weights)' if self.average is not None else ''}"
        )
        return is_best

    def _show_samples(self, bar: Progress) -> None:
        wanted = self.recipe.samples
        with self.average.in_place() if self.average is not None else nullcontext():
            # A sharded model would need as many forwards in every process, whatever text each of them draws.
            model = whole_model(self.model, here=self.accelerator.is_main_process)
            if model is None:
                return
            samples = make_samples(
                model, self.tokenizer, wanted.prompts, max_new_tokens=wanted.max_new_tokens,
                temperature=wanted.temperature, top_p=wanted.top_p, seed=self.recipe.seed,
                begin=message_start if is_chat(self.recipe) else document_start,
            )  # fmt: skip
        record_samples(self.output_dir / SAMPLES_NAME, self.state.step, samples)
        for sample in samples:
            bar.say(f"step {self.state.step:>6}   {(sample.prompt + sample.text)!r}")

    def _set_learning_rate(self) -> None:
        optimizer = self.recipe.optimizer
        factor = learning_rate_factor(
            self.state.step,
            self.recipe.training.num_steps,
            schedule=optimizer.schedule,
            warmup=optimizer.warmup_steps,
            decay_fraction=optimizer.decay_fraction,
            decay=optimizer.decay_steps,
            final_fraction=optimizer.final_fraction,
        )
        set_learning_rates(self.optimizers, factor)

    def _log(self, reading: StepReading, bar: Progress) -> None:
        state, since, self.logged = self.state, self.logged, self.state
        seconds = max(state.duration_s - since.duration_s, 1e-9)
        speed = (state.tokens_seen - since.tokens_seen) / seconds
        mfu = self.peak.share(speed * self.flops_per_token)
        learning_rate = self.optimizers[-1].param_groups[0]["lr"]
        shown = shown_values(reading.loss_nats, speed, mfu, reading.grad_norm, learning_rate)
        steps_left = self.recipe.training.num_steps - state.step
        bar.show(state.step, shown, steps_left * seconds / max(state.step - since.step, 1))
        record = {
            "step": state.step,
            "tokens": state.tokens_seen,
            "loss_nats": reading.loss_nats,
            "learning_rate": learning_rate,
            "grad_norm": reading.grad_norm,
            "tokens_per_second": round(speed, 1),
            "mfu": round(mfu, 4),
            "duration_s": round(state.duration_s, 3),
        }
        self._record(record)
        median = self.spikes.median_below(reading.loss_nats)
        if median is not None:
            self._record({"step": state.step, "loss_spike_nats": reading.loss_nats, "recent_median_nats": median})
            bar.say(f"step {state.step:>6}   loss spike: {reading.loss_nats:.3f}, recently {median:.3f}")

    def _record(self, record: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.metrics.append(record)
        self.accelerator.log({key: value for key, value in record.items() if key != "step"}, step=record["step"])

    def _stopped_by(self, stop: StopRequest) -> str | None:
        """What ends the run after this step, the same in every process."""
        self.deadline.save_done(self.saver.longest_s)
        is_late = self.deadline.is_near(saves=2 if self.saver.is_busy else 1)
        number, late, failed = self.agreement.largest([stop.received, is_late, self.saver.has_failed])
        if failed:
            self.saver.check()
        if number:
            return signal.Signals(number).name
        return f"its deadline (training.max_hours: {self.recipe.training.max_hours:g})" if late else None

    def _bar(self) -> Progress:
        return Progress(self.recipe.training.num_steps, is_main=self.accelerator.is_main_process)
