"""From a recipe to a finished folder: tokenizer, data, model, training, evaluation, samples, curve, card."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from transformers import PreTrainedTokenizerFast

from tercet.modeling import TercetForCausalLM
from tercet.tokenizer import special_ids, token_ids
from tercet.training import results
from tercet.training.acceleration import checkpoint_blocks
from tercet.training.accounting import num_parameters
from tercet.training.chat_turns import end_where_turns_end
from tercet.training.checkpoints import check_is_checkpoint, list_checkpoints
from tercet.training.curve import METRICS_NAME, plot_losses
from tercet.training.evaluation import evaluate
from tercet.training.export import replace_model_folder, write_model_folder
from tercet.training.from_checkpoint import FROM_CHECKPOINT, WEIGHTS_HASH
from tercet.training.hardware import PeakRate
from tercet.training.launch import follow_launcher, make_accelerator, start_trackers
from tercet.training.lifeline import Lifeline, lifeline
from tercet.training.loop import LoopOutcome, TrainingLoop
from tercet.training.mixture import mixture_lines, tokens_by_source
from tercet.training.out_of_memory import OutOfMemoryError, explain_out_of_memory
from tercet.training.preparation import Say, load_tokenizer, make_data, make_tokenizer
from tercet.training.publishing import Publisher, publishing
from tercet.training.recipe import Recipe, recipe_to_yaml
from tercet.training.recipe_batches import packed_batches, streamed_batches
from tercet.training.record import make_results
from tercet.training.run_folder import (
    CURVE_NAME,
    DATA_NAME,
    RECIPE_NAME,
    is_finished,
    locked_run_folder,
    open_run_folder,
    remove_run,
)
from tercet.training.samples import document_start, make_samples, message_start
from tercet.training.sharding import whole_model
from tercet.training.starting_weights import is_chat, starting_model, with_weights_hash
from tercet.training.stream_documents import read_by_all
from tercet.training.stream_preparation import Stream, begin_stream, open_stream
from tercet.training.token_set import PreparedData


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        output_dir: The folder; loads with `AutoModelForCausalLM` if the run is finished.
        results: What was measured; None if the run was stopped before its end.
        loop: The training loop's own account; None if there was nothing left to train.
    """

    output_dir: Path
    results: results.RunResults | None
    loop: LoopOutcome | None


def train(recipe: Recipe, *, output_dir: Path | None = None, restart: bool = False, say: Say = print) -> RunOutcome:
    """Run a recipe, or go on with it where an earlier call was stopped.

    Args:
        recipe: What to do.
        output_dir: Instead of the recipe's own.
        restart: Remove an earlier run from the folder first.
        say: Gets a line at each stage, in the main process only.

    Returns:
        The outcome. Under several processes (accelerate, torchrun) every one of them returns it.

    Raises:
        UserError: Something that the user gave cannot be used; nothing half-written is left.
    """
    started = time.monotonic()
    recipe, notes = follow_launcher(recipe)
    folder = Path(output_dir if output_dir is not None else recipe.output_dir).expanduser()
    accelerator = make_accelerator(recipe, folder)
    tell: Say = say if accelerator.is_main_process else _silent
    recipe = with_weights_hash(recipe, accelerator)
    with lifeline(accelerator) as line, claimed_folder(recipe, folder, accelerator, restart=restart):
        if recipe.training.branch_from is not None and not list_checkpoints(folder):
            # Known before the text is prepared, which may take hours.
            check_is_checkpoint(Path(recipe.training.branch_from).expanduser(), "training.branch_from")
        for note in notes:
            tell(note)
        if is_finished(folder):
            tell(f"{folder} holds a finished run of this recipe; --restart trains it anew.")
            return RunOutcome(folder, results.RunResults.load(folder / results.RESULTS_NAME), None)
        return _run(recipe, folder, accelerator, line, tell, started)


