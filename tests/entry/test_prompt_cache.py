"""`tercet generate` with --cache, --compile and --prompt-cache."""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tercet.modeling import GroupedIntegers, TercetCache, TercetConfig, TercetForCausalLM, read_prompt_ids
from tercet.training.samples import document_start

LONG = "The following methods are defined on both string and bytes objects, and return a new object. "
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.3}  # fmt: skip


@pytest.fixture
def folder(untrained):
    torch.manual_seed(0)
    return untrained(TercetForCausalLM(TercetConfig(**SIZES)))


@pytest.fixture
def generate(tercet, fed):
    """Greedy continuation of a prompt; returns what was shown, and how many tokens each call of the model got."""

    def run(folder, prompt, *options):
        fed.clear()
        shown = tercet("generate", folder, prompt, "--temperature", 0, "--max-new-tokens", 12, *options)
        return shown, [len(ids) for ids in fed]

    return run


def ids_of(folder, prompt):
    return document_start(AutoTokenizer.from_pretrained(folder), prompt)


def num_common(folder, first, second):
    pairs = zip(ids_of(folder, first)[0].tolist(), ids_of(folder, second)[0].tolist(), strict=False)
    return next(index for index, (one, other) in enumerate(pairs) if one != other)


@pytest.mark.parametrize("kind", ["full", "int8", "int4"])
def test_a_file_is_written_then_read(generate, folder, tmp_path, kind):
    file, num_prompt = tmp_path / "prompt", ids_of(folder, LONG).shape[1]
    plain, _ = generate(folder, LONG, "--cache", kind)
    wrote, fed_writing = generate(folder, LONG, "--cache", kind, "--prompt-cache", file)
    content = file.read_bytes()
    read, fed_reading = generate(folder, LONG, "--prompt-cache", file)
    assert wrote.code == read.code == 0, read.err
    assert wrote.out == read.out == plain.out
    assert fed_writing == [num_prompt - 1, *[1] * 12]
    assert fed_reading == [1] * 12
    assert f"{num_prompt - 1} of {num_prompt} tokens written to {file}" in wrote.err
    assert f"{num_prompt - 1} of {num_prompt} tokens read from {file}\n" in read.err
    assert file.read_bytes() == content
    saved = TercetCache.load(file, TercetConfig.from_pretrained(folder))
    assert saved.length == num_prompt - 1
    assert saved.quantization == (None if kind == "full" else kind)


def test_a_longer_prompt_extends_the_file(generate, folder, tmp_path):
    file, longer = tmp_path / "prompt", LONG + "Then they return."
    plain, _ = generate(folder, longer)
    generate(folder, LONG, "--prompt-cache", file)
    num_saved = ids_of(folder, LONG).shape[1] - 1
    num_prompt = ids_of(folder, longer).shape[1]
    shown, fed = generate(folder, longer, "--prompt-cache", file)
    assert shown.out == plain.out
    assert fed[0] == num_prompt - 1 - num_saved
    assert f"{num_saved} of {num_prompt} tokens read from {file}, {fed[0]} added to it" in shown.err
    assert torch.equal(read_prompt_ids(file), ids_of(folder, longer)[:, :-1])  # pyright: ignore
    again, fed = generate(folder, longer, "--prompt-cache", file)
    assert again.out == plain.out
    assert set(fed) == {1}


@pytest.mark.parametrize("other", [LONG[:40], LONG[:40] + "are gone, and nobody knows", "Nothing in common"])
def test_another_prompt_leaves_the_file_alone(generate, folder, tmp_path, other):
    file = tmp_path / "prompt"
    plain, _ = generate(folder, other)
    generate(folder, LONG, "--prompt-cache", file)
    content = file.read_bytes()
    shown, fed = generate(folder, other, "--prompt-cache", file)
    assert shown.out == plain.out
    num_prompt = ids_of(folder, other).shape[1]
    num_read = num_prompt - 1 if LONG.startswith(other) else num_common(folder, LONG, other)
    assert sum(fed) == num_prompt - num_read + 11
    assert f"{num_read} of {num_prompt} tokens read" in shown.err
    assert "stays as it is" in shown.err
    assert file.read_bytes() == content


def test_windows_that_have_moved_on_begin_anew(generate, untrained, tmp_path):
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    folder = untrained(TercetForCausalLM(TercetConfig(**SIZES, layer_types=layers, sliding_window=8)))
    file, prompt, other = tmp_path / "prompt", LONG * 3, LONG[:30] + "?"
    plain, plain_other = generate(folder, prompt)[0], generate(folder, other)[0]
    generate(folder, prompt, "--prompt-cache", file)
    content = file.read_bytes()
    same, fed = generate(folder, prompt, "--prompt-cache", file)
    assert same.out == plain.out
    assert set(fed) == {1}
    shown, fed = generate(folder, other, "--prompt-cache", file)
    assert shown.code == 0, shown.err
    assert shown.out == plain_other.out
    assert sum(fed) == ids_of(folder, other).shape[1] + 11
    assert "attention slides" in shown.err
    assert "0 of" in shown.err
    assert file.read_bytes() == content


