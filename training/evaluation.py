"""Loss, perplexity and bits per byte on a whole token set, every stored token scored once."""

import math
from collections.abc import Iterable
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedModel

from tercet.training.batches import Batch, EvaluationWindows, evaluation_windows
from tercet.training.errors import UserError
from tercet.training.packing import IGNORE_INDEX
from tercet.training.results import Evaluation, SourceEvaluation
from tercet.training.token_set import TokenSet

# Logits of one batch are held whole here, as any model on the Hub returns them; this bounds them.
_MAX_LOGITS_BYTES = 256 << 20
_MAX_BATCH_SIZE = 32


class NotFiniteError(UserError):
    """The loss of some text is infinite, or no number."""


def evaluate(
    model: PreTrainedModel,
    token_set: TokenSet,
    *,
    sequence_length: int,
    eos_token_id: int,
    pad_token_id: int,
    special_ids: Iterable[int] = (),
    stride: int | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = False,
) -> Evaluation:
    """Score a token set.

    A document longer than a row is read in windows that overlap, so that but for its first row every token sees at
    least sequence_length - stride tokens before it.

    Args:
        model: Any causal language model of transformers; left in the mode it was in.
        token_set: What to score.
        sequence_length: Longest context T.
        eos_token_id: Starts every document as input and ends it as label.
        pad_token_id: Fills rows.
        special_ids: Ids that stand for no text, such as the end of a turn, besides the end of text.
        stride: How far windows advance; default T / 2.
        accelerator: Divides the windows among its processes; None scores them all here.
        progress: Show a progress bar.

    Returns:
        Mean loss over all labels, ends of documents and turns included (nats), its exponential, and bits per UTF-8 byte
        of text, for which these ends, which are no text, are left out. Of a conversation only what the assistant says
        is scored, and only its bytes count. The same of each source, where the set has documents of several.

    Raises:
        NotFiniteError: The model gives no finite loss; in every process alike.
    """
    windows = evaluation_windows(
        token_set,
        sequence_length,
        stride or max(sequence_length // 2, 1),
        _batch_size(model, sequence_length),
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    rank, world_size = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    # As many in every process, so that a sharded model, whose weights all of them gather together, can be scored.
    num_each = -(-len(windows) // world_size)
    mine = (_window_or_nothing(windows, rank + index * world_size, token_set) for index in range(num_each))
    bar = tqdm(
        mine,
        total=num_each,
        desc="Evaluating",
        disable=None if progress else True,
        leave=False,
    )
    sums = sum_losses(model, bar, [eos_token_id, *special_ids], len(token_set.sources))
    if accelerator is not None:
        sums = cast(torch.Tensor, accelerator.reduce(sums, reduction="sum"))
    total_nats, text_nats, num_tokens = sums.sum(0).tolist()
    if not math.isfinite(total_nats):
        raise NotFiniteError(
            f"the loss of the text is {total_nats}: some weight is no number, or too large for what it is multiplied "
            "with; take an earlier checkpoint, or train with a lower learning rate"
        )
    loss_nats = total_nats / num_tokens
    return Evaluation(
        loss_nats=loss_nats,
        # Beyond exp(700) a float is infinite; such a model is noise, and the loss says so.
        perplexity=math.exp(min(loss_nats, 700.0)),
        bits_per_byte=text_nats / math.log(2) / token_set.num_label_bytes,
        num_tokens=int(num_tokens),
        num_bytes=token_set.num_label_bytes,
        by_source=_by_source(token_set, sums),
    )


def _by_source(token_set: TokenSet, sums: torch.Tensor) -> dict[str, SourceEvaluation]:
    """What sums (S, 3) say of each source that has documents here; nothing where only one has."""
    num_bytes = np.zeros(len(token_set.sources), dtype=np.int64)
    np.add.at(num_bytes, token_set.document_sources, token_set.document_label_bytes)
    measured = {
        label: SourceEvaluation(
            loss_nats=nats / num_tokens,
            bits_per_byte=text_nats / math.log(2) / size,
            num_tokens=int(num_tokens),
            num_bytes=size,
        )
        for label, size, (nats, text_nats, num_tokens) in zip(
            token_set.sources, num_bytes.tolist(), sums.tolist(), strict=True
        )
        if size
    }
    return measured if len(measured) > 1 else {}


def _window_or_nothing(windows: EvaluationWindows, index: int, token_set: TokenSet) -> Batch:
    """A window with the source of each of its positions, `sources` (b, T); behind the last one, it without labels."""
    at = min(index, len(windows) - 1)
    batch = windows[at]
    if index > at:
        batch["shift_labels"].fill_(IGNORE_INDEX)
    # Padding is given to some source; it has no label.
    return {**batch, "sources": torch.from_numpy(token_set.document_sources[windows.documents(at)]).long()}


@torch.no_grad()
def sum_losses(
    model: PreTrainedModel, batches: Iterable[Batch], special_ids: Iterable[int], num_sources: int
) -> torch.Tensor:
    """Sums over all labels of each source: nats, nats of labels that are text, number of labels; float64 (S, 3)."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    no_text = torch.tensor(sorted({*special_ids}), device=device)
    sums = torch.zeros(num_sources, 3, dtype=torch.float64, device=device)
    for batch in batches:
        input_ids, labels, position_ids, sources = (
            batch[name].to(device) for name in ("input_ids", "shift_labels", "position_ids", "sources")
        )
        logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits  # (b, T, V)
        nats = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)
        is_label = labels != IGNORE_INDEX
        is_text = is_label & ~torch.isin(labels, no_text)
        measured = torch.stack([nats.double(), nats * is_text, is_label], dim=-1)  # (b, T, 3)
        sums.index_add_(0, sources.flatten(), measured.flatten(0, 1))
    model.train(was_training)
    return sums


def _batch_size(model: PreTrainedModel, sequence_length: int) -> int:
    bytes_per_row = sequence_length * model.config.get_text_config().vocab_size * 4
    return max(1, min(_MAX_BATCH_SIZE, _MAX_LOGITS_BYTES // bytes_per_row))
