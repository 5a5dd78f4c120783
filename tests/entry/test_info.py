"""`tercet info` on folders that hold a config and no weights at all: nothing but the config is read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import FalconConfig, GPT2Config, LlamaConfig, PreTrainedConfig

from tercet.info import describe, load_meta_model
from tercet.modeling import TercetCache, TercetConfig, TercetForCausalLM
from tercet.units import binary_bytes

SIZES: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS: dict[str, PreTrainedConfig] = {
    "tercet": TercetConfig(
        **SIZES,
        num_key_value_heads=2,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        sliding_window=32,
        dtype="bfloat16",
    ),
    "llama": LlamaConfig(**SIZES, intermediate_size=128),
    "gpt2": GPT2Config(vocab_size=1000, n_embd=64, n_layer=4, n_head=4),
}


def save(config: PreTrainedConfig, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_sections(config: PreTrainedConfig, tmp_path: Path) -> None:
    folder = save(config, tmp_path / "model")
    text = describe(folder)
    for title in ("Weights: what training changes", "Hyperparameters", "Memory in", "Cache:", "FLOPs per token"):
        assert title in text
    model = load_meta_model(folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in text
    assert max(map(len, text.splitlines())) <= 110


def test_tercet_numbers(tmp_path: Path) -> None:
    text = describe(save(CONFIGS["tercet"], tmp_path / "model"), width=160)
    assert "Memory in bfloat16" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    per_layer = 2 * 2 * 16 * 2
    # Key and value: two heads of 16 codes, and three bytes of range for each head.
    int8, int4 = 2 * 2 * (16 + 3), 2 * 2 * (8 + 3)
    assert f"sliding attention, up to 32 tokens 3 {3 * per_layer} {3 * int8} {3 * int4}" in lines
    assert f"full attention 1 {per_layer} {int8} {int4}" in lines
    assert f"all 4 {4 * per_layer} {4 * int8} {4 * int4}" in lines
    assert any("tied to embed_tokens" in line for line in lines)
    assert any(line.startswith("layer_types 3 × sliding_attention, full_attention") for line in lines)  # noqa: RUF001
    cache = per_layer * (2048 + 3 * 32)
    assert f"cache of one sequence of 2,048 tokens {cache:,} {binary_bytes(cache)}" in lines


def test_bytes_per_token_are_those_of_a_cache(tmp_path: Path) -> None:
    config = TercetConfig(**SIZES, num_key_value_heads=2, head_dim=24)
    text = describe(save(config, tmp_path / "model"), width=160)
    sizes = []
    for quantization in (None, "int8", "int4"):
        cache = TercetCache(config, quantization=quantization)
        states = torch.randn(1, 2, 7, 24)
        for layer_idx in range(4):
            cache.update(states, states, layer_idx)
        cache.save(tmp_path / "cache")
        with safe_open(tmp_path / "cache", "pt") as file:
            sizes.append(sum(file.get_tensor(name).nbytes for name in file.keys()) // 7)  # noqa: SIM118
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"all 4 {sizes[0]:,} {sizes[1]:,} {sizes[2]:,}" in lines


def test_other_families_have_no_quantized_cache(tmp_path: Path) -> None:
    text = describe(save(CONFIGS["llama"], tmp_path / "model"))
    assert "bytes per token" in text
    assert "int8" not in text
    assert "The cache is as large as the weights at a context of" in text


def test_a_saved_model_runs_none_of_its_code(tmp_path: Path) -> None:
    TercetForCausalLM(TercetConfig(**SIZES)).save_pretrained(tmp_path / "model")
    assert "auto_map" in json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "model.safetensors").write_bytes(b"never read")
    for code in (tmp_path / "model").glob("*.py"):
        code.write_text("raise SystemExit('code of the folder was run')")
    assert "TercetForCausalLM (tercet)" in describe(tmp_path / "model")


def test_a_family_without_accounting_says_so(tmp_path: Path) -> None:
    config = FalconConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    text = describe(save(config, tmp_path / "model"), width=300)
    assert "Weights" in text
    assert "Memory and FLOPs are not shown: model_type 'falcon'" in text


def test_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text(json.dumps({"model_type": "sonnet"}))
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    for name, message in {
        "nowhere": "is no folder: give a checkpoint",
        "empty": "holds no checkpoint",
        "broken": "is no model config",
        "unknown": "holds sonnet, and a decoder-only language model",
        "vit": "holds vit, and a decoder-only language model",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            describe(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_importing_needs_no_torch() -> None:
    code = "import sys, tercet.info; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ}).returncode == 0
