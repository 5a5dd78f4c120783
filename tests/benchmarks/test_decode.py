"""The benchmark of decoding runs, keeps what it measured, and counts as it says."""

import json
import random
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.tokenizer import token_ids
from tercet.training.documents import Document
from tercet.training.evaluation import evaluate
from tercet.training.run_folder import DATA_NAME
from tercet.training.shards import prepare

SECTIONS = ["decode", "prefill", "uncached", "quantized", "fork"]


@pytest.fixture(scope="module")
def smoke(root, tmp_path_factory):
    """What `--smoke` writes and prints; compiling, which takes most of it, is left to `test_compiled`."""
    folder = tmp_path_factory.mktemp("decode")
    command = [sys.executable, str(root / "benchmarks" / "decode.py"), "--smoke", "--threads", "1"]
    chosen = ["--sections", *SECTIONS, "--contenders", "dynamic", "static", "no-cache", "tercet"]
    done = subprocess.run([*command, *chosen, "--output", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "decode.json").read_text()), done.stdout


def test_nothing_fails_and_all_tokens_agree(smoke):
    record = smoke[1]
    assert list(record["sections"]) == SECTIONS
    cells = [*record["sections"]["decode"]["cells"], record["sections"]["fork"]["decode"]]
    assert len(cells) == 5
    for cell in cells:
        for name, row in cell["contenders"].items():
            if name == "Llama no cache" and "error" in row:
                assert row["error"].startswith("skipped")
                continue
            assert row["first_difference"] is None, (name, row)
            assert len(row["ms_per_token"]["samples"]) == record["plan"]["num_rounds"]
    assert not [row for cell in record["sections"]["prefill"]["cells"] for row in cell["contenders"].values()
                if "error" in row]  # fmt: skip
    assert record["sections"]["uncached"]["first_difference"] is None


def test_the_record_says_where_it_was_made(smoke):
    record = smoke[1]
    assert record["hardware"]["num_threads"] == 1
    assert record["versions"]["torch"] == torch.__version__
    assert "--smoke" in record["command"]
    assert record["bytes_per_second"]["median"] > 0


def test_tables_and_pictures(smoke):
    folder, record, printed = smoke
    assert "| Batch | Context | Llama DynamicCache |" in printed
    assert "in 11 of 11 comparisons" in printed
    for name in ("decode.png", "uncached.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    from decode_report import tables

    assert tables(record) == printed.removesuffix("\n"), "the tables need more than the JSON holds"


@pytest.mark.slow
def test_compiled(root, tmp_path):
    command = [
        sys.executable,
        str(root / "benchmarks" / "decode.py"),
        "--smoke",
        "--sections",
        "decode",
        "--batch",
        "1",
    ]
    chosen = ["--contenders", "dynamic", "static-compiled", "tercet-compiled", "--output", str(tmp_path)]
    subprocess.run([*command, *chosen], check=True, capture_output=True)
    for cell in json.loads((tmp_path / "decode.json").read_text())["sections"]["decode"]["cells"]:
        for name in ("Llama StaticCache compiled", "Tercet compiled"):
            row = cell["contenders"][name]
            assert row["graphs_compiled"] > 0 and row["first_difference"] is None, row
        assert cell["graphs_compiled_while_timed"] == 0


def test_one_that_fails_does_not_stop_the_others():
    from decode_timing import Progress, Turns

    def fails() -> float:
        raise RuntimeError("no room\nfor the details")

    outcomes = Turns(3, random.Random(0), Progress()).take("test", {"fails": fails, "works": lambda: 1.0})
    assert outcomes["fails"].error == "RuntimeError: no room" and not outcomes["fails"].results
    assert outcomes["works"].results == [1.0, 1.0, 1.0]


def test_time_per_token_leaves_the_first_step_out():
    from decode_timing import Run

    run = Run(torch.zeros(1, 3), [5.0, 5.1, 5.4], cache_bytes=0, passing_bytes=0)
    assert run.ms_per_token == pytest.approx(200)


def test_bytes_are_counted_by_hand():
    from decode_contenders import SHAPES, Prompt, cache_bytes, make_models, weight_bytes

    shape = SHAPES["tiny"]
    ours, llama = make_models(shape, torch.device("cpu"), torch.float32)
    head = shape.vocab_size * shape.hidden_size
    query = shape.hidden_size * shape.num_attention_heads * shape.head_dim
    key = shape.hidden_size * shape.num_key_value_heads * shape.head_dim
    layer = 2 * query + 2 * key + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    expected = 4 * (head + shape.num_hidden_layers * layer + shape.hidden_size)
    assert weight_bytes(ours) == weight_bytes(llama) == expected

    prompt = Prompt(llama, torch.arange(12).view(2, 6))
    config = llama.config
    assert isinstance(config, LlamaConfig)
    cache = prompt.fill(DynamicCache(config=config), 3)
    tensor = 3 * shape.num_key_value_heads * 5 * shape.head_dim * 4
    assert cache_bytes(cache) == (2 * shape.num_hidden_layers * tensor, tensor)
    torch.testing.assert_close(cache.layers[0].keys[0], cache.layers[0].keys[2])
    assert not torch.equal(cache.layers[0].keys[0], cache.layers[0].keys[1])


def test_quality_with_the_plain_cache_is_what_evaluation_says(small_corpus, small_tokenizer, tmp_path):
    from decode_quality import quality_section
    from decode_timing import Progress

    ids = token_ids(small_tokenizer)
    torch.manual_seed(0)
    model = TercetForCausalLM(
        TercetConfig(
            vocab_size=len(small_tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=32, eos_token_id=ids.eos_token_id, pad_token_id=ids.pad_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    small_tokenizer.save_pretrained(tmp_path)
    data = prepare(
        [Document(text[:600], "topics") for text in small_corpus[:8]], small_tokenizer, tmp_path / DATA_NAME,
        validation_fraction=0.5, split_by="document", drop_duplicates=False, progress=False,
    )  # fmt: skip
    expected = evaluate(
        model, data.validation, sequence_length=32, eos_token_id=ids.eos_token_id, pad_token_id=ids.pad_token_id
    )
    caches = quality_section(tmp_path, 5, torch.device("cpu"), Progress())["caches"]
    assert caches["plain"]["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert abs(caches["int8"]["change"]) < 0.01
