"""From a recipe to a finished folder: tokenizer, data, model, training, evaluation, samples, curve, card."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tercet
from tercet.modeling import TercetForCausalLM
from tercet.tokenizer import train_tokenizer
from tercet.training import results
from tercet.training.accounting import num_non_embedding_parameters, num_parameters
from tercet.training.checkpoints import list_checkpoints
from tercet.training.curve import METRICS_NAME, plot_losses
from tercet.training.documents import Document
from tercet.training.errors import UserError, as_user_error
from tercet.training.evaluation import evaluate
from tercet.training.export import replace_model_folder, write_model_folder
from tercet.training.hardware import describe_hardware, measure_matmul_flops, supports_bfloat16, versions
from tercet.training.loop import LoopOutcome, run_loop
from tercet.training.recipe import Recipe
from tercet.training.run_folder import DATA_NAME, is_finished, open_run_folder
from tercet.training.samples import make_samples
from tercet.training.shards import prepare
from tercet.training.sources import read_documents
from tercet.training.split import DuplicateFilter, document_digest, is_validation, split_tail
from tercet.training.token_set import PreparedData

CURVE_NAME = "loss.png"
Say = Callable[[str], None]


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
    folder = Path(output_dir if output_dir is not None else recipe.output_dir)
    accelerator = make_accelerator(recipe, folder)
    tell: Say = say if accelerator.is_main_process else _silent
    is_new = not folder.exists()
    if accelerator.is_main_process:
        open_run_folder(recipe, folder, restart=restart)
    accelerator.wait_for_everyone()
    if is_finished(folder):
        tell(f"{folder} holds a finished run of this recipe; --restart trains it anew.")
        return RunOutcome(folder, results.RunResults.load(folder / results.RESULTS_NAME), None)
    try:
        return _run(recipe, folder, accelerator, tell)
    except UserError:
        # A run that could not begin leaves nothing; one that has trained keeps what it has.
        if is_new and accelerator.is_main_process and not list_checkpoints(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(recipe: Recipe, folder: Path, accelerator: Accelerator, say: Say) -> RunOutcome:
    set_seed(recipe.seed)
    with accelerator.main_process_first():
        tokenizer = make_tokenizer(recipe, folder, say)
        data = make_data(recipe, tokenizer, folder, say, progress=accelerator.is_main_process)
    model = make_model(recipe, tokenizer)
    say(f"Model      {num_parameters(model):,} parameters, {model.config.num_hidden_layers} layers")
    outcome = run_loop(
        recipe,
        output_dir=folder,
        model=model,
        tokenizer=tokenizer,
        data=data,
        accelerator=accelerator,
        write_model=lambda path: write_model_folder(model, tokenizer, path),
        peak_flops=measure_matmul_flops(accelerator.device) * accelerator.num_processes,
    )
    measured = None
    if outcome.interrupted_by is None:
        measured = finish(recipe, folder, model, tokenizer, data, accelerator, outcome, say)
    accelerator.end_training()
    return RunOutcome(folder, measured, outcome)


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Device, precision, processes and trackers of a run.

    Raises:
        UserError: A device that is not there, or a precision that it does not compute in.
    """
    training = recipe.training
    if training.num_threads is not None:
        torch.set_num_threads(training.num_threads)
    has_cuda = torch.cuda.is_available()
    if training.device == "cuda" and not has_cuda:
        raise UserError("training.device is cuda and no CUDA device is there: use --set training.device=cpu")
    use_cpu = training.device == "cpu" or not has_cuda
    bfloat16 = training.precision == "bfloat16" or (
        training.precision == "auto" and not use_cpu and supports_bfloat16()
    )
    if bfloat16 and use_cpu and not supports_bfloat16():
        raise UserError(
            "training.precision is bfloat16, which this CPU only emulates, some 50 times slower than float32: "
            "use --set training.precision=float32"
        )
    accelerator = Accelerator(
        cpu=use_cpu,
        mixed_precision="bf16" if bfloat16 else "no",
        log_with=list(training.trackers) or None,
        project_dir=str(folder),
    )
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected:
        raise UserError(
            f"{expected} processes were started and accelerate sees {accelerator.num_processes}: "
            "on CPUs start them with torchrun --nproc_per_node"
        )
    if training.trackers:
        accelerator.init_trackers("tercet", config=_flatten(recipe.model_dump(mode="json")))
    return accelerator


def make_tokenizer(recipe: Recipe, folder: Path, say: Say) -> PreTrainedTokenizerFast:
    """The run's tokenizer: the one that an earlier call left, the recipe's folder, or a new one from the text."""
    settings = recipe.tokenizer
    saved = folder / "tokenizer.json"
    given = settings.path or (str(folder) if saved.is_file() else None)
    if given is not None:
        tokenizer = load_tokenizer(given)
    else:
        started = time.perf_counter()
        with as_user_error("tokenizer.vocab_size"):
            tokenizer = train_tokenizer(training_texts(recipe), settings.vocab_size, model_max_length=_longest(recipe))
        say(f"Tokenizer  {len(tokenizer):,} tokens, byte-level BPE, in {time.perf_counter() - started:.1f} s")
    if not saved.is_file():
        tokenizer.save_pretrained(folder)
    return tokenizer


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """A tokenizer folder, with the special tokens that training needs.

    Raises:
        UserError: No tokenizer there, or one without end-of-text or padding token.
    """
    if not Path(path).is_dir() and Path(path).is_absolute():
        raise UserError(f"tokenizer.path {path} is no folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no tokenizer that AutoTokenizer loads ({str(error).splitlines()[0]})") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in {path} has no end-of-text token (eos_token): set one and save it again")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UserError(f"the tokenizer in {path} needs a pad_token of its own, other than its eos_token")
    return tokenizer


