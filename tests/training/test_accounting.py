"""Counts from the config against what torch counts while it runs, and what transformers says of the same model."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tercet.modeling import TercetConfig
from tercet.training.accounting import (
    DecoderShape,
    cache_bytes,
    cache_bytes_per_token,
    cache_crossover,
    decode_flops_per_token,
    flops_per_token,
    inference_memory_bytes,
    num_non_embedding_parameters,
    num_parameters,
    parameter_table,
    training_memory_bytes,
)
from tercet.training.hyperparameters import MEANINGS, hyperparameter_table

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WIDE_HEADS = {**SMALL, "head_dim": 16}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**WIDE_HEADS),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "tercet-modern": TercetConfig.modern(**WIDE_HEADS),
    "tercet-untied": TercetConfig.modern(**SMALL, tie_word_embeddings=False),
    "tercet-classic": TercetConfig.classic(**SMALL),
}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def build(config: PreTrainedConfig, device: str = "cpu") -> PreTrainedModel:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def counted(model: PreTrainedModel, num_tokens: int, *, training: bool) -> int:
    """FLOPs that torch sees in one row, without RoPE's outer product of positions and frequencies."""
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.arange(num_tokens)[None], use_cache=False).logits
        if training:
            logits.sum().backward()
    total = counter.get_total_flops()
    rotary = [sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return total - sum(rotary)


@EACH
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_flops_are_torchs_count_less_the_masked_scores(config: PreTrainedConfig, training: bool) -> None:
    num_tokens = 12
    shape = DecoderShape.from_config(config)
    # An eager kernel multiplies every query with every key; a causal model needs T (T + 1) / 2 of the T² scores.
    masked = num_tokens * (num_tokens - 1) // 2
    spared = len(shape.windows) * 4 * shape.num_attention_heads * shape.head_dim * masked * (3 if training else 1)
    ours = num_tokens * flops_per_token(config, num_tokens, training=training)
    assert ours + spared == counted(build(config), num_tokens, training=training)


@EACH
def test_decode_flops_are_the_last_tokens_share_of_a_row(config: PreTrainedConfig) -> None:
    rows = [length * flops_per_token(config, length, training=False) for length in (20, 21)]
    assert decode_flops_per_token(config, 21) == rows[1] - rows[0]


def test_windows_bound_scores_and_cache() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = TercetConfig(**SMALL, layer_types=kinds, sliding_window=8)
    assert DecoderShape.from_config(config).windows == (8, None, 8)
    score = 4 * 4 * 8
    full = decode_flops_per_token(config, 8)
    assert decode_flops_per_token(config, 9) - full == score
    visible = [min(t, 8) for t in range(1, 21)]
    full_row = 20 * flops_per_token(TercetConfig(**SMALL), 20, training=False)
    assert full_row - 20 * flops_per_token(config, 20, training=False) == pytest.approx(
        2 * score * (20 * 21 // 2 - sum(visible)), abs=20
    )
    per_layer = 2 * 2 * 8 * 4
    assert cache_bytes_per_token(config, torch.float32) == 3 * per_layer
    assert cache_bytes(config, torch.float32, 20, batch_size=2) == 2 * per_layer * (20 + 8 + 8)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MistralConfig(**SMALL, sliding_window=16), (16, 16, 16)),
        (MistralConfig(**SMALL, sliding_window=None), (None, None, None)),
        (LlamaConfig(**SMALL), (None, None, None)),
        (Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1), (None, 16, 16)),
        (Qwen2Config(**SMALL, sliding_window=16), (None, None, None)),
        (SmolLM3Config(**SMALL), (None, None, None)),
    ],
)
def test_windows_of_each_family(config: PreTrainedConfig, windows: tuple[int | None, ...]) -> None:
    assert DecoderShape.from_config(config).windows == windows


@pytest.mark.parametrize("name", ["llama", "gpt2", "tercet-modern"])
def test_cache_bytes_are_what_a_cache_holds(name: str) -> None:
    config = CONFIGS[name]
    cache = DynamicCache(config=config)
    model = build(config)
    with torch.no_grad():
        output = model(input_ids=torch.arange(10)[None].repeat(2, 1), cache=cache, use_cache=True)
    assert output.logits.shape == (2, 10, 96)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cache_bytes(config, torch.float32, 10, batch_size=2) == held
    assert cache_bytes_per_token(config, torch.float32) * 20 == held


