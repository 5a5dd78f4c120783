"""Small decoders of several families with random weights, for what records and shows them."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tercet.explorer.record import Trace
from tercet.modeling import TercetConfig, TercetForCausalLM

VOCAB_SIZE = 1024
PROMPT = "The <b>string</b> methods\n\t中文 é"
WINDOW = 6

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1,
}  # fmt: skip
_GPT2: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}
_OPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 96, "word_embed_proj_dim": 32, "eos_token_id": None,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

NATIVE: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "llama": _SIZES,
    "mistral": {**_SIZES, "sliding_window": WINDOW},
    "qwen3": {**_SIZES, "head_dim": 16},
    "smollm3": {**_SIZES, "no_rope_layers": [1, 1, 0]},
    "olmo2": _SIZES,
    "gpt_neox": {**_SIZES, "rotary_pct": 0.5},
    "gemma2": {**_SIZES, "head_dim": 8, "sliding_window": WINDOW, "final_logit_softcapping": 3.0},
    "phi3": _SIZES,
    "opt": _OPT,
    "falcon": {**_GPT2, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "granite": {**_SIZES, "residual_multiplier": 0.3, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "mixtral": {**_SIZES, **_EXPERTS},
    "gpt_oss": {**_SIZES, **_EXPERTS, "head_dim": 8, "sliding_window": WINDOW},
    "openai-gpt": _GPT2,
    "gemma3_text": {**_SIZES, "head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED},
    "nanochat": _SIZES,
    "olmo": _SIZES,
    "cohere": {**_SIZES, "use_qk_norm": True},
    "cohere2": {**_SIZES, "sliding_window": WINDOW, "layer_types": _MIXED},
    "phi": {**_SIZES, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "llama4_text": {
        **_SIZES,
        **_EXPERTS,
        "intermediate_size_mlp": 40,
        "head_dim": 8,
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 0, 1],
        "interleave_moe_layer_step": 2,
    },
    "glm4_moe": {**_SIZES, "head_dim": 8, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        **_SIZES,
        "head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mamba": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}
TERCET = {
    "tercet-modern": lambda: TercetConfig.modern(**_SIZES),
    "tercet-classic": lambda: TercetConfig.classic(**{**_SIZES, "num_key_value_heads": 4}),
    "tercet-mixed": lambda: TercetConfig.modern(**_SIZES, sliding_window=WINDOW, layer_types=_MIXED),
}


@dataclass(frozen=True)
class Traced:
    """A model and what `trace` recorded of it."""

    kind: str
    model: PreTrainedModel
    trace: Trace

    @property
    def ids(self) -> torch.Tensor:
        """All tokens, (1, S)."""
        return torch.tensor([[token.id for token in self.trace.tokens]])

    @property
    def prompt_ids(self) -> torch.Tensor:
        """(1, P)."""
        return self.ids[:, : self.trace.num_prompt_tokens]


def make_model(kind: str, **changes: Any) -> PreTrainedModel:
    """A model of one of the kinds above, in evaluation mode, with weights large enough for attention to choose."""
    torch.manual_seed(0)
    if kind in TERCET:
        model: PreTrainedModel = TercetForCausalLM(TERCET[kind]())
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**NATIVE[kind], **changes}))
        assert model.generation_config is not None
        model.generation_config.eos_token_id = None
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.ndim > 1 else weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()
