"""Puts together what a finished run measured: `results.json`."""

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
) -> results.RunResults:
    """The record of a run that reached its end.

    Args:
        model: Unwrapped.
        outcome: What the loop measured.
        evaluation: Of the finished model on the validation split.
        samples: Text that the finished model wrote.
    """
    card, optimizer, state = recipe.card, recipe.optimizer, outcome.state
    sources = {source.label: source for source in recipe.data.all_sources()}
    rates = f"AdamW {optimizer.learning_rate:g}"
    if optimizer.name == "muon":
        rates = f"Muon {optimizer.matrix_learning_rate:g} (matrices), {rates} (embeddings, norms)"
    return results.RunResults(
        tercet_version=tercet.__version__,
        date=datetime.now(UTC).replace(microsecond=0),
        versions=versions(),
        hardware=describe_hardware(accelerator.device, accelerator.num_processes),
        data=results.Data(
            sources=[_source(sources[name], report) for name, report in data.report.by_source.items()],
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
            epochs=_epochs(recipe, data.train, state),
            duration_s=state.duration_s,
            tokens_per_second=outcome.tokens_per_second,
            mfu=outcome.mfu,
            optimizer=f"{rates}, weight decay {optimizer.weight_decay:g}, gradients clipped at {optimizer.clip_norm:g}"
            + (f"; these are weights averaged with decay {optimizer.ema_decay:g}" if optimizer.ema_decay else ""),
            schedule=f"{optimizer.schedule}, {optimizer.warmup_steps} warm-up steps",
            precision="bfloat16" if accelerator.mixed_precision == "bf16" else "float32",
            final_loss_nats=outcome.loss_nats,
        ),
        evaluation=evaluation,
        samples=list(samples),
    )  # fmt: skip


def _epochs(recipe: Recipe, train: TokenSet, state: RunState) -> float:
    """How often the text was read; where sources have weights, the one that was read most often."""
    weights, training = recipe.data.weights(), recipe.training
    if weights is None and not train.has_label_masks:
        return state.tokens_seen / train.num_tokens
    # Tokens that are no labels were read, too; padding, under a hundredth, is counted with them.
    tokens_read = training.batch_sizes().before(state.step) * training.sequence_length
    return max(epochs_by_source(tokens_by_source(train), weights, tokens_read).values())


def _source(source: Source, report: SourceReport) -> results.Source:
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
