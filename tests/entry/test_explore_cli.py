"""`tercet explore`: the page it writes, the trace it keeps, the server, and what it refuses."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from urllib.parse import urlencode, urlparse

import pytest
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from tercet.explorer import load_trace, render
from tercet.modeling import TercetForCausalLM

SMALL = ("--new-tokens", 3)


@pytest.fixture
def refuses(tercet, tmp_path, monkeypatch):
    """Runs the command in an empty folder; it must say one line, exit with 2 and write nothing."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def check(arguments, *words):
        shown = tercet("explore", *arguments)
        assert shown.code == 2, (shown.out, shown.err)
        assert shown.err.startswith("tercet: ")
        assert shown.err.count("\n") == 1
        for word in words:
            assert word in shown.err
        assert list((tmp_path / "here").iterdir()) == []

    return check


def test_writes_a_page(tercet, checkpoint, tmp_path):
    page = tmp_path / "new.html"
    prompt = "The <script>alert(1)</script> string"
    shown = tercet("explore", checkpoint, "--prompt", prompt, *SMALL, "-o", page)
    assert (shown.code, shown.err) == (0, "")
    assert str(page) in shown.out
    assert "+ 3 tokens" in shown.out
    assert "any browser" in shown.out
    content = page.read_text()
    assert content.startswith("<!doctype html>")
    assert "<script>alert(1)" not in content
    assert list(tmp_path.iterdir()) == [page]


def test_page_of_a_kept_trace_is_the_same(tercet, checkpoint, tmp_path):
    page, again, kept = tmp_path / "page.html", tmp_path / "again.html", tmp_path / "kept"
    assert tercet("explore", checkpoint, *SMALL, "-o", page, "--save-trace", kept).code == 0
    shown = tercet("explore", "--from-trace", kept, "-o", again)
    assert (shown.code, shown.err) == (0, "")
    assert again.read_bytes() == page.read_bytes()
    run = load_trace(kept)
    assert render(run).encode() == page.read_bytes()
    assert run.model.name == checkpoint.name
    assert run.prompt.startswith("The cat sat")


def test_tokens_are_those_of_generate(tercet, checkpoint, tmp_path):
    shown = tercet("generate", checkpoint, "The string", "--max-new-tokens", 5, "--temperature", 0)
    page = ["-o", tmp_path / "page.html", "--save-trace", tmp_path / "kept"]
    assert tercet("explore", checkpoint, "--prompt", "The string", "--new-tokens", 5, *page).code == 0
    run = load_trace(tmp_path / "kept")
    text = b"".join(bytes.fromhex(token.bytes) for token in run.tokens).decode("utf-8", "replace")
    assert shown.out.rstrip("\n") == text.rstrip("\n")


def test_same_seed_draws_the_same_tokens(tercet, checkpoint, tmp_path):
    def drawn(name, *options):
        kept = tmp_path / name
        page = ["-o", tmp_path / "page.html", "--save-trace", kept]
        assert tercet("explore", checkpoint, "--prompt", "The", "--new-tokens", 8, *options, *page).code == 0
        return [token.id for token in load_trace(kept).tokens]

    hot = ("--temperature", 5, "--top-k", 100, "--top-p", 0.99, "--seed")
    assert drawn("a", *hot, 1) == drawn("b", *hot, 1)
    assert drawn("a", *hot, 1) != drawn("c", *hot, 2)


def test_what_is_left_out_is_told(tercet, untrained, tmp_path):
    """Of a family that keeps no cache."""
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    shown = tercet("explore", untrained(model), "--prompt", "The", *SMALL, "-o", tmp_path / "page.html")
    assert shown.code == 0
    assert "note: cache: " in shown.err
    assert (tmp_path / "page.html").is_file()


