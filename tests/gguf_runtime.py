"""GGUF files in llama.cpp itself, and what the tests of them have in common."""

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tercet.training.errors import UserError

gguf = pytest.importorskip("gguf", reason="writing GGUF needs the package gguf")
xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp itself comes with the package xllamacpp")

VOCAB_SIZE = 1024
# A large initializer_range and a head of its own, for greedy tokens that differ: a tied one repeats the last token.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip


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
        # A server that ends before its loop has begun waits for itself for ever; an answer shows that it has begun.
        self._complete([0], 1)

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


def read(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def storage(path: Path) -> dict[str, str]:
    """The type that each tensor is stored in."""
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@contextlib.contextmanager
def refused(folder: Path, reason: str) -> Iterator[None]:
    """One line, and nothing is left beside the checkpoint."""
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match=reason) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert sorted(folder.iterdir()) == before