@EACH
def test_parameters_are_counted_once(config: PreTrainedConfig) -> None:
    model, real = build(config, "meta"), build(config)
    rows = parameter_table(model)
    total = sum({id(p): p.numel() for p in real.parameters()}.values())
    assert num_parameters(model) == total == sum(row.num_parameters for row in rows)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert num_non_embedding_parameters(model) == real.num_parameters(exclude_embeddings=True)
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    (head,) = (row for row in rows if row.name == "lm_head")
    if config.tie_word_embeddings:
        assert head.tied_to == rows[0].name
        assert head.num_parameters == 0
    else:
        assert head.tied_to is None
        assert head.num_parameters == 96 * 32


def test_rows_name_shape_and_copies() -> None:
    rows = {row.name: row for row in parameter_table(build(CONFIGS["llama-tied"], "meta"))}
    assert rows["self_attn.k_proj"].shapes == ((16, 32), (16,))
    assert rows["self_attn.k_proj"].num_copies == 3
    assert rows["self_attn.k_proj"].num_parameters == 3 * (16 * 32 + 16)
    assert rows["embed_tokens"].num_copies == 1
    assert rows["norm"].shapes == ((32,),)


def test_crossover_is_the_first_context_as_large_as_the_weights() -> None:
    config = TercetConfig(
        **SMALL, layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=8
    )
    for weight_bytes in (1, 5_000, 100_000):
        context = cache_crossover(config, torch.bfloat16, weight_bytes)
        assert context is not None
        assert cache_bytes(config, torch.bfloat16, context) >= weight_bytes
        assert context == 1 or cache_bytes(config, torch.bfloat16, context - 1) < weight_bytes
    bounded = TercetConfig(**SMALL, sliding_window=8)
    assert cache_crossover(bounded, torch.bfloat16, 100_000) is None
    assert cache_crossover(bounded, torch.bfloat16, 100) == 1


def test_training_memory_is_what_adamw_allocates() -> None:
    config = CONFIGS["tercet-untied"]
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(4)[None], use_cache=False).logits.sum().backward()
    optimizer.step()
    use = training_memory_bytes(model, torch.float32)
    assert use.weights == sum(p.nbytes for p in model.parameters())
    assert use.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    state = [value for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]
    assert use.optimizer_state == sum(value.nbytes for value in state)
    assert use.total == use.weights + use.gradients + use.optimizer_state
    muon = training_memory_bytes(model, torch.float32, optimizer="muon")
    matrices = sum(p.nbytes for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2)
    assert use.optimizer_state - muon.optimizer_state == matrices
    inference = inference_memory_bytes(model, torch.bfloat16, context_length=7, batch_size=3)
    assert inference.weights * 2 == use.weights
    assert inference.cache == 21 * cache_bytes_per_token(config, torch.bfloat16)


def test_errors() -> None:
    with pytest.raises(ValueError, match="model_type 'falcon' cannot be accounted for: known are gpt2, llama"):
        flops_per_token(FalconConfig(), 10, training=False)
    for count in (lambda n: flops_per_token(CONFIGS["llama"], n, training=True),
                  lambda n: decode_flops_per_token(CONFIGS["llama"], n)):  # fmt: skip
        with pytest.raises(ValueError, match="context_length is 0: give at least 1"):
            count(0)


def test_every_field_of_tercet_that_shapes_it_is_explained() -> None:
    housekeeping = {"use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}
    own = {field.name for field in dataclasses.fields(TercetConfig)} - {
        f.name for f in dataclasses.fields(PreTrainedConfig)
    }
    assert own - housekeeping <= set(MEANINGS)
    rows = hyperparameter_table(CONFIGS["tercet-modern"])
    assert {row.name: row.value for row in rows}["head_dim"] == 16
    assert all(row.shapes for row in rows)
    assert {row.name: row.value for row in hyperparameter_table(CONFIGS["gpt2"])}["hidden_size"] == 32
