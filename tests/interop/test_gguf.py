"""GGUF files run in llama.cpp itself: token ids and greedy tokens against transformers, and every refusal."""

import contextlib
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tercet.interop.gguf import write_gguf
from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.tokenizer import train_tokenizer
from tercet.tokenizer.pretokenization import BLOOM_PATTERN, LLAMA3_PATTERN
from tercet.training.errors import UserError

gguf = pytest.importorskip("gguf", reason="writing GGUF needs the package gguf")
xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp itself comes with the package xllamacpp")

VOCAB_SIZE = 1024
PROMPT = "def main():\n    return the value of the expression\n\nThe class statement makes a new scope; " * 3
TEXTS = [
    "The quick brown fox's tail; IT'S 1234567 times   longer.",
    "def f(x):\n\tif x >= 10:\n        return {'a': x[0]**2}  # done\n\n\nprint(f(12))",
    "人工智能正在改变世界、2024年第3季度。日本語もテスト",
    "😀👩‍👩‍👧‍👦 🇩🇪 naïve café — “quotes” … ½ ² Ⅻ",
    "0 12 345 6789 3.14159 1,000,000 0xFF",
    "\n\n  \n\t\r\n trailing spaces   \n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|pad|> <|im_x|>",
    "Привет, мир! العربية हिन्दी ไทย",
    " ",
]
# A large initializer_range and a head of its own, for greedy tokens that differ: a tied one repeats the last token.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.1,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}


class LlamaCpp:
    """A file in llama.cpp: one thread, keys and values in float32, asked over loopback."""

    def __init__(self, path: Path) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = 256, 1, 0
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.warmup, parameters.port, parameters.verbosity = False, 0, -1
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(parameters)

    def tokenize(self, text: str) -> list[int]:
        return self._post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]

    def render(self, messages: list[dict[str, str]]) -> str:
        return self._post("/apply-template", {"messages": messages})["prompt"]

    def greedy(self, ids: list[int], num_tokens: int) -> list[int]:
        return self._complete(ids, num_tokens, ignore_eos=True)["tokens"]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Of the next token, (V,); its text must be whole, or the server leaves its probabilities out."""
        answer = self._complete(ids, 1, n_probs=VOCAB_SIZE)
        logprobs = torch.full((VOCAB_SIZE,), float("nan"))
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            logprobs[entry["id"]] = entry["logprob"]
        return logprobs

    def _complete(self, ids: list[int], num_tokens: int, **settings: Any) -> dict[str, Any]:
        request = {"prompt": ids, "n_predict": num_tokens, "temperature": 0, "return_tokens": True,
                   "cache_prompt": False, **settings}  # fmt: skip
        return self._post("/completion", request)

    def _post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._server.listening_address + path, json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_model(model_class: Any, config: Any) -> PreTrainedModel:
    """Biases and norms are random, too: at their zeros and ones a lost one would not be seen."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


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


def splits(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


GPT2_SPLITTER = pre_tokenizers.ByteLevel(add_prefix_space=False)
PRE_TOKENIZERS: dict[str, tuple[pre_tokenizers.PreTokenizer, bool]] = {
    "llama-bpe": (splits(LLAMA3_PATTERN), True),
    "dbrx": (splits(LLAMA3_PATTERN), False),
    "qwen2": (splits(LLAMA3_PATTERN.replace("{1,3}", "")), False),
    "bloom": (splits(BLOOM_PATTERN), False),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), GPT2_SPLITTER]), False),
    "gpt-2": (GPT2_SPLITTER, False),
}