def all_documents(recipe: Recipe) -> Iterator[Document]:
    """Every document of every source, in the recipe's order."""
    for source in recipe.data.all_sources():
        yield from read_documents(source)


def training_texts(recipe: Recipe) -> Iterator[str]:
    """Texts of the training split only: a tokenizer that has seen the validation text flatters its bits per byte."""
    settings = recipe.data
    seen = DuplicateFilter()
    for document in all_documents(recipe):
        if settings.drop_duplicates and seen.is_duplicate(document_digest(document.text)):
            continue
        if settings.split_by == "tail":
            yield split_tail(document.text, settings.validation_fraction)[0]
        elif not is_validation(document.text, settings.validation_fraction):
            yield document.text


def make_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, folder: Path, say: Say, *, progress: bool
) -> PreparedData:
    """Tokenize into `folder/data`, or take up what is there."""
    data = prepare(
        all_documents(recipe),
        tokenizer,
        folder / DATA_NAME,
        validation_fraction=recipe.data.validation_fraction,
        split_by=recipe.data.split_by,
        drop_duplicates=recipe.data.drop_duplicates,
        progress=progress,
    )
    train, validation = data.train, data.validation
    say(
        f"Data       {train.num_documents:,} documents, {train.num_bytes / 1e6:.2f} MB, {train.num_tokens:,} tokens "
        f"to train on; {validation.num_documents:,} documents, {validation.num_tokens:,} tokens held out"
    )
    return data


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> TercetForCausalLM:
    """A new model for the recipe and the tokenizer, its weights drawn from the recipe's seed."""
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = recipe.model_config_for(len(tokenizer), ids)
    torch.manual_seed(recipe.seed)
    model = TercetForCausalLM(config)
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
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
    evaluation = None
    if data.validation.num_tokens:
        evaluation = evaluate(
            model,
            data.validation,
            sequence_length=recipe.training.sequence_length,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            accelerator=accelerator,
            progress=accelerator.is_main_process,
        )
        say(
            f"Evaluation {evaluation.loss_nats:.4f} nats a token, perplexity {evaluation.perplexity:.2f}, "
            f"{evaluation.bits_per_byte:.4f} bits a byte on {evaluation.num_bytes:,} bytes held out"
        )
    wanted = recipe.samples
    samples = make_samples(
        model, tokenizer, wanted.prompts,
        max_new_tokens=wanted.max_new_tokens, temperature=wanted.temperature, top_p=wanted.top_p, seed=recipe.seed,
    )  # fmt: skip
    measured = _results(recipe, model, tokenizer, data, accelerator, outcome, evaluation, samples)
    if accelerator.is_main_process:
        # The card is the hub's business, which stands on a finished folder; imported here, where there is one.
        from tercet.hub import write_card

        replace_model_folder(model, tokenizer, folder)
        plot_losses(folder / METRICS_NAME, folder / CURVE_NAME)
        measured.save(folder / results.RESULTS_NAME)
        write_card(folder)
    accelerator.wait_for_everyone()
    return measured


def _results(
    recipe: Recipe,
    model: TercetForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    data: PreparedData,
    accelerator: Accelerator,
    outcome: LoopOutcome,
    evaluation: results.Evaluation | None,
    samples: Iterable[results.Sample],
) -> results.RunResults:
    card, optimizer, state = recipe.card, recipe.optimizer, outcome.state
    rates = f"AdamW {optimizer.learning_rate:g}"
    if optimizer.name == "muon":
        rates = f"Muon {optimizer.matrix_learning_rate:g} (matrices), {rates} (embeddings, norms)"
    return results.RunResults(
        tercet_version=tercet.__version__,
        date=datetime.now(UTC).replace(microsecond=0),
        versions=versions(),
        hardware=describe_hardware(accelerator.device, accelerator.num_processes),
        data=results.Data(
            sources=[
                results.Source(
                    name=name, documents=report.documents, bytes=report.bytes,
                    license=card.data_license, description=card.data_description,
                )
                for name, report in data.report.by_source.items()
            ],
            language=list(card.language),
            train=_split(data.train),
            validation=_split(data.validation),
        ),
        tokenizer=results.TokenizerFacts(
            vocab_size=len(tokenizer),
            # Ends of documents are tokens, too, but stand for no byte.
            bytes_per_token=data.train.num_bytes / max(data.train.num_tokens - data.train.num_documents, 1),
        ),
        model=results.ModelFacts(
            num_parameters=num_parameters(model), num_non_embedding_parameters=num_non_embedding_parameters(model)
        ),
        training=results.Training(
            num_steps=state.step,
            tokens_seen=state.tokens_seen,
            epochs=state.tokens_seen / data.train.num_tokens,
            duration_s=state.duration_s,
            tokens_per_second=outcome.tokens_per_second,
            mfu=outcome.mfu,
            optimizer=f"{rates}, weight decay {optimizer.weight_decay:g}, gradients clipped at {optimizer.clip_norm:g}",
            schedule=f"{optimizer.schedule}, {optimizer.warmup_steps} warm-up steps",
            precision="bfloat16" if accelerator.mixed_precision == "bf16" else "float32",
            final_loss_nats=outcome.loss_nats,
        ),
        evaluation=evaluation,
        samples=list(samples),
    )  # fmt: skip


def _split(token_set: Any) -> results.Split:
    return results.Split(documents=token_set.num_documents, tokens=token_set.num_tokens, bytes=token_set.num_bytes)


def _longest(recipe: Recipe) -> int:
    return recipe.model.get("max_position_embeddings", recipe.training.sequence_length)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of plain values, which is all that trackers take."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat


def _silent(line: str) -> None:
    """What processes other than the main one say."""


__all__ = ["RunOutcome", "train"]
