"""Models in GGUF files, run in llama.cpp itself: greedy tokens against transformers, and every refusal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_runtime import SIZES, VOCAB_SIZE, LlamaCpp, random_model, read, refused, save, storage
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tercet.interop.gguf import write_gguf
from tercet.modeling import TercetConfig, TercetForCausalLM

PROMPT = "def main():\n    return the value of the expression\n\nThe class statement makes a new scope; " * 3
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.1,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def greedy(model: PreTrainedModel, ids: list[int], num_tokens: int = 24) -> list[int]:
    ends = [0, 3]  # <|endoftext|>, and <|im_end|>, which llama.cpp takes for an end by its name
    output = model.generate(  # pyright: ignore
        torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False, suppress_tokens=ends, eos_token_id=None
    )
    return output[0, len(ids) :].tolist()


def logprob_error(
    runtime: LlamaCpp, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, ids: list[int]
) -> float:
    """Largest |Δ| of the next token's log probabilities, after the first prompt whose answer is a whole character."""
    with torch.no_grad():
        for _ in range(30):
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)
            token = int(logprobs.argmax())
            if tokenizer.decode([token]).isascii():
                return float((runtime.logprobs(ids) - logprobs).abs().max())
            ids = [*ids, token]
    raise AssertionError("no prompt with a whole answer")


def sized(model_class: Any, config_class: Any, sizes: dict[str, Any]) -> Callable[..., tuple[Any, Any]]:
    return lambda **fields: (model_class, config_class(**{**sizes, **fields}))


llama = sized(transformers.LlamaForCausalLM, transformers.LlamaConfig, SIZES)
mistral = sized(transformers.MistralForCausalLM, transformers.MistralConfig, {**SIZES, "sliding_window": None})
qwen2 = sized(transformers.Qwen2ForCausalLM, transformers.Qwen2Config, SIZES)
qwen3 = sized(transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {**SIZES, "head_dim": 32})
smollm3 = sized(transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config, {**SIZES, "num_hidden_layers": 5})
gpt2 = sized(transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2_SIZES)
modern = sized(TercetForCausalLM, TercetConfig.modern, SIZES)
classic = sized(TercetForCausalLM, TercetConfig.classic, {**SIZES, "num_key_value_heads": 4, "intermediate_size": 256})

FAMILIES = {
    "llama": llama(),
    "llama-tied": llama(tie_word_embeddings=True),
    "llama-biases-head_dim": llama(**BIASES, head_dim=32),
    "llama-llama3": llama(rope_parameters=dict(LLAMA3)),
    "llama-linear": llama(rope_parameters=dict(LINEAR)),
    "llama-yarn": llama(rope_parameters=dict(YARN)),
    "mistral": mistral(),
    "mistral-window-that-never-cuts": mistral(sliding_window=256),
    "qwen2": qwen2(),
    "qwen2-yarn": qwen2(rope_parameters=dict(YARN)),
    "qwen3": qwen3(),
    "qwen3-linear": qwen3(rope_parameters=dict(LINEAR)),
    "smollm3": smollm3(),
    "smollm3-all-rope": smollm3(no_rope_layers=[1] * 5),
    "gpt2": gpt2(),
    "gpt2-untied": gpt2(tie_word_embeddings=False),
    "tercet-modern": modern(tie_word_embeddings=True),
    "tercet-classic": classic(),
    "tercet-llama": modern(qk_norm=False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_f32_file_generates_what_transformers_does(name: str, small_tokenizer, tmp_path: Path) -> None:
    model = random_model(*FAMILIES[name])
    runtime = LlamaCpp(write_gguf(save(model, small_tokenizer, tmp_path / "m"), tmp_path / "m.gguf", "f32"))
    ids = small_tokenizer(PROMPT)["input_ids"]
    expected = greedy(model, ids)
    assert runtime.greedy(ids, 24) == expected and len(expected) == 24
    # llama.cpp looks GELU up in a float16 table.
    tolerance = 2e-3 if "gpt2" in name or "classic" in name else 2e-5
    assert logprob_error(runtime, model, small_tokenizer, ids) < tolerance


@pytest.fixture(scope="module")
def trained(small_corpus, small_tokenizer, tmp_path_factory) -> tuple[Path, PreTrainedModel, list[int]]:
    """Default Tercet that has learnt one page by heart, and the page: its greedy tokens are words, and far apart."""
    torch.manual_seed(0)
    model = TercetForCausalLM(TercetConfig.modern(**{**SIZES, "initializer_range": 0.02, "tie_word_embeddings": True}))
    page: list[int] = small_tokenizer(small_corpus[1])["input_ids"][:80]
    batch = torch.tensor([page])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loss = torch.tensor(0.0)
    for _ in range(80):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss) < 0.1
    return save(model.eval(), small_tokenizer, tmp_path_factory.mktemp("trained")), model, page


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 2e-5), ("f16", 2e-2), ("q8_0", 0.3)])
def test_trained_tercet_in_every_type(trained, small_tokenizer, tmp_path, kind, tolerance) -> None:
    folder, model, page = trained
    runtime = LlamaCpp(write_gguf(folder, tmp_path / "m.gguf", kind))
    expected = greedy(model, page[:8], 64)
    assert len(set(expected)) > 30
    assert runtime.greedy(page[:8], 64) == expected
    assert logprob_error(runtime, model, small_tokenizer, page[:8]) < tolerance


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["llama", "llama-llama3", "qwen2", "smollm3", "gpt2"])
def test_smaller_types_are_near(name: str, kind: str, small_tokenizer, tmp_path: Path) -> None:
    model = random_model(*FAMILIES[name])
    runtime = LlamaCpp(write_gguf(save(model, small_tokenizer, tmp_path / "m"), tmp_path / "m.gguf", kind))
    ids = small_tokenizer(PROMPT)["input_ids"]
    assert logprob_error(runtime, model, small_tokenizer, ids) < {"f16": 1e-2, "q8_0": 0.3}[kind]