def _run(
    recipe: Recipe, folder: Path, accelerator: Accelerator, line: Lifeline, say: Say, started: float
) -> RunOutcome:
    start_trackers(recipe, accelerator)
    set_seed(recipe.seed)
    with publishing(recipe, folder, say, is_main=accelerator.is_main_process) as publisher:
        return _run_published(recipe, folder, accelerator, line, say, started, publisher)


def _run_published(
    recipe: Recipe,
    folder: Path,
    accelerator: Accelerator,
    line: Lifeline,
    say: Say,
    started: float,
    publisher: Publisher | None,
) -> RunOutcome:
    tokenizer, data, stream = _text(recipe, folder, accelerator, line, say)
    model = make_model(recipe, tokenizer)
    # The same weights in every process, but other dropout; process 0 draws as a run of one process does.
    set_seed(recipe.seed, device_specific=True)
    if stream is None:
        _tell_mixture(recipe, data, say)
    origin = recipe.model.get(FROM_CHECKPOINT)
    begins = f", beginning as {origin} (SHA-256 {recipe.model[WEIGHTS_HASH][:12]})" if origin else ""
    say(f"Model      {num_parameters(model):,} parameters, {model.config.num_hidden_layers} layers{begins}")

    def write_model(path: Path, weights: dict[str, torch.Tensor]) -> None:
        write_model_folder(model, tokenizer, path, weights)
        (path / RECIPE_NAME).write_text(recipe_to_yaml(recipe), encoding="utf-8")

    def measure(outcome: LoopOutcome, evaluation: results.Evaluation | None) -> results.RunResults:
        return make_results(
            recipe, model, tokenizer, data, accelerator, outcome, evaluation, samples=[], averages=False
        )

    if stream is None:
        batches = packed_batches(recipe, data, model, tokenizer, accelerator)
    else:
        batches = streamed_batches(recipe, stream, model, tokenizer, accelerator)
    with explain_out_of_memory(recipe, accelerator.num_processes):
        outcome = TrainingLoop(
            recipe,
            output_dir=folder,
            model=model,
            tokenizer=tokenizer,
            data=data,
            batches=batches,
            accelerator=accelerator,
            write_model=write_model,
            peak=PeakRate(accelerator.device, accelerator.num_processes),
            started=started,
            measure=measure,
            publisher=publisher,
        ).run()
    if outcome.positions is not None:
        for read in read_by_all(outcome.positions).lines():
            say(f"Read       {read}")
    measured = None
    if outcome.interrupted_by is None:
        measured = finish(recipe, folder, model, tokenizer, data, accelerator, outcome, say)
    if publisher is not None:
        if measured is None:
            publisher.interrupt()
        else:
            limit = recipe.training.max_hours
            publisher.finish(outcome.state.step, None if limit is None else started + limit * 3600)
    accelerator.end_training()
    return RunOutcome(folder, measured, outcome)


def _text(
    recipe: Recipe, folder: Path, accelerator: Accelerator, line: Lifeline, say: Say
) -> tuple[PreTrainedTokenizerFast, PreparedData, Stream | None]:
    """Tokenizer, prepared text and, where the recipe trains on a stream, that; the prepared text then is its sample."""
    stream = None
    if not accelerator.is_main_process:
        line.wait_for_main()  # which may tokenize for hours
        tokenizer = load_tokenizer(str(folder))
        if not recipe.data.stream:
            return tokenizer, PreparedData.open(folder / DATA_NAME), None
        stream = open_stream(recipe, folder, tokenizer)
        return tokenizer, stream.sample, stream
    if recipe.data.stream:
        tokenizer, stream = begin_stream(recipe, folder, say)
        data = stream.sample
    else:
        tokenizer = make_tokenizer(recipe, folder, say)
        data = make_data(recipe, tokenizer, folder, say, progress=True)
    line.main_is_ready()
    return tokenizer, data, stream


