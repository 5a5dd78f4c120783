"""The batches that a recipe trains on: of prepared data, or of a stream."""

from functools import partial

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tercet.tokenizer import token_ids
from tercet.training.arrangement import arrange
from tercet.training.batches import PackedBatches
from tercet.training.errors import as_user_error
from tercet.training.packing import PackedDataset
from tercet.training.recipe import Recipe
from tercet.training.stream_batches import StreamBatches
from tercet.training.stream_documents import StreamDocuments
from tercet.training.stream_order import StreamOrder
from tercet.training.stream_preparation import Stream
from tercet.training.stream_steps import Reading, StreamSteps
from tercet.training.token_set import PreparedData


def packed_batches(
    recipe: Recipe,
    data: PreparedData,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    accelerator: Accelerator,
) -> PackedBatches:
    """This process's batches of prepared data.

    Raises:
        UserError: Less text than one row, or a global batch that does not divide among the processes.
    """
    training = recipe.training
    arrangement = arrange(
        data.train,
        training.sequence_length,
        packing=training.packing,
        seed=recipe.seed,
        weights=recipe.data.weights(),
    )
    with as_user_error("training"):
        return PackedBatches(
            PackedDataset(data.train, arrangement.packing, **token_ids(tokenizer).for_rows()),
            seed=recipe.seed,
            global_batch_size=training.global_batch_size,
            per_device_batch_size=training.per_device_batch_size,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            order=arrangement.order,
            with_document_bounds=_wants_bounds(model),
            warmup=training.batch_sizes().stages,
        )


def streamed_batches(
    recipe: Recipe,
    stream: Stream,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    accelerator: Accelerator,
) -> StreamSteps:
    """This process's batches of a stream."""
    training = recipe.training
    return StreamSteps(
        partial(_open_reading, recipe, stream, tokenizer, accelerator),
        sizes=training.batch_sizes(),
        rows_at_once=training.per_device_batch_size * accelerator.num_processes,
        with_document_bounds=_wants_bounds(model),
    )


def _open_reading(
    recipe: Recipe, stream: Stream, tokenizer: PreTrainedTokenizerFast, accelerator: Accelerator
) -> Reading:
    documents = StreamDocuments(recipe.data.all_sources(), tokenizer, recipe.data.validation_fraction)
    order = StreamOrder(
        stream.sources,
        seed=recipe.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        weights=recipe.data.weights(),
        size=documents.size,
    )
    batches = StreamBatches(
        order,
        documents.encode,
        sequence_length=recipe.training.sequence_length,
        per_device_batch_size=recipe.training.per_device_batch_size,
        eos_token_id=token_ids(tokenizer).for_rows()["eos_token_id"],
        on_end=documents.ended,
    )
    return Reading(batches, documents)


def _wants_bounds(model: PreTrainedModel) -> bool:
    return "flash" in (model.config._attn_implementation or "")
