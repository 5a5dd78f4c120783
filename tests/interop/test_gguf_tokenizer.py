"""Tokenizers in GGUF files: token ids and chats of llama.cpp against transformers, and every refusal."""

from pathlib import Path

import pytest
import transformers
from gguf_runtime import SIZES, VOCAB_SIZE, LlamaCpp, random_model, read, refused, save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tercet.interop import gguf_tokenizer, import_checkpoint
from tercet.interop.gguf import write_gguf
from tercet.tokenizer import train_tokenizer
from tercet.tokenizer.pretokenization import BLOOM_PATTERN, CLAUSES_PATTERN, LLAMA3_PATTERN

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
    "superbpe": (splits(CLAUSES_PATTERN), False),
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
    return random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_token_ids_of_every_pre_tokenizer(name: str, small_corpus, tiny_model, tmp_path: Path) -> None:
    tokenizer = other_tokenizer(small_corpus, *PRE_TOKENIZERS[name])
    path = write_gguf(save(tiny_model, tokenizer, tmp_path / "m"), tmp_path / "m.gguf", "f32")
    assert read(path)["tokenizer.ggml.pre"] == name
    runtime = LlamaCpp(path)
    texts = [*TEXTS, *(text[:4000] for text in small_corpus[20:30])]
    assert [runtime.tokenize(text) for text in texts] == tokenizer(texts)["input_ids"]
    import_checkpoint(path, tmp_path / "back")
    assert AutoTokenizer.from_pretrained(tmp_path / "back")(texts)["input_ids"] == tokenizer(texts)["input_ids"]


def test_words_of_a_name_that_is_not_known_are_not_guessed(
    small_corpus, tiny_model, tmp_path: Path, monkeypatch
) -> None:
    made = next(made for made, name in gguf_tokenizer._PRE_TOKENIZERS.items() if name == "bloom")
    with monkeypatch.context() as patch:
        patch.setitem(gguf_tokenizer._PRE_TOKENIZERS, made, "viking")
        tokenizer = other_tokenizer(small_corpus, splits(BLOOM_PATTERN))
        path = write_gguf(save(tiny_model, tokenizer, tmp_path / "m"), tmp_path / "m.gguf", "f32")
    with refused(tmp_path, "tokenizer.ggml.pre is 'viking', and how it splits text is not known here"):
        import_checkpoint(path, tmp_path / "back")


@pytest.mark.parametrize("words", ["llama3", "bloom", "clauses"])
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


def test_tokenizers_that_llama_cpp_has_no_name_for(small_corpus, small_tokenizer, tiny_model, tmp_path: Path) -> None:
    def check(tokenizer: PreTrainedTokenizerFast, reason: str) -> None:
        with refused(tmp_path, reason):
            write_gguf(save(tiny_model, tokenizer, tmp_path / "m"), tmp_path / "m.gguf")

    (tmp_path / "m").mkdir()
    check(other_tokenizer(small_corpus, splits(r"\p{L}+|\s+")), "no pre-tokenizer")
    check(train_tokenizer(small_corpus, VOCAB_SIZE, words="blanks"), "no pre-tokenizer")
    check(other_tokenizer(small_corpus, GPT2_SPLITTER, ignore_merges=True), "no pre-tokenizer")
    check(other_tokenizer(small_corpus, pre_tokenizers.Metaspace()), "no pre-tokenizer")
    other_words = other_tokenizer(small_corpus, splits(r"\S+,|\S|\s+"))
    other_words.backend_tokenizer.pre_tokenizer = splits(CLAUSES_PATTERN)
    check(other_words, "the merge '[a-z]+ ,' joins what this tokenizer's pattern parts")
    endless = other_tokenizer(small_corpus, GPT2_SPLITTER)
    endless.eos_token = None
    check(endless, "no end-of-text token")
