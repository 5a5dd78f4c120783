"""A cache read back goes on as if it had never left, and a file that does not fit says what and why."""

import json
import os
import resource
import subprocess
import sys
import zlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercet.modeling import (
    TercetCache,
    TercetForCausalLM,
    cache_files_tercet,
    count_common_tokens,
    fingerprint,
    read_prompt_ids,
)


@pytest.fixture
def path(tmp_path):
    """Where the file goes."""
    return tmp_path / "prompt.cache"


@pytest.fixture
def ids(make_ids):
    """Two prompts of twelve tokens."""
    return make_ids(2, 12)


@torch.no_grad()
def prefill(model, ids, quantization=None):
    cache = TercetCache(model.config, quantization=quantization)
    model(ids, cache=cache)
    return cache


@pytest.fixture
def saved(modern_model, ids, path):
    """A file with prompt and fingerprint."""
    prefill(modern_model, ids).save(path, input_ids=ids, model=modern_model)
    return path


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@torch.no_grad()
def test_logits_after_loading_are_equal(model, ids, path, make_ids, quantization):
    cache = prefill(model, ids, quantization)
    cache.save(path, input_ids=ids, model=model)
    loaded = TercetCache.load(path, model.config, input_ids=ids, model=model)
    assert (loaded.length, loaded.quantization) == (12, quantization)
    for seed in range(8):
        token = make_ids(2, 1, seed=seed)
        assert torch.equal(model(token, cache=loaded).logits, model(token, cache=cache).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_dtypes_survive(modern_model, ids, path, dtype):
    model = modern_model.to(dtype)
    cache = prefill(model, ids)
    cache.save(path)
    loaded = TercetCache.load(path, model.config)
    assert torch.equal(model(ids[:, :1], cache=loaded).logits, model(ids[:, :1], cache=cache).logits)


@torch.no_grad()
def test_a_fork_is_saved_with_all_its_rows(modern_model, ids, path, make_ids):
    fork = prefill(modern_model, ids).fork(2)
    modern_model(make_ids(4, 3), cache=fork)
    fork.save(path)
    loaded = TercetCache.load(path, modern_model.config)
    for ours, theirs in zip(fork.layers, loaded.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_an_empty_cache_is_saved_and_loaded(modern_model, path):
    TercetCache(modern_model.config).save(path)
    assert TercetCache.load(path, modern_model.config).length == 0


def test_loading_to_a_device(modern_model, saved):
    loaded = TercetCache.load(saved, modern_model.config, device="meta")
    assert loaded.layers[0].keys.device.type == "meta"


@torch.no_grad()
def test_a_prompt_that_goes_on_otherwise_is_cropped_to_what_is_common(modern_model, saved, ids):
    """What `tercet generate --prompt-cache` does."""
    other = torch.cat([ids[:, :7], (ids[:, 7:] + 1) % 97], dim=1)
    prompt = read_prompt_ids(saved)
    assert prompt is not None
    num_common = count_common_tokens(prompt, other)
    assert num_common == 7
    cache = TercetCache.load(saved, modern_model.config, model=modern_model)
    cache.crop(num_common - cache.length)
    got = modern_model(other[:, num_common:], cache=cache).logits
    torch.testing.assert_close(got, modern_model(other).logits[:, num_common:], rtol=0, atol=2e-5)


def test_the_prompt_can_be_read(saved, ids):
    prompt = read_prompt_ids(saved)
    assert prompt is not None
    assert torch.equal(prompt, ids)


def test_tokens_beyond_the_cache_are_not_saved(modern_model, ids, path):
    prefill(modern_model, ids[:, :-1]).save(path, input_ids=ids)
    prompt = read_prompt_ids(path)
    assert prompt is not None
    assert torch.equal(prompt, ids[:, :-1])


def test_common_tokens_are_those_of_all_rows():
    first = torch.tensor([[1, 2, 3], [1, 2, 3]])
    assert count_common_tokens(first, first) == 3
    assert count_common_tokens(first, first[:, :2]) == 2
    assert count_common_tokens(first, torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4]])) == 1
    assert count_common_tokens(first, first + 1) == 0


def test_a_prompt_too_short_for_the_cache_is_refused(modern_model, ids, path):
    with pytest.raises(ValueError, match="holds 12 positions"):
        prefill(modern_model, ids).save(path, input_ids=ids[:, :5])
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:, :5], r"at token 5 the file has \[\d+, \d+\] and input_ids ends"),
        (lambda ids: torch.cat([ids[:, :3], 96 - ids[:, 3:]], dim=1), "at token 3 the file has"),
        (lambda ids: ids[:1], r"shape \(2, 12\) and input_ids is \(1, 12\)"),
    ],
    ids=["shorter", "different", "rows"],
)
def test_another_prompt_is_refused(modern_model, saved, ids, change, message):
    with pytest.raises(ValueError, match=message) as raised:
        TercetCache.load(saved, modern_model.config, input_ids=change(ids))
    assert str(saved) in str(raised.value)
    TercetCache.load(saved, modern_model.config, input_ids=torch.cat([ids, ids], dim=1))


