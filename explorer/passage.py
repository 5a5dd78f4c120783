"""How tokens enter the first block and leave the last: what lies between the embedding and it, and behind it the head.

Shapes: S tokens, E hidden_size, V vocab_size.
"""

from typing import Any

import torch

from tercet.explorer.anatomy import Anatomy
from tercet.explorer.record import EntryFacts, ExitFacts
from tercet.explorer.recorder import PassRecord

_CAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap")
_NEARLY = 1e-3
_MOST = 0.03


def entry_facts(record: PassRecord) -> EntryFacts:
    """How ids become what the first block reads."""
    assert record.embeddings is not None and record.first is not None
    embeddings, first = record.embeddings, record.first
    assert record.logits is not None
    dtype = record.logits.dtype  # tensors of the record are float32, whatever they were
    row_scale = None if record.table_rows is None else _factor(record.table_rows, embeddings, dtype)
    way, scale = "other", 1.0
    positions = record.positions
    if embeddings.shape == first.shape and (positions is None or positions.shape == first.shape):
        rest = first if positions is None else first - positions
        factor = _factor(embeddings, rest, dtype)
        if factor is not None:
            way, scale = ("as_is", 1.0) if factor == 1 else ("scaled", factor)
    if way == "other" and record.entry_norm:
        way = "normed"
    return EntryFacts(row_scale, record.position_offset, way, scale)


def exit_facts(config: Any, anatomy: Anatomy, record: PassRecord) -> ExitFacts:
    """How what the last block returned becomes logits."""
    assert record.logits is not None
    norms = [record.norms[call.module] for call in record.tail if call.module in record.norms]
    way, value = "other", 1.0
    if record.head is not None and record.head.shape == record.logits.shape:
        head, logits, dtype = record.head.float(), record.logits.float(), record.logits.dtype
        cap = next((cap for name in _CAP_FIELDS if (cap := getattr(config, name, None))), None)
        factor = _factor(head, logits, dtype)
        if cap and not torch.equal(head, logits) and _are_close(cap * torch.tanh(head / cap), logits, dtype):
            way, value = "capped", float(cap)
        elif factor == 1:
            way = "as_is"
        elif factor is not None:
            way, value = "scaled", factor
    return ExitFacts(norms[0] if norms else None, way, value)


def _are_close(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal but for rounding in the dtype that they had."""
    most = min(32 * torch.finfo(dtype).eps, _MOST) * float(right.abs().max())
    return bool((left - right).abs().max() <= most)


def _factor(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> float | None:
    """The number that makes `right` of `left`, 1 where they are equal; None if none does."""
    if left.shape != right.shape:
        return None
    if torch.equal(left, right):
        return 1.0
    wide, made = left.double(), right.double()
    factor = float((wide * made).sum() / (wide**2).sum().clamp_min(1e-30))
    error = float((factor * wide - made).abs().max())
    if error > max(_NEARLY, 2 * torch.finfo(dtype).eps) * float(made.abs().max()):
        return None
    # Logits that a cap hardly bounds, and sums, are a little off: nothing multiplies by 1.0001.
    return 1.0 if abs(factor - 1) < _NEARLY else float(f"{factor:.4g}")