def other_tokenizer(
    corpus: list[str], splitter: pre_tokenizers.PreTokenizer, ignore_merges: bool = False, vocab_size: int = VOCAB_SIZE
) -> PreTrainedTokenizerFast:
    """As other families have them: specials last, no token for padding."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 3, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus[:20], trainer)
    specials = ["<|begin|>", "<|endoftext|>", "<|im_start|>"]
    backend.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=specials[0], eos_token=specials[1])


@pytest.fixture(scope="module")
def tiny_model() -> PreTrainedModel:
    return random_model(*llama(num_hidden_layers=1))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_token_ids_of_every_pre_tokenizer(name: str, small_corpus, tiny_model, tmp_path: Path) -> None:
    tokenizer = other_tokenizer(small_corpus, *PRE_TOKENIZERS[name])
    path = write_gguf(save(tiny_model, tokenizer, tmp_path / "m"), tmp_path / "m.gguf", "f32")
    assert read(path)["tokenizer.ggml.pre"] == name
    runtime = LlamaCpp(path)
    texts = [*TEXTS, *(text[:4000] for text in small_corpus[20:30])]
    assert [runtime.tokenize(text) for text in texts] == tokenizer(texts)["input_ids"]


@pytest.mark.parametrize("words", ["llama3", "bloom"])
def test_token_ids_and_chat_of_tercet(words, small_corpus, tiny_model, tmp_path: Path) -> None:
    small_tokenizer = train_tokenizer(small_corpus, VOCAB_SIZE, words=words)
    path = write_gguf(save(tiny_model, small_tokenizer, tmp_path / "m"), tmp_path / "m.gguf")
    runtime = LlamaCpp(path)
    texts = [*TEXTS, *(text[:4000] for text in small_corpus[:20])]
    assert [runtime.tokenize(text) for text in texts] == small_tokenizer(texts)["input_ids"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = small_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert runtime.render(messages) == rendered


def test_added_ends_are_those_of_the_tokenizer(small_corpus, tiny_model, tmp_path: Path) -> None:
    tokenizer = other_tokenizer(small_corpus, splits(LLAMA3_PATTERN), True)
    ids = [("<|begin|>", tokenizer.bos_token_id), ("<|endoftext|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A <|endoftext|>", None, ids)
    path = write_gguf(save(tiny_model, tokenizer, tmp_path / "m"), tmp_path / "m.gguf")
    expected = AutoTokenizer.from_pretrained(tmp_path / "m")(TEXTS[0])["input_ids"]
    assert expected[0] == tokenizer.bos_token_id and expected[-1] == tokenizer.eos_token_id
    assert LlamaCpp(path).tokenize(TEXTS[0]) == expected


def read(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


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
    storage = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert "output.weight" not in storage  # tied
    assert storage["blk.0.attn_q.weight"] == "F16"  # rows of 48 are no whole blocks of 32
    assert storage["blk.0.ffn_down.weight"] == "Q8_0" and storage["blk.0.attn_norm.weight"] == "F32"
    assert storage["rope_freqs.weight"] == "F32"
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


@contextlib.contextmanager
def refused(folder: Path, reason: str) -> Iterator[None]:
    """One line, and nothing is left beside the checkpoint."""
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match=reason) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_cannot_express_is_refused(case: str, small_tokenizer, tmp_path: Path) -> None:
    *class_and_config, reason = REFUSED[case]
    folder = save(random_model(*class_and_config), small_tokenizer, tmp_path / "m")
    with refused(tmp_path, reason):
        write_gguf(folder, tmp_path / "m.gguf")


def test_tokenizers_that_llama_cpp_has_no_name_for(small_corpus, small_tokenizer, tiny_model, tmp_path: Path) -> None:
    def check(tokenizer: PreTrainedTokenizerFast, reason: str) -> None:
        with refused(tmp_path, reason):
            write_gguf(save(tiny_model, tokenizer, tmp_path / "m"), tmp_path / "m.gguf")

    (tmp_path / "m").mkdir()
    check(other_tokenizer(small_corpus, splits(r"\p{L}+|\s+")), "no pre-tokenizer")
    check(train_tokenizer(small_corpus, VOCAB_SIZE, words="blanks"), "no pre-tokenizer")
    check(other_tokenizer(small_corpus, GPT2_SPLITTER, ignore_merges=True), "no pre-tokenizer")
    check(other_tokenizer(small_corpus, pre_tokenizers.Metaspace()), "no pre-tokenizer")
    endless = other_tokenizer(small_corpus, GPT2_SPLITTER)
    endless.eos_token = None
    check(endless, "no end-of-text token")


def test_bad_input(trained, small_tokenizer, tmp_path: Path) -> None:
    folder, _, _ = trained
    for kind in ("q4_k_m", "F16", ""):
        with refused(tmp_path, "is not supported: choose one of f32, f16, q8_0"):
            write_gguf(folder, tmp_path / "m.gguf", kind)
    with refused(tmp_path, "is no folder"):
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