def test_metadata_and_storage(small_tokenizer, tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "head_dim": 16, "vocab_size": VOCAB_SIZE + 5, "tie_word_embeddings": True}
    model = random_model(*llama(**sizes, rope_parameters=dict(LLAMA3)))
    path = write_gguf(save(model, small_tokenizer, tmp_path / "verse"), tmp_path / "new" / "m.gguf", "q8_0")
    assert [file.name for file in path.parent.iterdir()] == ["m.gguf"]
    fields = read(path)
    assert fields["general.architecture"] == "llama" and fields["general.name"] == "verse"
    assert fields["llama.attention.head_count"] == 4 and fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.attention.key_length"] == 16 and fields["llama.embedding_length"] == 48
    assert fields["llama.context_length"] == 256 and fields["llama.rope.freq_base"] == 10000.0
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert fields["tokenizer.ggml.add_bos_token"] is False and fields["tokenizer.ggml.add_eos_token"] is False
    assert fields["tokenizer.ggml.eos_token_id"] == 0 and fields["tokenizer.ggml.padding_token_id"] == 1
    assert fields["tokenizer.chat_template"] == small_tokenizer.chat_template
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert tokens[:VOCAB_SIZE] == small_tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE))
    assert types == [3] * 4 + [1] * (VOCAB_SIZE - 4) + [5] * 5  # control, normal, unused
    types_of = storage(path)
    assert "output.weight" not in types_of  # tied
    assert types_of["blk.0.attn_q.weight"] == "F16"  # rows of 48 are no whole blocks of 32
    assert types_of["blk.0.ffn_down.weight"] == "Q8_0" and types_of["blk.0.attn_norm.weight"] == "F32"
    assert types_of["rope_freqs.weight"] == "F32"
    assert LlamaCpp(path).tokenize("value") == small_tokenizer("value")["input_ids"]


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
REFUSED = {
    "sliding window": (*mistral(sliding_window=64), "sliding_window=64"),
    "tercet's sliding window": (*modern(qk_norm=False, sliding_window=64), "sliding_window=64"),
    "no native family": (*modern(position_embedding_type="learned"), "position_embedding_type"),
    "dynamic rope": (*llama(rope_parameters=DYNAMIC), "no RoPE of type dynamic"),
    "llama3 rope": (*qwen2(rope_parameters=dict(LLAMA3)), "no RoPE of type llama3 in architecture qwen2"),
    "yarn's extras": (*llama(rope_parameters={**YARN, "attention_factor": 1.5}), "attention_factor"),
    "activation": (*llama(hidden_act="relu"), "the activation is relu"),
    "gelu": (*gpt2(activation_function="gelu"), "the activation is gelu"),
    "scaling": (*gpt2(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    "biases of qwen3": (*qwen3(attention_bias=True), "attention_bias"),
    "biases of smollm3": (*smollm3(mlp_bias=True), "mlp_bias"),
    "layers without rope": (*smollm3(no_rope_layers=[1, 0, 1, 0, 1]), "no_rope_layers"),
    "family": (
        transformers.PhiForCausalLM,
        transformers.PhiConfig(**{**SIZES, "num_key_value_heads": 4}),
        "'phi'",
    ),
    "small embedding": (*llama(vocab_size=1000), "1024 tokens.* 1000 rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_cannot_express_is_refused(case: str, small_tokenizer, tmp_path: Path) -> None:
    *class_and_config, reason = REFUSED[case]
    folder = save(random_model(*class_and_config), small_tokenizer, tmp_path / "m")
    with refused(tmp_path, reason):
        write_gguf(folder, tmp_path / "m.gguf")


def test_bad_input(trained, small_tokenizer, tmp_path: Path) -> None:
    folder, _, _ = trained
    for kind in ("q4_k_m", "F16", ""):
        with refused(tmp_path, "is not supported: choose one of f32, f16, q8_0"):
            write_gguf(folder, tmp_path / "m.gguf", kind)
    with refused(tmp_path, "nowhere does not exist"):
        write_gguf(tmp_path / "nowhere", tmp_path / "m.gguf")
    with refused(tmp_path, "is a folder"):
        write_gguf(folder, tmp_path)
    with refused(tmp_path, "cannot be written"):
        write_gguf(folder, folder / "config.json" / "m.gguf")
    damaged = save(random_model(*llama()), small_tokenizer, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with refused(tmp_path, "does not load"):
        write_gguf(damaged, tmp_path / "m.gguf")
    mute = tmp_path / "mute"
    random_model(*llama()).save_pretrained(mute)
    with refused(tmp_path, "has no tokenizer"):
        write_gguf(mute, tmp_path / "m.gguf")


@pytest.mark.parametrize(("value", "reason"), [(1e6, "beyond f16: choose type f32"), (float("nan"), "not finite")])
def test_a_failure_while_writing_leaves_the_old_file(
    small_tokenizer, tmp_path: Path, value: float, reason: str
) -> None:
    model = random_model(*llama())
    model.get_parameter("model.layers.2.mlp.up_proj.weight").data[3, 4] = value
    folder, output = save(model, small_tokenizer, tmp_path / "m"), tmp_path / "m.gguf"
    output.write_bytes(b"old")
    with refused(tmp_path, reason):
        write_gguf(folder, output, "f16")
    assert output.read_bytes() == b"old"
