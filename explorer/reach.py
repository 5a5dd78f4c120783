"""How far back a layer's queries see: what attention was told, held against the mask that it was given.

Shapes: T queries, S keys.
"""

from typing import Any, NamedTuple

import torch

from tercet.explorer.attention_probe import AttentionCall


class Reach(NamedTuple):
    """How many keys a query sees at most, or in pieces of which size it sees; both None: all of the past."""

    window: int | None
    chunk: int | None


EVERYTHING = Reach(None, None)


def visible(num_tokens: int, reach: Reach) -> torch.Tensor:
    """Which keys each query sees, (S, S); row: query."""
    positions = torch.arange(num_tokens)
    distance = positions[:, None] - positions
    seen = distance >= 0
    if reach.window is not None:
        seen &= distance < reach.window
    if reach.chunk is not None:
        seen &= positions[:, None] // reach.chunk == positions // reach.chunk
    return seen


def num_keys(num_tokens: int, reach: Reach) -> int:
    """How many keys the last of so many tokens sees."""
    if reach.chunk is not None:
        return (num_tokens - 1) % reach.chunk + 1
    return num_tokens if reach.window is None else min(num_tokens, reach.window)


def find_reach(config: Any, index: int, call: AttentionCall | None) -> Reach:
    """Of one layer. What a text shorter than the window cannot show, the config says."""
    said = _said(config, index, None if call is None else call.window)
    if call is None:
        return said
    num_tokens = call.weights.shape[-1]
    if call.weights.shape[-2] != num_tokens:  # more keys than tokens: summaries of them, or a memory
        return EVERYTHING
    if call.seen is None or call.seen.shape != (num_tokens, num_tokens):
        goes_beyond = bool(call.weights[:, ~visible(num_tokens, said)].any())
        return EVERYTHING if goes_beyond else said
    pieces = (call.seen.diff(dim=0) & ~call.seen[1:]).any(-1).nonzero()
    tries = (
        said, EVERYTHING, Reach(int(call.seen.sum(-1).max()), None),
        *([Reach(None, int(pieces[0]) + 1)] if len(pieces) else []),
    )  # fmt: skip
    return next((reach for reach in tries if torch.equal(visible(num_tokens, reach), call.seen)), EVERYTHING)


def _said(config: Any, index: int, told: int | None) -> Reach:
    kinds = getattr(config, "layer_types", None)
    kind = None if kinds is None or index >= len(kinds) else kinds[index]
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if kind == "chunked_attention":
        return Reach(None, chunk)
    if told is not None:
        return Reach(told, None)
    local_kinds = getattr(config, "attention_layers", None)  # GPT-Neo's
    if local_kinds is not None:
        return Reach(config.window_size if local_kinds[index] == "local" else None, None)
    if kinds is None:
        return Reach(window, None) if window else Reach(None, chunk)
    return Reach(window, None) if kind == "sliding_attention" else EVERYTHING