class TestRefused:
    def test_no_checkpoint(self, refuses, tmp_path):
        refuses([], "checkpoint", "--from-trace")
        refuses([tmp_path / "nowhere"], "nowhere", "no folder")
        refuses([tmp_path], "no checkpoint")

    def test_empty_prompt(self, refuses, checkpoint):
        refuses([checkpoint, "--prompt", ""], "prompt is empty")

    def test_longer_than_the_context(self, refuses, checkpoint):
        longest = TercetForCausalLM.from_pretrained(checkpoint).config.max_position_embeddings
        refuses([checkpoint, "--prompt", "string " * longest], "the prompt has", f"context {longest}")
        refuses([checkpoint, "--prompt", "The", "--new-tokens", longest], f"{longest} new", "at most")

    def test_no_decoder(self, refuses, untrained):
        bert = BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        refuses([untrained(BertForMaskedLM(bert))], "BertForMaskedLM", "decoder-only")

    def test_no_attention(self, refuses, untrained):
        model = MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1))
        refuses([untrained(model)], "MambaForCausalLM", "no attention")

    def test_no_tokenizer(self, refuses, tmp_path):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2))
        model.save_pretrained(tmp_path / "bare")
        refuses([tmp_path / "bare"], str(tmp_path / "bare"), "no tokenizer")

    def test_too_large_for_memory(self, refuses, checkpoint, tmp_path):
        """Files of eight terabytes that take no room on the disk."""
        for names in (["model.safetensors"], ["model-1.safetensors", "model-2.safetensors"]):
            folder = shutil.copytree(checkpoint, tmp_path / f"large-{len(names)}")
            (folder / "model.safetensors").unlink()
            for name in names:
                with open(folder / name, "wb") as file:
                    file.truncate((8 << 40) // len(names))
            index = {"weight_map": dict(zip("ab", names, strict=False))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            for way in ([], ["--serve"]):
                refuses([folder, *way], str(folder), "8.00 TiB", "memory are free on cpu", "smaller checkpoint")

    def test_no_place_for_the_page(self, refuses, checkpoint, tmp_path):
        refuses([checkpoint, "-o", tmp_path / "nowhere" / "page.html"], "no folder", "nowhere")
        refuses([checkpoint, "-o", tmp_path], "is a folder")
        (tmp_path / "file").write_text("mine")
        refuses([checkpoint, "-o", tmp_path / "file" / "page.html"], "no folder")

    @pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that not even root can write to")
    def test_a_folder_that_cannot_be_written(self, refuses, checkpoint):
        refuses(
            [checkpoint, "--prompt", "The", *SMALL, "-o", "/proc/self/page.html"], "/proc/self", "cannot be written"
        )

    def test_no_place_for_the_trace(self, refuses, checkpoint, tmp_path):
        (tmp_path / "file").write_text("mine")
        place = tmp_path / "file"
        refuses([checkpoint, "--prompt", "The", *SMALL, "--save-trace", place], str(place), "cannot be written")

    def test_no_such_device(self, refuses, checkpoint):
        refuses([checkpoint, "--device", "nonsense"], "--device nonsense")
        refuses([checkpoint, "--device", "meta"], "--device meta")

    def test_a_port_that_is_taken(self, refuses, checkpoint):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            refuses([checkpoint, "--serve", "--port", port], f"port {port}", "another")

    def test_options_that_do_not_go_together(self, refuses, checkpoint, tmp_path):
        refuses([checkpoint, "--serve", "-o", "page.html"], "--serve", "--output")
        refuses([checkpoint, "--from-trace", tmp_path], "--from-trace")
        refuses(["--from-trace", tmp_path, "--prompt", "The"], "--from-trace", "--prompt")
        refuses([checkpoint, "--top-k", 5], "--top-k", "--temperature")
        refuses(["--from-trace", tmp_path], "no trace")

    def test_a_page_that_is_there_stays_when_a_run_fails(self, tercet, checkpoint, tmp_path):
        page = tmp_path / "page.html"
        page.write_text("earlier")
        assert tercet("explore", checkpoint, "--new-tokens", 100000, "-o", page).code == 2
        assert page.read_text() == "earlier"
        assert list(tmp_path.iterdir()) == [page]


def test_serves_until_ctrl_c(checkpoint, tmp_path):
    """The whole of it: start, look, ask for another prompt, one too long, end."""
    command = [
        sys.executable,
        "-m",
        "tercet.explorer",
        str(checkpoint),
        "--serve",
        "--prompt",
        "The",
        "--new-tokens",
        "2",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = urlparse(process.stdout.readline().split()[0])
        assert url.hostname == "127.0.0.1"

        def ask(method, path, **fields):
            connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=60)
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            connection.request(method, path, urlencode(fields) if fields else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        status, page = ask("GET", "/")
        assert status == 200
        assert 'action="/run"' in page or '"/run"' in page
        assert ask("POST", "/run", prompt="a second <script>alert(1)</script>", new_tokens=3)[0] == 303
        status, second = ask("GET", "/")
        assert status == 200
        assert second != page
        assert "<script>alert(1)" not in second
        status, problem = ask("POST", "/run", prompt="string " * 1000, new_tokens=3)
        assert status == 400
        assert "context" in problem
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert out.endswith("stopped\n")
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []
