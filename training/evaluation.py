"""Loss, perplexity and bits per byte on a whole token set, every stored token scored once."""

import math
from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedModel

from tercet.training.batches import Batch, evaluation_windows
from tercet.training.results import Evaluation
from tercet.training.token_set import TokenSet

# Logits of one batch are held whole here, as any model on the Hub returns them; this bounds them.
_MAX_LOGITS_BYTES = 256 << 20
_MAX_BATCH_SIZE = 32


def evaluate(
    model: PreTrainedModel,
    token_set: TokenSet,
    *,
    sequence_length: int,
    eos_token_id: int,
    pad_token_id: int,
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
        stride: How far windows advance; default T / 2.
        accelerator: Divides the windows among its processes; None scores them all here.
        progress: Show a progress bar.

    Returns:
        Mean loss over all labels, ends of documents included (nats), its exponential, and bits per UTF-8 byte of text,
        for which the ends of documents, which are no text, are left out.
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
    mine = (windows[index] for index in range(rank, len(windows), world_size))
    bar = tqdm(
        mine,
        total=-(-(len(windows) - rank) // world_size),
        desc="Evaluating",
        disable=None if progress else True,
        leave=False,
    )
    sums = sum_losses(model, bar, eos_token_id)
    if accelerator is not None:
        sums = cast(torch.Tensor, accelerator.reduce(sums, reduction="sum"))
    total_nats, text_nats, num_tokens = sums.tolist()
    loss_nats = total_nats / num_tokens
    return Evaluation(
        loss_nats=loss_nats,
        # Beyond exp(700) a float is infinite; such a model is noise, and the loss says so.
        perplexity=math.exp(min(loss_nats, 700.0)),
        bits_per_byte=text_nats / math.log(2) / token_set.num_bytes,
        num_tokens=int(num_tokens),
        num_bytes=token_set.num_bytes,
    )


@torch.no_grad()
def sum_losses(model: PreTrainedModel, batches: Iterable[Batch], eos_token_id: int) -> torch.Tensor:
    """Sums over all labels: nats, nats of labels that are text, number of labels; float64 (3,)."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        input_ids, labels, position_ids = (
            batch[name].to(device) for name in ("input_ids", "shift_labels", "position_ids")
        )
        logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits  # (b, T, V)
        nats = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)
        is_label = labels != -100
        is_text = is_label & (labels != eos_token_id)
        sums += torch.stack([nats.sum(), (nats * is_text).sum(), is_label.sum()]).double()
    model.train(was_training)
    return sums


def _batch_size(model: PreTrainedModel, sequence_length: int) -> int:
    bytes_per_row = sequence_length * model.config.get_text_config().vocab_size * 4
    return max(1, min(_MAX_BATCH_SIZE, _MAX_LOGITS_BYTES // bytes_per_row))
