"""`tercet generate --num-samples`: several continuations of one prompt, which is read once."""

import re
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.samples import document_start

PROMPT = "The following methods are defined on both string and bytes objects. "
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.3}  # fmt: skip


@pytest.fixture
def folder(untrained):
    torch.manual_seed(0)
    return untrained(TercetForCausalLM(TercetConfig(**SIZES)))


@pytest.fixture
def draw(tercet):
    """Runs `tercet generate` and returns the texts between the separators."""

    def run(folder, *options, prompt=PROMPT, num_samples=3, seed=5):
        shown = tercet(
            "generate", folder, prompt, "--num-samples", num_samples, "--seed", seed, "--max-new-tokens", 12, *options
        )
        assert shown.code == 0, shown.err
        parts = re.split(rf"^--- (\d) of {num_samples} ---\n", shown.out, flags=re.M)
        assert parts[0] == ""
        assert parts[1::2] == [str(number) for number in range(1, num_samples + 1)]
        return parts[2::2]

    return run


def test_a_seed_decides_them_and_the_prompt_is_read_once(draw, folder, fed):
    num_prompt = document_start(AutoTokenizer.from_pretrained(folder), PROMPT).shape[1]
    texts = draw(folder)
    assert [len(ids) for ids in fed] == [num_prompt - 1, *[1] * 12]
    assert all(text.startswith(PROMPT) and text.endswith("\n") for text in texts)
    assert len(set(texts)) == 3
    assert draw(folder) == texts
    assert draw(folder, seed=6) != texts


@pytest.mark.parametrize("family", ["tercet", "windows", "llama"])
def test_they_are_what_transformers_draws(draw, untrained, family):
    """With the cache of transformers' own making, and the prompt read in every row."""
    torch.manual_seed(0)
    windows: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    folder = untrained(
        LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0))
        if family == "llama"
        else TercetForCausalLM(TercetConfig(**SIZES, **(windows if family == "windows" else {})))
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = document_start(tokenizer, PROMPT).repeat(3, 1)
    torch.manual_seed(5)
    output = cast(Any, model).generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=12, do_sample=True, temperature=0.7, top_p=0.95,
        cache_implementation="dynamic",
    )  # fmt: skip
    expected = tokenizer.batch_decode(output[:, rows.shape[1] :], skip_special_tokens=True)
    assert draw(folder) == [f"{PROMPT}{text}\n" for text in expected]


@pytest.mark.parametrize("kind", ["full", "int8", "int4"])
def test_from_a_file_of_the_prompt(draw, folder, fed, tmp_path, kind):
    options = ["--cache", kind, "--prompt-cache", tmp_path / "prompt"]
    written = draw(folder, *options)
    fed.clear()
    read = draw(folder, *options)
    assert [len(ids) for ids in fed] == [1] * 12
    assert read == written == draw(folder, "--cache", kind)


def test_of_an_empty_prompt(draw, folder, tmp_path):
    texts = draw(folder, prompt="", num_samples=2)
    assert len(set(texts)) == 2
    assert draw(folder, "--prompt-cache", tmp_path / "prompt", prompt="", num_samples=2) == texts


@pytest.mark.parametrize(
    ("options", "word"), [(["--temperature", 0], "--temperature"), (["--compile"], "--compile"), ([], "no folder")]
)
def test_refusals(tercet, folder, options, word):
    shown = tercet("generate", folder if options else folder / "nothing", "The", "--num-samples", 2, *options)
    assert shown.code == 2
    assert word in shown.err
    assert shown.out == ""