def test_other_weights_are_refused(modern_model, saved):
    with torch.no_grad():
        modern_model.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    with pytest.raises(ValueError, match="made by other weights"):
        TercetCache.load(saved, modern_model.config, model=modern_model)


def test_what_the_file_does_not_know_is_not_assumed(modern_model, ids, path):
    prefill(modern_model, ids).save(path)
    assert read_prompt_ids(path) is None
    with pytest.raises(ValueError, match="without a fingerprint"):
        TercetCache.load(path, modern_model.config, model=modern_model)
    with pytest.raises(ValueError, match="without its prompt"):
        TercetCache.load(path, modern_model.config, input_ids=ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 2), ("num_key_value_heads", 4), ("vocab_size", 98), ("qk_norm", False)],
)
def test_another_architecture_is_refused(modern_model, saved, field, value):
    settings = {**modern_model.config.to_dict(), field: value, "layer_types": None}
    other = type(modern_model.config)(**{name: settings[name] for name in settings if name != "model_type"})
    with pytest.raises(ValueError, match=f"another model: .*{field}.*{value} in the model") as raised:
        TercetCache.load(saved, other)
    assert str(saved) in str(raised.value)
    with pytest.raises(ValueError, match=f"made for another model: .*{field}"):
        TercetCache(modern_model.config).check_matches(other)


def test_a_matching_config_passes(modern_model):
    cache = TercetCache(modern_model.config)
    cache.check_matches(modern_model.config)
    cache.check_matches(type(modern_model.config)(**modern_model.config.to_dict()))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99, "one byte less"])
def test_a_torn_file_is_refused(modern_model, saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: -1 if isinstance(share, str) else int(len(content) * share)])
    with pytest.raises(ValueError, match=r"prompt\.cache is torn"):
        TercetCache.load(saved, modern_model.config)


def test_a_damaged_file_is_refused(modern_model, saved):
    content = bytearray(saved.read_bytes())
    content[-100] ^= 1
    saved.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        TercetCache.load(saved, modern_model.config)


def test_no_changed_byte_of_the_header_goes_unseen(modern_model, saved):
    content = saved.read_bytes()
    for position in range(0, 8 + int.from_bytes(content[:8], "little"), 3):
        changed = bytearray(content)
        changed[position] ^= 1
        saved.write_bytes(changed)
        with pytest.raises(ValueError, match=r"prompt\.cache (is|has)"):
            TercetCache.load(saved, modern_model.config)


def test_a_missing_part_is_refused(modern_model, saved):
    with cache_files_tercet.safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    del tensors["layers.1.keys"]
    save_file(tensors, saved, metadata=metadata)
    with pytest.raises(ValueError, match="is damaged"):
        TercetCache.load(saved, modern_model.config)


def test_other_files_are_refused(modern_model, path):
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="no cache file"):
        TercetCache.load(path, modern_model.config)
    path.write_text("hello" * 100)
    with pytest.raises(ValueError, match="torn, or no cache file"):
        TercetCache.load(path, modern_model.config)
    with pytest.raises(FileNotFoundError):
        TercetCache.load(path.with_name("absent"), modern_model.config)


def test_a_later_version_is_refused(modern_model, path):
    text = json.dumps({"version": 99})
    save_file({}, path, metadata={"tercet_cache": f"{text} {zlib.crc32(text.encode())}"})
    with pytest.raises(ValueError, match="format version 99"):
        TercetCache.load(path, modern_model.config)


@pytest.mark.parametrize(("module", "function"), [(cache_files_tercet, "save_file"), (os, "replace"), (os, "fsync")])
def test_a_failing_write_leaves_the_old_file(modern_model, saved, ids, monkeypatch, module, function):
    before = saved.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, function, fail)
    with pytest.raises(OSError, match="No space left"):
        prefill(modern_model, ids[:, :3]).save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


FULL_DISK = """
import resource, signal, sys, torch
from tercet.modeling import TercetCache, TercetConfig
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cache = TercetCache(TercetConfig.modern(vocab_size=11, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
cache.update(*[torch.ones(1, 2, 4000, 16)] * 2, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
cache.save(sys.argv[1])
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit of file sizes")
def test_a_disk_that_fills_leaves_the_old_file(saved):
    before = saved.read_bytes()
    done = subprocess.run([sys.executable, "-c", FULL_DISK, saved], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_fingerprints(modern_model):
    again: Any = TercetForCausalLM(modern_model.config)
    again.load_state_dict(modern_model.state_dict())
    assert fingerprint(again) == fingerprint(modern_model)
    assert fingerprint(again.to(torch.bfloat16)) != fingerprint(modern_model)


def test_a_cache_without_a_config_cannot_be_saved_or_forked(path):
    states = torch.zeros(1, 2, 3, 4)
    gathered = TercetCache([(states, states)])  # type: ignore
    with pytest.raises(ValueError, match="not made from a config"):
        gathered.save(path)
    with pytest.raises(ValueError, match="not made from a config"):
        gathered.fork()
