"""Measures how near imported and exported models are to transformers' own classes: `python -m tercet.interop.table`.

For every family and variant: random weights, import (native to Tercet), export (Tercet to native), the largest
difference of logits over a ragged left-padded batch, whole and token by token with each model's own cache, under
torch's fused attention and the written-out one; and whether greedy generation gives the same tokens.
"""

import argparse
import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from tercet.interop.configs import FAMILIES
from tercet.interop.families import from_native, has_tied_head, to_native
from tercet.training.atomic import write_atomically

_BEGIN, _END = "<!-- table: python -m tercet.interop.table -o docs/interop.md -->", "<!-- end of table -->"
_VOCAB_SIZE = 97
_NUM_LAYERS = 4
_PROMPT_LENGTHS = (24, 17, 6, 1)
_NUM_NEW_TOKENS = 16

_SHARED: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": _NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # New weights are so small that wrong attention would hardly show in the logits.
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # nothing stops generation early
}
_GPT2: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE, "n_embd": 32, "n_layer": _NUM_LAYERS, "n_head": 4, "n_positions": 64,
    "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
_ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
}  # fmt: skip

# Family, what is special about the variant, fields of the native config.
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "tied head", _GPT2),
    ("gpt2", "untied head, 3 E feed-forward", {**_GPT2, "n_inner": 96, "tie_word_embeddings": False}),
    ("llama", "no GQA", {**_SHARED, "num_key_value_heads": 4}),
    ("llama", "GQA, tied head", {**_SHARED, "tie_word_embeddings": True}),
    ("llama", "GQA, biases, head_dim 16", {**_SHARED, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    # Prompts and generation go past 16 positions: there the frequencies of dynamic and longrope change.
    ("llama", "GQA, dynamic RoPE", {**_SHARED, "rope_parameters": _DYNAMIC_ROPE, "max_position_embeddings": 16}),
    *(("llama", f"GQA, {name} RoPE", {**_SHARED, "rope_parameters": rope}) for name, rope in _ROPE.items()),
    ("mistral", "sliding window 5", {**_SHARED, "sliding_window": 5}),
    ("mistral", "no sliding window", {**_SHARED, "sliding_window": None}),
    ("qwen2", "all layers full", _SHARED),
    (
        "qwen2",
        "2 of 4 layers slide, window 5",
        {**_SHARED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    ("qwen3", "head_dim 16", {**_SHARED, "head_dim": 16}),
    (
        "qwen3",
        "biases, tied head, 2 of 4 layers slide",
        {
            **_SHARED, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True, "use_sliding_window": True,
            "sliding_window": 5, "max_window_layers": 2,
        },
    ),
    ("smollm3", "every 4th layer without RoPE", _SHARED),
    (
        "smollm3",
        "2 of 4 layers without RoPE, these slide, biases",
        {
            **_SHARED, "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 5,
            "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        },
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One row of the table.

    Attributes:
        import_delta: Largest difference of a logit, Tercet's against the native model that it was made from.
        export_delta: The native model made from Tercet's, against Tercet's.
        is_same_generation: All three generate the same tokens, greedily.
        is_bit_equal: Tensors of the native model after import and export are those from before.
    """

    import_delta: float
    export_delta: float
    is_same_generation: bool
    is_bit_equal: bool


def native_model(family: str, fields: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """A small native model with random weights in every tensor, biases and norms included."""
    torch.manual_seed(seed)
    kind = FAMILIES[family]
    model = kind.model_class(kind.config_class(**fields)).eval()  # pyright: ignore[reportCallIssue]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # new biases are zeros and new scales ones: as good as absent
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def ragged_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of several lengths: ids and mask, (B, T) each."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(_PROMPT_LENGTHS)
    ids = torch.randint(3, _VOCAB_SIZE, (len(_PROMPT_LENGTHS), longest), generator=generator)
    lengths = torch.tensor(_PROMPT_LENGTHS).unsqueeze(1)
    mask = (torch.arange(longest) >= longest - lengths).long()
    return ids.masked_fill(mask == 0, 0), mask


@dataclass(frozen=True)
class Answers:
    """What a model says to a ragged batch.

    Attributes:
        logits: At every real token of the batch, with positions counted and as given, and at each step of generation.
        tokens: The batch and its greedy continuations, (B, T + new).
    """

    logits: list[torch.Tensor]
    tokens: torch.Tensor


@torch.no_grad()
def ask(model: PreTrainedModel) -> Answers:
    """Run a model over a ragged batch, and let it go on greedily; the model itself stays as it was."""
    # Dynamic RoPE remembers the longest text it has seen and answers otherwise after it: a copy has no later past.
    asked: Any = copy.deepcopy(model)
    ids, mask = ragged_batch()
    logits = []
    for position_ids in (None, (mask.cumsum(-1) - 1).clamp(min=0)):
        logits.append(asked(ids, attention_mask=mask, position_ids=position_ids).logits[mask.bool()])
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = asked.generate(ids, attention_mask=mask, max_new_tokens=_NUM_NEW_TOKENS, **settings)
    return Answers([*logits, *output.logits], output.sequences)


def largest_delta(one: Answers, other: Answers) -> float:
    """Largest difference of a logit."""
    pairs = zip(one.logits, other.logits, strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def measure(family: str, fields: Mapping[str, Any]) -> Measured:
    """Import and export one random model of a family."""
    native = native_model(family, fields)
    ours = from_native(native)
    back = to_native(ours, family)
    assert has_tied_head(native) == has_tied_head(ours) == has_tied_head(back), "a tied head was lost or made"
    import_deltas, export_deltas, is_same = [], [], []
    for implementation in ("sdpa", "eager"):
        for model in (native, ours, back):
            model.set_attn_implementation(implementation)
        before, between, after = ask(native), ask(ours), ask(back)
        import_deltas.append(largest_delta(before, between))
        export_deltas.append(largest_delta(between, after))
        is_same += [torch.equal(before.tokens, answers.tokens) for answers in (between, after)]
    old, new = native.state_dict(), back.state_dict()
    return Measured(
        import_delta=max(import_deltas),
        export_delta=max(export_deltas),
        is_same_generation=all(is_same),
        is_bit_equal=old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old),
    )


def render() -> str:
    """The measured table, in Markdown."""
    lines = [
        r"| family | variant | import, max \|Δ logit\| | export, max \|Δ logit\| | greedy tokens | round trip |",
        "|---|---|---|---|---|---|",
    ]
    for family, variant, fields in VARIANTS:
        row = measure(family, fields)
        lines.append(
            f"| {family} | {variant} | {row.import_delta:.1e} | {row.export_delta:.1e} | "
            f"{'equal' if row.is_same_generation else 'DIFFERENT'} | "
            f"{'bit-equal' if row.is_bit_equal else 'DIFFERENT'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table, or put it between the markers of a Markdown file."""
    parser = argparse.ArgumentParser(prog="python -m tercet.interop.table", description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, help="Markdown file with the markers, such as docs/interop.md")
    output: Path | None = parser.parse_args().output
    logging.set_verbosity_error()
    table = render()
    if output is None:
        print(table)
        return
    text = output.read_text("utf-8")
    found = re.compile(f"({re.escape(_BEGIN)}\n).*?({re.escape(_END)})", re.DOTALL)
    if not found.search(text):
        parser.error(f"{output} has no markers {_BEGIN} … {_END}")
    write_atomically(output, found.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text).encode())


if __name__ == "__main__":
    main()
