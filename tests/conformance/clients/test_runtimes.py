"""Other runtimes on what `tercet export` writes, and tokenizer.json in JavaScript."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from conformance.clients.packages import HERE, NPM_FOLDER, run_program
from conformance.clients.reference import NUM_NEW_TOKENS, PROMPTS, TEXTS, count_equal

pytestmark = pytest.mark.slow
NASTY = [
    "",
    " ",
    "   \n\n\t \r\n  ",
    "The quick brown fox's tail; IT'S 1234567 times   longer. I'd've",
    "def f(x):\n\tif x >= 10:\n        return {'a': x[0]**2}  # done\n\n\nprint(f(12))",
    "人工智能正在改变世界、2024年第3季度。日本語もテスト、한국어",
    "😀👩‍👩‍👧‍👦 🇩🇪 👍🏽 naïve café — “quotes” … ½ ² Ⅻ ﬁ",
    "e\u0301 \u0301 a\u0300\u0316 Å Å",
    "0 12 345 6789 3.14159 1,000,000 0xFF ٣٤٥ १२३",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|pad|> <|im_x|> <|endoftext|",
    "Привет, мир! العربية هَذَا हिन्दी ไทย עברית",
    "\ufeffBOM \u200b\u200d\u00a0\u2028\u2029\u3000 \x00\x01\x7f\x85 \ue000 \U0001d54f",
    "snake_case CamelCase SHOUT 'S 'LL x'T \u017f'\u017f \u212a",
    "trailing   ",
    "a" * 300,
    *TEXTS,
]


@pytest.mark.client("onnxruntime", "`tercet export --to onnx`, greedy decoding with the cache in NumPy")
def test_onnxruntime(trained, reference, tmp_path, client_record):
    graph = tmp_path / "onnx"
    subprocess.run(
        [sys.executable, "-m", "tercet", "export", trained.folder, graph, "--to", "onnx"], check=True,
        capture_output=True,
    )  # fmt: skip
    prompts = [reference.ids(prompt) for prompt in PROMPTS]
    answer = run_program(
        "onnx_greedy.py", tmp_path, path=graph / "model.onnx", prompts=prompts, max_new_tokens=NUM_NEW_TOKENS
    )
    assert answer["tokens"] == reference.tokens
    delta = max(
        float((torch.tensor(logits) - reference.logits(ids)).abs().max())
        for logits, ids in zip(answer["logits"], prompts, strict=True)
    )
    assert delta <= 5e-5
    client_record(f"{count_equal(answer['tokens'], reference.tokens)}, max \\|Δ logit\\| {delta:.0e}")


@pytest.mark.client("ctranslate2 Llama", "the Llama export converted; greedy tokens and scores")
def test_ctranslate2_llama(trained_llama, llama_reference, tmp_path, client_record):
    client_record(_ctranslate2(trained_llama, llama_reference, tmp_path))


@pytest.mark.client(
    "ctranslate2 Qwen3", "the Qwen3 export (of a model with QK-norm) converted; greedy tokens and scores"
)
def test_ctranslate2_qwen3(trained, reference, tmp_path, client_record):
    client_record(_ctranslate2(trained, reference, tmp_path))


def _ctranslate2(trained, reference, tmp_path) -> str:
    answer = run_program(
        "ctranslate2_greedy.py", tmp_path,
        folder=trained.native, prompts=PROMPTS, texts=TEXTS, max_new_tokens=NUM_NEW_TOKENS,
    )  # fmt: skip
    assert answer["tokens"] == reference.tokens
    expected = [reference.nats(reference.ids(text)) for text in TEXTS]
    delta = max(
        float((torch.tensor(nats) - wanted).abs().max()) for nats, wanted in zip(answer["nats"], expected, strict=True)
    )
    assert delta <= 1e-3
    return f"{count_equal(answer['tokens'], reference.tokens)}, max \\|Δ log p\\| {delta:.0e}"


@pytest.mark.client(
    "@huggingface/tokenizers", "tokenizer.json in Node.js: ids and decoded text of strings chosen to be hard"
)
def test_javascript_tokenizer(trained, reference, client_record):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on the PATH")
    program, package = HERE / "programs" / "tokenizer.mjs", NPM_FOLDER / "@huggingface" / "tokenizers"
    done = subprocess.run(
        [node, program, package, trained.folder],
        input=json.dumps(NASTY), capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    expected = reference.tokenizer(NASTY)["input_ids"]
    differing = [text for text, one, other in zip(NASTY, answer["ids"], expected, strict=True) if one != other]
    assert not differing
    assert answer["texts"] == [reference.tokenizer.decode(ids) for ids in expected]
    client_record(f"{len(NASTY)} of {len(NASTY)} strings: ids equal ({sum(map(len, expected)):,}), decoded text equal")
