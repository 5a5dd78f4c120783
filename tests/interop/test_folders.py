"""Checkpoint folders in and out: everything travels, what is damaged is one line, nothing is left half-written."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, LlamaConfig, LlamaForCausalLM

from tercet.interop import export_checkpoint, import_checkpoint
from tercet.interop.table import VARIANTS, ask, native_model
from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.errors import UserError
from tercet.training.export import check_loads_without_tercet

_TEXT = "Hello, world! 12345\n\n\tif x != 0: été 日本 👩‍👩‍👧 <|endoftext|>"
_WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def native_folder(small_tokenizer, tmp_path_factory) -> Path:
    """A small Llama with tokenizer, chat template and generation settings. Shared: a test that changes it copies it."""
    folder = tmp_path_factory.mktemp("native") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.1,
        bos_token_id=None, eos_token_id=small_tokenizer.eos_token_id, pad_token_id=small_tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.update(do_sample=True, temperature=0.3, top_p=0.8)
    model.save_pretrained(folder)
    small_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def imported(native_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "tercet"
    import_checkpoint(native_folder, folder)
    return folder


@pytest.fixture(scope="module")
def exported(imported, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "llama"
    export_checkpoint(imported, folder, "llama")
    return folder


@pytest.fixture
def broken(native_folder, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(native_folder, tmp_path / "broken"))


def change_json(path: Path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **fields}), encoding="utf-8")


# --- what travels


def test_weights_come_back_bit_for_bit(native_folder, exported):
    before, after = load_file(native_folder / _WEIGHTS), load_file(exported / _WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


def test_tokenizer_and_chat_template_travel(native_folder, imported, exported):
    expected = AutoTokenizer.from_pretrained(native_folder)
    messages = [{"role": "user", "content": "Hi"}]
    for folder in (imported, exported):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer(_TEXT)["input_ids"] == expected(_TEXT)["input_ids"]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == expected.apply_chat_template(
            messages, tokenize=False
        )
        assert (folder / "tokenizer.json").read_bytes() == (native_folder / "tokenizer.json").read_bytes()


def test_generation_settings_travel(native_folder, imported, exported):
    written = (native_folder / "generation_config.json").read_bytes()
    assert (imported / "generation_config.json").read_bytes() == written
    assert AutoModelForCausalLM.from_pretrained(exported).generation_config.temperature == 0.3


def test_settings_that_transformers_reads_and_refuses_to_write_travel(broken, tmp_path):
    (broken / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}')
    import_checkpoint(broken, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6


def test_exported_folder_is_plain_transformers(exported):
    assert json.loads((exported / "config.json").read_text())["model_type"] == "llama"
    assert not list(exported.glob("*.py"))
    check = check_loads_without_tercet(exported, "Hello", max_new_tokens=4)
    assert check.model_class == "transformers.models.llama.modeling_llama.LlamaForCausalLM"


def test_imported_folder_loads_as_remote_code_without_tercet(imported):
    check = check_loads_without_tercet(imported, "Hello", max_new_tokens=4)
    assert check.model_class.startswith("transformers_modules.")
    assert check.model_class.endswith("TercetForCausalLM")


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen2", "qwen3", "smollm3"])
def test_every_family_through_folders(family, tmp_path):
    """Without a tokenizer; sharded on the way in."""
    native = native_model(family, next(fields for kind, _, fields in VARIANTS if kind == family))
    native.save_pretrained(tmp_path / "native", max_shard_size="20KB")
    assert (tmp_path / "native" / "model.safetensors.index.json").is_file()
    written = import_checkpoint(tmp_path / "native", tmp_path / "ours")
    assert (written.model_class, written.has_tokenizer) == ("TercetForCausalLM", False)
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(native)
    assert torch.equal(ask(back).tokens, ask(native).tokens)


def test_a_native_checkpoint_is_exported_as_another_family(native_folder, tmp_path):
    export_checkpoint(native_folder, tmp_path / "mistral", "mistral")
    one, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in (native_folder, tmp_path / "mistral"))
    ids = torch.arange(3, 20).unsqueeze(0)
    assert other.config.model_type == "mistral"
    assert torch.equal(one(ids).logits, other(ids).logits)


def test_a_tokenizer_whose_files_name_no_class_is_written_so_that_they_do(native_folder, tmp_path):
    """The class is then guessed from the model's type; GPT-2's adds a pre-tokenizer of its own."""
    source = tmp_path / "gpt2"
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", *map(chr, range(33, 127)), "Ġ", "he", "Ċ", "hel"])}
    tokenizer = GPT2Tokenizer(vocab=vocab, merges=[("h", "e"), ("he", "l")])
    native_model("gpt2", {**VARIANTS[0][2], "vocab_size": 128}).save_pretrained(source)
    tokenizer.save_pretrained(source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    import_checkpoint(source, tmp_path / "out")
    expected, written = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    assert written("hello he\nhel")["input_ids"] == expected("hello he\nhel")["input_ids"]
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert check_loads_without_tercet(tmp_path / "out", "hello", max_new_tokens=2).greedy is not None


def test_files_are_as_readable_as_others(imported, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert imported.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert (imported / _WEIGHTS).stat().st_mode == (tmp_path / "other" / "file").stat().st_mode


# --- bad input


def _truncate(folder: Path) -> None:
    path = folder / _WEIGHTS
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garble(folder: Path) -> None:
    (folder / _WEIGHTS).write_bytes(b"\x00" * 100 + b"not a safetensors file")


def _change_tensors(change):
    def apply(folder: Path) -> None:
        tensors = load_file(folder / _WEIGHTS)
        change(tensors)
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})

    return apply


def _drop(tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]


def _add(tensors) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)


def _reshape(tensors) -> None:
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 32)


def _shorten_embedding(tensors) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:1000].clone()


def _small_vocabulary(folder: Path) -> None:
    _change_tensors(_shorten_embedding)(folder)
    change_json(folder / "config.json", vocab_size=1000)


BROKEN = {
    "truncated": (_truncate, "does not load"),
    "corrupt": (_garble, "does not load"),
    "no weights": (lambda folder: (folder / _WEIGHTS).unlink(), "does not load"),
    "missing": (_change_tensors(_drop), "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight"),
    "left over": (_change_tensors(_add), "1 left over: model.layers.2.mlp.up_proj.weight"),
    "another shape": (
        _change_tensors(_reshape),
        "1 of another shape: model.layers.0.self_attn.k_proj.weight [8, 32] instead of [16, 32]",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "there is no config.json"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is no model config"),
    "unknown family": (
        lambda folder: change_json(folder / "config.json", model_type="mamba"),
        "is of family 'mamba'; known are gpt2, llama",
    ),
    "no language model": (
        lambda folder: change_json(folder / "config.json", architectures=["LlamaForSequenceClassification"]),
        "a causal language model is needed",
    ),
    "impossible config": (
        lambda folder: change_json(folder / "config.json", num_attention_heads="four"),
        "num_attention_heads",
    ),
    "tokenizer larger than the embedding": (_small_vocabulary, "its tokenizer is larger than the embedding"),
    "tokenizer is damaged": (
        lambda folder: (folder / "tokenizer.json").write_text('{"version": 1'),
        "its tokenizer does not load",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_bad_input_is_one_error_and_nothing_is_written(what, broken, tmp_path):
    damage, said = BROKEN[what]
    damage(broken)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as caught:
        import_checkpoint(broken, tmp_path / "out")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_family_cannot_express_leaves_nothing(tmp_path):
    config = TercetConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    TercetForCausalLM(config).save_pretrained(tmp_path / "ours")
    with pytest.raises(UserError, match="llama cannot express this model: qk_norm is True"):
        export_checkpoint(tmp_path / "ours", tmp_path / "out", "llama")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_refused_export_names_what_would_work(tmp_path, capsys, monkeypatch):
    config = TercetConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    TercetForCausalLM(config).save_pretrained(tmp_path / "ours")
    export = ("export", tmp_path / "ours", tmp_path / "out")
    code, _, err = run(capsys, monkeypatch, *export, "--to", "llama")
    assert code == 2
    remedy = "--to qwen3 can. A model trained with --set model.qk_norm=false can be exported --to llama."
    assert " ".join(err.split()).endswith(remedy)
    TercetForCausalLM(config.__class__(**{**config.to_dict(), "qk_norm": False})).save_pretrained(tmp_path / "llama")
    code, out, _ = run(capsys, monkeypatch, "export", tmp_path / "llama", tmp_path / "out", "--to", "llama")
    assert code == 0 and "LlamaForCausalLM" in out
    code, _, err = run(capsys, monkeypatch, "export", tmp_path / "ours", tmp_path / "no", "--to", "gpt2")
    assert code == 2
    assert "--to qwen3 can." in err and "--to gpt2." not in err  # queries' norms are not all that stands in the way


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_taken_destination_is_refused_and_left_alone(kind, native_folder, imported, tmp_path):
    taken = tmp_path / "out"
    if kind == "folder":
        taken.mkdir()
        (taken / "mine").write_text("mine")
    else:
        taken.write_text("mine")
    for convert, source in ((import_checkpoint, native_folder), (export_checkpoint, imported)):
        with pytest.raises(UserError, match="exists and is not an empty folder"):
            convert(source, taken)
    assert (taken / "mine" if kind == "folder" else taken).read_text() == "mine"


def test_an_empty_destination_is_filled(native_folder, tmp_path):
    (tmp_path / "out").mkdir()
    import_checkpoint(native_folder, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_full_disk_leaves_nothing(native_folder, tmp_path, monkeypatch):
    def fail(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tercet.interop.folders.write_tokenizer", fail)
    with pytest.raises(OSError, match="No space left"):
        import_checkpoint(native_folder, tmp_path / "deep" / "out")
    assert not list((tmp_path / "deep").iterdir())


def test_a_tercet_checkpoint_is_not_imported_again(imported, tmp_path):
    with pytest.raises(UserError, match="is a Tercet checkpoint already"):
        import_checkpoint(imported, tmp_path / "out")


# --- commands


def run(capsys, monkeypatch, *arguments) -> tuple[int, str, str]:
    from tercet.cli import main

    monkeypatch.setattr(sys, "argv", ["tercet", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


def test_commands(native_folder, tmp_path, capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "import", native_folder, tmp_path / "ours")
    assert code == 0
    assert "TercetForCausalLM" in out
    code, out, _ = run(capsys, monkeypatch, "export", tmp_path / "ours", tmp_path / "back")
    assert code == 0
    assert "LlamaForCausalLM" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "bloom"], "--to bloom is not known: choose one of gpt2, llama"),
        (["--to", "llama", "--type", "f16"], "--type is for --to gguf only"),
        (["--to", "gguf", "--type", "q2_k"], "--type q2_k is not supported"),
        (
            ["--to", "qwen3"],
            "qwen3 cannot express this model: qk_norm is False and qwen3 has only True. --to llama can.",
        ),
    ],
)
def test_commands_refuse_in_one_line(options, said, imported, tmp_path, capsys, monkeypatch):
    code, _, err = run(capsys, monkeypatch, "export", imported, tmp_path / "out", *options)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
