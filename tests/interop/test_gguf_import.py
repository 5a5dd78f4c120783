"""GGUF files in again: what was written comes back with its logits, whatever the size of its heads."""

from pathlib import Path

import pytest
import torch
import transformers
from gguf_runtime import SIZES, VOCAB_SIZE, random_model, refused, save
from transformers import AutoTokenizer

from tercet.interop import import_checkpoint
from tercet.interop.gguf import write_gguf
from tercet.modeling import TercetConfig, TercetForCausalLM

LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
EXPORTED = {
    # As the demo: two heads of 64, tied.
    "tercet": (
        TercetForCausalLM,
        TercetConfig.modern(**{**SIZES, "hidden_size": 128, "num_attention_heads": 2, "tie_word_embeddings": True}),
    ),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES, head_dim=32)),
    "qwen3 of 128": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES, head_dim=128)),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, head_dim=32)),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SIZES)),
    "qwen2 of 32": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**{**SIZES, "head_dim": 32})),
    "linear": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR)),
    "yarn": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN)),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1,
            bos_token_id=0, eos_token_id=0,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 1e-5), ("f16", 2e-2)])
@pytest.mark.parametrize("name", EXPORTED)
def test_what_was_exported_is_imported_with_its_logits(name, kind, tolerance, small_tokenizer, tmp_path: Path) -> None:
    model = random_model(*EXPORTED[name])
    path = write_gguf(save(model, small_tokenizer, tmp_path / "m"), tmp_path / "m.gguf", kind)
    import_checkpoint(path, tmp_path / "back")
    back = TercetForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (2, 40))
    with torch.no_grad():
        assert (back(ids).logits - model(ids).logits).abs().max() < tolerance
    text = "The class statement 人工 123\n\tof it's"
    assert AutoTokenizer.from_pretrained(tmp_path / "back")(text)["input_ids"] == small_tokenizer(text)["input_ids"]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["back", "m", "m.gguf"]


def test_frequencies_that_the_reader_would_lose_are_refused(small_tokenizer, tmp_path: Path) -> None:
    model = random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3))
    path = write_gguf(save(model, small_tokenizer, tmp_path / "m"), tmp_path / "m.gguf", "f32")
    with refused(tmp_path, "rope_freqs.weight, the scaled frequencies of Llama 3's RoPE, cannot be read"):
        import_checkpoint(path, tmp_path / "back")


def test_an_architecture_that_the_reader_does_not_know_is_refused(small_tokenizer, tmp_path: Path) -> None:
    config = transformers.SmolLM3Config(**{**SIZES, "num_hidden_layers": 4})
    model = random_model(transformers.SmolLM3ForCausalLM, config)
    path = write_gguf(save(model, small_tokenizer, tmp_path / "m"), tmp_path / "m.gguf", "f32")
    with refused(tmp_path, "m.gguf does not load: .*smollm3"):
        import_checkpoint(path, tmp_path / "back")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF? no")
    with refused(tmp_path, r"m\.gguf does not load: "):
        import_checkpoint(tmp_path / "m.gguf", tmp_path / "back")
