"""Puts together what a run measured, at its end and at every checkpoint: `results.json`."""

from collections.abc import Iterable
from datetime import UTC, datetime

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import tercet
from tercet.training import results
from tercet.training.accounting import num_non_embedding_parameters, num_parameters
from tercet.training.hardware import describe_hardware, versions
from tercet.training.loop import LoopOutcome
from tercet.training.mixture import epochs_by_source, tokens_by_source
from tercet.training.recipe import Recipe
from tercet.training.run_state import RunState
from tercet.training.sources import Source
from tercet.training.stream_documents import SourceCounts, read_by_all
from tercet.training.token_set import PreparedData, SourceReport, TokenSet


def make_results(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    data: PreparedData,
    accelerator: Accelerator,
    outcome: LoopOutcome,
    evaluation: results.Evaluation | None,
    samples: Iterable[results.Sample],
    *,
    averages: bool = True,
) -> results.RunResults:
    """The record of a run, at its end or at a checkpoint.

    Args:
        model: Unwrapped.
        outcome: What the loop measured.
        evaluation: Of the model on the validation split.
        samples: Text that the model wrote.
        averages: Whether the weights are the averaged ones, where the run keeps such.
    """
    return results.RunResults(
        tercet_version=tercet.__version__,
        date=datetime.now(UTC).replace(microsecond=0),
        versions=versions(),
        hardware=describe_hardware(accelerator.device, accelerator.num_processes),
        data=_data(recipe, data, outcome),
        tokenizer=results.TokenizerFacts(
            vocab_size=len(tokenizer),
            # Ends of documents are tokens, too, but stand for no byte.
            bytes_per_token=data.train.num_bytes / max(data.train.num_tokens - data.train.num_documents, 1),
        ),
        model=results.ModelFacts(
            num_parameters=num_parameters(model), num_non_embedding_parameters=num_non_embedding_parameters(model)
        ),
        training=_training(recipe, data, accelerator, outcome, averages),
        evaluation=evaluation,
        samples=list(samples),
    )  # fmt: skip


def _data(recipe: Recipe, data: PreparedData, outcome: LoopOutcome) -> results.Data:
    sources = {source.label: source for source in recipe.data.all_sources()}
    read = None if outcome.positions is None else read_by_all(outcome.positions)
    counts = data.report.by_source if read is None else read.counts
    train = _split(data.train)
    if read is not None:
        total = sum(read.counts.values(), SourceCounts())
        train = results.Split(documents=total.documents, tokens=total.tokens, bytes=total.bytes)
    return results.Data(
        sources=[_source(sources[name], of_source) for name, of_source in counts.items()],
        language=list(recipe.card.language),
        train=train,
        validation=_split(data.validation),
        stream=None
        if read is None
        else results.Stream(
            whole_epochs=read.whole_epochs,
            held_out=sum(of_source.held_out for of_source in read.counts.values()),
            left_out=read.skips.count(),
        ),
    )


def _training(
    recipe: Recipe, data: PreparedData, accelerator: Accelerator, outcome: LoopOutcome, averages: bool
) -> results.Training:
    optimizer, state = recipe.optimizer, outcome.state
    rates = f"AdamW {optimizer.learning_rate:g}"
    if optimizer.name == "muon":
        rates = f"Muon {optimizer.matrix_learning_rate:g} (matrices), {rates} (embeddings, norms)"
    averaged = "" if optimizer.ema_decay is None else f"; these are weights averaged with decay {optimizer.ema_decay:g}"
    return results.Training(
        num_steps=state.step,
        tokens_seen=state.tokens_seen,
        epochs=None if recipe.data.stream else _epochs(recipe, data.train, state),
        duration_s=state.duration_s,
        tokens_per_second=outcome.tokens_per_second,
        mfu=outcome.mfu,
        optimizer=f"{rates}, weight decay {optimizer.weight_decay:g}, gradients clipped at {optimizer.clip_norm:g}"
        + (averaged if averages else ""),
        schedule=f"{optimizer.schedule}, {optimizer.warmup_steps} warm-up steps",
        precision="bfloat16" if accelerator.mixed_precision == "bf16" else "float32",
        final_loss_nats=outcome.loss_nats,
    )


def _epochs(recipe: Recipe, train: TokenSet, state: RunState) -> float:
    """How often the text was read; where sources have weights, the one that was read most often."""
    weights, training = recipe.data.weights(), recipe.training
    if weights is None and not train.has_label_masks:
        return state.tokens_seen / train.num_tokens
    # Tokens that are no labels were read, too; padding, under a hundredth, is counted with them.
    tokens_read = training.batch_sizes().before(state.step) * training.sequence_length
    return max(epochs_by_source(tokens_by_source(train), weights, tokens_read).values())


def _source(source: Source, report: SourceReport | SourceCounts) -> results.Source:
    return results.Source(
        name=source.label,
        documents=report.documents,
        bytes=report.bytes,
        license=source.license_name(),
        description=source.description_text(),
        hub_id=source.path if source.is_on_hub() else None,
    )


def _split(token_set: TokenSet) -> results.Split:
    return results.Split(documents=token_set.num_documents, tokens=token_set.num_tokens, bytes=token_set.num_bytes)
