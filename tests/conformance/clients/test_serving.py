"""Servers with OpenAI's API: the commands of docs/serving.md, curl's and the openai package's requests."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.clients.packages import installed_version
from conformance.clients.reference import NUM_NEW_TOKENS, PROMPTS, count_equal
from conformance.clients.serving import blocks, command, free_port, run, running

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Server:
    """One that is up."""

    port: int
    model: str


def _expected(reference) -> tuple[list[str], list[str]]:
    """Greedy continuations of the prompts, and answers to them as chat messages."""
    answers = [reference.text(reference.greedy(reference.chat_ids(prompt))) for prompt in PROMPTS]
    return [reference.text(tokens) for tokens in reference.tokens], answers


def _by_openai(server: Server) -> tuple[list[str], list[str], list[str], list[int]]:
    """Completions, chat answers, the same answers streamed, and how many pieces each stream came in."""
    openai = pytest.importorskip("openai", reason="openai is not installed: make ecosystem")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    settings = {"model": server.model, "max_tokens": NUM_NEW_TOKENS, "temperature": 0}
    completions, answers, streamed, pieces = [], [], [], []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        completions.append(client.completions.create(prompt=prompt, **settings).choices[0].text)
        answers.append(client.chat.completions.create(messages=messages, **settings).choices[0].message.content)
        stream = client.chat.completions.create(messages=messages, stream=True, **settings)
        parts = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
        parts = [part for part in parts if part]
        streamed.append("".join(parts))
        pieces.append(len(parts))
    return completions, answers, streamed, pieces


def _by_curl(page_port: str, changes: dict[str, str]) -> tuple[str, str]:
    """What the page's two requests bring: the text of the completion, and the text of the streamed answer."""
    address = f"http://127.0.0.1:{page_port}/v1"
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on the PATH")
    completion = json.loads(run(command(f"curl -s {address}/completions", changes)))
    lines = run(command(f"curl -sN {address}/chat/completions", changes)).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    return completion["choices"][0]["text"], "".join(parts)


def _transformers_serve(trained, tmp_path) -> Iterator[Server]:
    port = free_port()
    words = command("transformers serve", {"out/demo-native": str(trained.native), "8000": str(port)})
    with running(words, tmp_path, f"http://127.0.0.1:{port}/health"):
        yield Server(port, str(trained.native))


@pytest.mark.client("transformers serve (Qwen3)", "docs/serving.md on the Qwen3 export: curl, openai, streams")
def test_transformers_serve_qwen3(trained, reference, tmp_path, client_record):
    client_record(_served_by_transformers(trained, reference, tmp_path))


@pytest.mark.client("transformers serve (Llama)", "docs/serving.md on the Llama export: curl, openai, streams")
def test_transformers_serve_llama(trained_llama, llama_reference, tmp_path, client_record):
    client_record(_served_by_transformers(trained_llama, llama_reference, tmp_path))


def _served_by_transformers(trained, reference, tmp_path) -> str:
    pytest.importorskip("fastapi", reason="transformers serve needs fastapi: make ecosystem")
    texts, answers = _expected(reference)
    for server in _transformers_serve(trained, tmp_path):
        completions, chats, streamed, pieces = _by_openai(server)
        changes = {"8000": str(server.port), "out/demo-native": server.model}
        assert _by_curl("8000", changes) == (texts[0], answers[0])
    assert completions == texts
    assert chats == answers
    assert streamed == answers
    assert min(pieces) > 4
    return f"{3 * len(PROMPTS)} texts equal to `generate()`'s, streams in {min(pieces)} to {max(pieces)} pieces"


@pytest.fixture(scope="module")
def llama_cpp(trained, tmp_path_factory) -> Iterator[Server]:
    """docs/serving.md's server on the GGUF."""
    yield from _llama_cpp(trained.gguf, tmp_path_factory.mktemp("llama_cpp"))


def _llama_cpp(gguf: Path, folder: Path) -> Iterator[Server]:
    if installed_version("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed: make ecosystem")
    (folder / "serve_gguf.py").write_text(*blocks("python"), encoding="utf-8")
    port = free_port()
    words = command("python serve_gguf.py", {"out/demo.gguf": str(gguf), "8080": str(port)})
    with running(words, folder, f"http://127.0.0.1:{port}/health"):
        yield Server(port, gguf.name)


@pytest.mark.client("xllamacpp", "llama.cpp on the GGUF (Qwen3, and the Llama of the model without QK-norm)")
def test_llama_cpp_tokens(trained, reference, trained_llama, llama_reference, tmp_path, client_record):
    tokens = []
    for made, asked in ((trained, reference), (trained_llama, llama_reference)):
        folder = tmp_path / made.gguf.stem
        folder.mkdir()
        for server in _llama_cpp(made.gguf, folder):
            tokens += [_greedy(server, asked.ids(prompt)) for prompt in PROMPTS]
    expected = [*reference.tokens, *llama_reference.tokens]
    assert tokens == expected
    client_record(count_equal(tokens, expected))


def _greedy(server: Server, ids: list[int]) -> list[int]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/completion",
        json.dumps({"prompt": ids, "n_predict": NUM_NEW_TOKENS, "temperature": 0, "return_tokens": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["tokens"]


@pytest.mark.client("xllamacpp server", "docs/serving.md on the GGUF: curl, openai, streams")
def test_llama_cpp_server(llama_cpp, reference, client_record):
    texts, answers = _expected(reference)
    completions, chats, streamed, pieces = _by_openai(llama_cpp)
    assert completions == texts
    assert chats == answers
    assert streamed == answers
    assert min(pieces) > 4
    assert _by_curl("8080", {"8080": str(llama_cpp.port)}) == (texts[0], answers[0])
    client_record(f"{3 * len(PROMPTS)} texts equal to `generate()`'s, streams in {min(pieces)} to {max(pieces)} pieces")