def _tell_mixture(recipe: Recipe, data: PreparedData, say: Say) -> None:
    """How often each source will be read, where there are several."""
    tokens, training = tokens_by_source(data.train), recipe.training
    if len(tokens) > 1:
        total = training.batch_sizes().before(training.num_steps) * training.sequence_length
        for line in mixture_lines(tokens, recipe.data.weights(), total):
            say(f"           {line}")


@contextmanager
def claimed_folder(recipe: Recipe, folder: Path, accelerator: Accelerator, *, restart: bool) -> Iterator[None]:
    """The folder is this run's inside; a run that fails before it has trained leaves nothing in it.

    What Ctrl-C stops is kept: the same command goes on with it. So is what runs out of memory or loses a process: the
    text was prepared, which may have taken hours, and is not the reason.
    """
    is_main = accelerator.is_main_process
    with locked_run_folder(folder) if is_main else nullcontext():
        if is_main:
            open_run_folder(recipe, folder, restart=restart)
            was_prepared = (folder / DATA_NAME).exists()
        accelerator.wait_for_everyone()
        try:
            yield
        except Exception as error:
            has_trained = list_checkpoints(folder) or (folder / METRICS_NAME).exists()
            is_kept = isinstance(error, OutOfMemoryError | RuntimeError) or has_trained
            if is_main and not (was_prepared or is_kept):
                remove_run(folder)
            raise


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> TercetForCausalLM:
    """A model for the recipe and the tokenizer: of its checkpoint, or new, its weights drawn from the recipe's seed."""
    config = recipe.model_config_for(len(tokenizer), token_ids(tokenizer)._asdict())
    torch.manual_seed(recipe.seed)
    model = starting_model(recipe, config) if recipe.model.get(FROM_CHECKPOINT) else TercetForCausalLM(config)
    if is_chat(recipe):
        end_where_turns_end(model, tokenizer)
    checkpoint_blocks(model, recipe.training.gradient_checkpointing)
    return model


def finish(
    recipe: Recipe,
    folder: Path,
    model: TercetForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    data: PreparedData,
    accelerator: Accelerator,
    outcome: LoopOutcome,
    say: Say,
) -> results.RunResults:
    """Evaluate, sample, and write what a reader of the folder needs; the card, last, marks the run as finished."""
    evaluation = outcome.evaluation
    if evaluation is None and data.validation.num_tokens:
        evaluation = evaluate(
            model,
            data.validation,
            sequence_length=recipe.training.sequence_length,
            **token_ids(tokenizer).for_rows(),
            special_ids=special_ids(tokenizer),
            accelerator=accelerator,
            progress=accelerator.is_main_process,
        )
    if evaluation is not None:
        say(
            f"Evaluation {evaluation.loss_nats:.4f} nats per token, perplexity {evaluation.perplexity:.2f}, "
            f"{evaluation.bits_per_byte:.4f} bits per byte on {evaluation.num_bytes:,} bytes held out"
        )
    wanted = recipe.samples
    samples = []
    finished = whole_model(model, here=accelerator.is_main_process)
    if finished is not None:
        samples = make_samples(
            finished, tokenizer, wanted.prompts,
            max_new_tokens=wanted.max_new_tokens, temperature=wanted.temperature, top_p=wanted.top_p, seed=recipe.seed,
            begin=message_start if is_chat(recipe) else document_start,
        )  # fmt: skip
    samples = broadcast_object_list([samples])[0]
    measured = make_results(recipe, model, tokenizer, data, accelerator, outcome, evaluation, samples)
    if finished is not None:
        # The card is the hub's business, which stands on a finished folder; imported here, where there is one.
        from tercet.hub import write_card

        replace_model_folder(finished, tokenizer, folder)
        plot_losses(folder / METRICS_NAME, folder / CURVE_NAME)
        measured.save(folder / results.RESULTS_NAME)
        write_card(folder)
    accelerator.wait_for_everyone()
    return measured


def _silent(line: str) -> None:
    """What processes other than the main one say."""


__all__ = ["RunOutcome", "train"]
