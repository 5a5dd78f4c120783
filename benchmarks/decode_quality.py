"""What a quantized cache costs in quality: bits per byte of a checkpoint's own validation text, read through the cache.

Shapes: B batch, T positions of a window, V vocab_size.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from decode_timing import Progress, reason
from torch import nn
from transformers import PreTrainedTokenizerFast

from tercet.modeling import TercetCache, TercetForCausalLM
from tercet.tokenizer import token_ids
from tercet.training.packing import IGNORE_INDEX, PackedDataset, build_packing
from tercet.training.run_folder import DATA_NAME
from tercet.training.shards import PreparedData
from tercet.training.token_set import TokenSet

_BATCH_SIZE = 32


def quality_section(checkpoint: Path, chunk: int, device: torch.device, progress: Progress) -> dict[str, Any]:
    """Bits per byte with the plain, the int8 and the int4 cache.

    The text comes in chunks of a few tokens, each read with all before it from the cache, as decoding does. Windows
    and scored tokens are those of `tercet eval`, so the plain cache gives its number.
    """
    model = TercetForCausalLM.from_pretrained(checkpoint).eval()
    nn.Module.to(model, device)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    text = PreparedData.open(checkpoint / DATA_NAME).validation
    eos_token_id, pad_token_id = token_ids(tokenizer)[1:]
    length = min(int(model.config.max_position_embeddings), 1024)
    windows, num_scored_before = one_window_a_row(text.document_lengths, length, eos_token_id, pad_token_id, text)
    rows: dict[str, Any] = {}
    for name, arguments in (("plain", {}), ("int8", {"quantization": "int8"}), ("int4", {"quantization": "int4"})):
        try:
            nats = 0.0
            for start in range(0, len(windows), _BATCH_SIZE):
                progress(f"quality, {name} cache", f"window {start} of {len(windows)}")
                batch = windows.rows(np.arange(start, min(start + _BATCH_SIZE, len(windows))))
                labels = batch["shift_labels"]
                scored_before = torch.from_numpy(num_scored_before[start : start + _BATCH_SIZE])[:, None]
                labels[(torch.arange(length) < scored_before) | (labels == eos_token_id)] = IGNORE_INDEX
                cache = TercetCache(model.config, **arguments)
                nats += sum_nats(model, batch["input_ids"].to(device), labels.to(device), cache, chunk)
            rows[name] = {"bits_per_byte": nats / math.log(2) / text.num_bytes}
            rows[name]["change"] = rows[name]["bits_per_byte"] / rows["plain"]["bits_per_byte"] - 1
        except Exception as error:  # what one kind of cache cannot do says nothing of the others
            progress.note(f"quality, {name} cache failed: {reason(error)}")
            rows[name] = {"error": f"failed: {reason(error)}"}
    return {
        "checkpoint": str(checkpoint), "validation_bytes": text.num_bytes, "validation_tokens": text.num_tokens,
        "window": length, "chunk": chunk, "caches": rows,
    }  # fmt: skip


@torch.no_grad()
def sum_nats(
    model: TercetForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor, cache: TercetCache, chunk: int
) -> float:
    """Sum of -log p over the labels (B, T), the inputs (B, T) being given `chunk` at a time."""
    nats = torch.zeros((), dtype=torch.float64, device=input_ids.device)
    for ids, targets in zip(input_ids.split(chunk, dim=1), labels.split(chunk, dim=1), strict=True):
        logits = model(ids, cache=cache, use_cache=True).logits.float()  # (B, chunk, V)
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return float(nats)


def one_window_a_row(
    lengths: np.ndarray, length: int, eos_token_id: int, pad_token_id: int, text: TokenSet
) -> tuple[PackedDataset, np.ndarray]:
    """Windows of T = `length`, half of it apart, each in a row of its own: a cache holds one document a row.

    Returns:
        The rows, and how many leading labels of each were scored in the window before.
    """
    stride = length // 2
    num_windows = 1 + -(-np.maximum(lengths - length, 0) // stride)
    document = np.repeat(np.arange(len(lengths)), num_windows)
    ordinal = np.arange(len(document)) - (np.cumsum(num_windows) - num_windows)[document]
    stop = np.minimum(lengths[document], length + ordinal * stride)
    start = np.maximum(stop - length, 0)
    scored_before = np.where(ordinal > 0, length + (ordinal - 1) * stride - start, 0)
    packing = build_packing(np.stack([document, start, stop - start]), np.arange(len(document)), length)
    return PackedDataset(text, packing, eos_token_id=eos_token_id, pad_token_id=pad_token_id), scored_before