def test_a_prompt_of_one_token_keeps_nothing(generate, folder, tmp_path):
    plain = generate(folder, "")[0]
    shown, _ = generate(folder, "", "--prompt-cache", tmp_path / "prompt")
    assert shown.code == 0, shown.err
    assert shown.out == plain.out
    assert not (tmp_path / "prompt").exists()


def test_settings_of_a_checkpoint_do_not_turn_the_cache_off(generate, untrained, tmp_path):
    torch.manual_seed(0)
    model = TercetForCausalLM(TercetConfig(**SIZES))
    model.generation_config.use_cache = False  # pyright: ignore
    folder = untrained(model)
    first, fed = generate(folder, LONG, "--prompt-cache", tmp_path / "prompt")
    assert fed[1:] == [1] * 12
    model.generation_config.use_cache = True  # pyright: ignore
    assert generate(untrained(model, "other"), LONG)[0].out == first.out


def test_a_sampled_text_does_not_depend_on_the_file(tercet, folder, tmp_path):
    arguments = ["generate", folder, LONG, "--max-new-tokens", 12, "--seed", 3]
    with_file = [*arguments, "--prompt-cache", tmp_path / "prompt"]
    assert tercet(*arguments).out == tercet(*with_file).out == tercet(*with_file).out


def test_a_file_saved_in_python_is_read(generate, folder, tmp_path):
    model, ids = TercetForCausalLM.from_pretrained(folder).eval(), ids_of(folder, LONG)
    cache = TercetCache(model.config)
    with torch.no_grad():
        model(ids, cache=cache)
    cache.save(tmp_path / "prompt", input_ids=ids, model=model)
    shown, fed = generate(folder, LONG, "--prompt-cache", tmp_path / "prompt")
    assert shown.code == 0, shown.err
    assert fed == [1] * 12
    assert shown.out == generate(folder, LONG)[0].out


@pytest.mark.parametrize("with_file", [False, True])
def test_a_text_longer_than_positions(generate, untrained, tmp_path, with_file):
    """Learned positions end in one clear line, rotary ones go on with a note, whatever a file holds already."""
    options = ["--prompt-cache", tmp_path / "prompt"] if with_file else []
    num_prompt = None
    for kind in ("learned", "rope"):
        config = TercetConfig(**SIZES, position_embedding_type=kind, max_position_embeddings=75)
        torch.manual_seed(0)
        folder = untrained(TercetForCausalLM(config), kind)
        num_prompt = ids_of(folder, LONG[:70]).shape[1]
        assert num_prompt < 63
        (tmp_path / "prompt").unlink(missing_ok=True)
        assert generate(folder, LONG[:70], *options)[0].code == 0
        shown, fed = generate(folder, LONG[:70], *options, "--max-new-tokens", 76 - num_prompt)
        if kind == "learned":
            assert shown.code == 2
            assert f"ask for at most {75 - num_prompt}" in shown.err
            assert not fed
        else:
            assert shown.code == 0, shown.err
            assert "76 tokens is longer than the 75" in shown.err


def test_the_kind_of_cache_is_used(generate, folder, monkeypatch):
    bits, encode = set(), GroupedIntegers.encode
    monkeypatch.setattr(GroupedIntegers, "encode", lambda codec, states: bits.add(codec.bits) or encode(codec, states))
    assert generate(folder, LONG)[0].code == 0
    assert bits == set()
    assert generate(folder, LONG, "--cache", "int4")[0].code == 0
    assert bits == {4}


def test_compile_makes_each_token_by_the_compiled_step(generate, folder, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(
        "tercet.modeling.decode_tercet._compile", lambda step: lambda *arguments: steps.append(1) or step(*arguments)
    )
    plain = generate(folder, LONG)[0]
    shown, _ = generate(folder, LONG, "--compile")
    assert shown.out == plain.out
    assert len(steps) == 11
    assert "half a minute" in shown.err
    for _ in range(2):
        steps.clear()
        shown, _ = generate(folder, LONG, "--compile", "--prompt-cache", tmp_path / "prompt")
        assert shown.out == plain.out
        assert len(steps) >= 11


@pytest.mark.slow
def test_compiled_for_real(generate, folder):
    assert generate(folder, LONG, "--compile")[0].out == generate(folder, LONG)[0].out


def test_a_machine_without_a_compiler_says_so(generate, folder, monkeypatch):
    def fail(*arguments):
        from torch._dynamo.exc import BackendCompilerFailed

        raise BackendCompilerFailed(lambda: None, RuntimeError("no C++ compiler"), None)

    monkeypatch.setattr("tercet.modeling.decode_tercet._compile", lambda step: fail)
    shown, _ = generate(folder, LONG, "--compile")
    assert shown.code == 2
    assert "no C++ compiler" in shown.err
    assert shown.err.splitlines()[-1].endswith("leave it out")
