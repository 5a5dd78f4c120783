"""What is saved comes back with the same bits: by class, by the Auto classes, and as remote code without Tercet."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from tercet.modeling import (
    TercetConfig,
    TercetForCausalLM,
    TercetForQuestionAnswering,
    TercetForSequenceClassification,
    TercetForTokenClassification,
    TercetModel,
    configuration_tercet,
)

HEADS = {
    "CausalLM": TercetForCausalLM,
    "QuestionAnswering": TercetForQuestionAnswering,
    "SequenceClassification": TercetForSequenceClassification,
    "TokenClassification": TercetForTokenClassification,
}
CODE_FILES = {path.name for path in Path(configuration_tercet.__file__).parent.glob("*_tercet.py")}


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_same_bits_by_class_and_through_auto_classes(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert_same_weights(model, TercetForCausalLM.from_pretrained(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is TercetForCausalLM
    assert_same_weights(model, loaded)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    assert_same_weights(model.model, AutoModel.from_pretrained(tmp_path))


def test_same_logits_after_loading(model, tmp_path, make_ids):
    """Buffers that are not saved, such as rotary frequencies, are made anew with the same values."""
    model.save_pretrained(tmp_path)
    ids = make_ids(1, 9)
    assert torch.equal(TercetForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_sharded_weights_come_back(modern_model, tmp_path):
    modern_model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_weights(modern_model, TercetForCausalLM.from_pretrained(tmp_path))


def test_half_precision_is_kept_by_auto_dtype(modern_model, tmp_path):
    modern_model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("head_class", [TercetModel, *HEADS.values()])
def test_every_head_comes_back(modern_model, tmp_path, head_class):
    model = head_class(modern_model.config)
    model.save_pretrained(tmp_path)
    assert_same_weights(model, head_class.from_pretrained(tmp_path))


def test_a_classifier_starts_from_the_language_models_weights(modern_model, tmp_path):
    modern_model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert_same_weights(classifier.model, modern_model.model)
    assert classifier.score.weight.shape == (3, modern_model.config.hidden_size)


class Reinitialised(TercetForCausalLM):
    """A user's subclass that initialises the way much code on the Hub does."""

    def _init_weights(self, module):
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.weight.data.normal_(mean=5.0, std=0.1)


@pytest.mark.parametrize("config", ["no_rope"], indirect=True)  # its head is not tied
def test_a_subclass_that_initialises_in_place_keeps_loaded_weights(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert_same_weights(model, Reinitialised.from_pretrained(tmp_path))
    # Its own initialisation does run where there is nothing to load.
    assert Reinitialised(model.config).lm_head.weight.mean() > 4


def test_projections_into_the_residual_stream_start_small():
    """GPT-2, section 2.3: divided by the square root of the number of additions to the stream."""
    config = TercetConfig(vocab_size=64, hidden_size=256, num_hidden_layers=8, num_attention_heads=4)
    model = TercetForCausalLM(config)
    for layer in model.model.layers:
        for small in (layer.self_attn.o_proj, layer.mlp.down_proj):
            assert small.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        for usual in (layer.self_attn.q_proj, layer.mlp.up_proj):
            assert usual.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)


class TestTiedWeights:
    def test_saved_once(self, modern_model, tmp_path):
        modern_model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118 - no mapping
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118

    def test_tied_after_loading_training_and_saving_again(self, modern_model, tmp_path, make_ids):
        modern_model.save_pretrained(tmp_path / "first")
        loaded = TercetForCausalLM.from_pretrained(tmp_path / "first")  # built on the meta device, then filled
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
        ids = make_ids(2, 8)
        loaded(ids, labels=ids).loss.backward()
        optimizer.step()
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert not torch.equal(loaded.lm_head.weight, modern_model.lm_head.weight)
        loaded.save_pretrained(tmp_path / "second")
        again = TercetForCausalLM.from_pretrained(tmp_path / "second")
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert_same_weights(again, loaded)


WITHOUT_TERCET = """
import json, sys

class NoTercet:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tercet":
            raise ModuleNotFoundError("tercet is blocked")

sys.meta_path.insert(0, NoTercet())
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

folder, ids = sys.argv[1], torch.tensor([json.loads(sys.argv[2])])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
assert torch.equal(base.embed_tokens.weight, model.model.embed_tokens.weight)
classifier = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=3)
assert torch.equal(classifier.model.embed_tokens.weight, model.model.embed_tokens.weight)
assert "tercet" not in sys.modules
model.save_pretrained(sys.argv[3])
torch.save(model(ids).logits.detach(), sys.argv[3] + "/logits.pt")
print(json.dumps(model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)[0].tolist()))
"""


def run_without_tercet(folder, ids, again, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TERCET, str(folder), json.dumps(ids[0].tolist()), str(again)],
        capture_output=True, text=True, env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1]), torch.load(again / "logits.pt", weights_only=True)


@pytest.mark.parametrize("config", ["modern", "classic"], indirect=True)
def test_remote_code_in_a_process_without_tercet(model, make_ids, tmp_path):
    ids = make_ids(1, 6)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)[0].tolist()
    model.save_pretrained(tmp_path / "first")
    assert {path.name for path in (tmp_path / "first").iterdir()} >= CODE_FILES
    tokens, logits = run_without_tercet(tmp_path / "first", ids, tmp_path / "second", tmp_path)
    assert tokens == expected
    assert torch.equal(logits, model(ids).logits)
    # What that process saved is a whole folder again, and so is what the package makes of it.
    assert {path.name for path in (tmp_path / "second").iterdir()} >= CODE_FILES
    TercetForCausalLM.from_pretrained(tmp_path / "second").save_pretrained(tmp_path / "third")
    assert run_without_tercet(tmp_path / "third", ids, tmp_path / "fourth", tmp_path)[0] == expected


# Loads every folder as a stranger would, compares it with what the package saw, and saves it again.
STRANGER = """
import json, sys

class NoTercet:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tercet":
            raise ModuleNotFoundError("tercet is blocked")

sys.meta_path.insert(0, NoTercet())
import torch, transformers

def load(auto_class, folder):
    model, info = getattr(transformers, auto_class).from_pretrained(
        folder, trust_remote_code=True, dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), (folder, info)
    return model

def check(model, folder, expected):
    state = model.state_dict()
    assert state.keys() == expected["state"].keys(), folder
    for name, tensor in expected["state"].items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), (folder, name)
    with torch.no_grad():
        # Weights mapped from a file lie elsewhere, and a product may add its terms in another order there.
        torch.testing.assert_close(model(expected["ids"])[0], expected["output"], rtol=1e-5, atol=1e-5, msg=folder)

for folder, auto_class, shard_size in json.loads(sys.argv[1]):
    expected = torch.load(folder + "/expected.pt", weights_only=True)
    model = load(auto_class, folder)
    check(model, folder, expected)
    model.save_pretrained(folder + "/again", max_shard_size=shard_size)
    again = load(auto_class, folder + "/again")
    check(again, folder + "/again", expected)
    # A class that no Auto class has handed out, and a subclass of one that was.
    siblings = sys.modules[type(model).__module__]
    for name, other in (
        ("sibling", siblings.TercetForTokenClassification(model.config)),
        ("subclass", type("Mine", (type(model),), {"__module__": "json"})(model.config)),
    ):
        other.save_pretrained(folder + "/" + name)
assert "tercet" not in sys.modules
"""


def saved_as_a_stranger_will_check(model, folder, ids, **settings):
    """Save, and note beside it what a process without the package must find."""
    model.save_pretrained(folder, **settings)
    with torch.no_grad():
        output = model(ids)[0]
    torch.save({"ids": ids, "state": model.state_dict(), "output": output}, folder / "expected.pt")


def run_stranger(folders, tmp_path):
    tasks = [[str(folder), auto_class, shard_size] for folder, auto_class, shard_size in folders]
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, json.dumps(tasks)],
        capture_output=True, text=True, env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_stranger_loads_whatever_was_saved_and_saves_it_again(modern_model, make_ids, tmp_path):
    """Every head, precision and size, sharded or not, a subclass: each folder is whole. One process, as it is slow."""
    config, ids = modern_model.config, make_ids(2, 7)
    folders = []

    def add(name, model, auto_class="AutoModelForCausalLM", again_in="1GB", **settings):
        saved_as_a_stranger_will_check(model, tmp_path / name, ids, **settings)
        folders.append((tmp_path / name, auto_class, again_in))

    add("base", TercetModel(copy.deepcopy(config)), "AutoModel")
    for task, head_class in HEADS.items():
        add(task, head_class(copy.deepcopy(config)), f"AutoModelFor{task}")
    add("sharded", copy.deepcopy(modern_model), max_shard_size="10KB")
    add("sharded_later", copy.deepcopy(modern_model), again_in="10KB")
    add("half", copy.deepcopy(modern_model).half())
    add("bfloat16", copy.deepcopy(modern_model).bfloat16(), again_in="10KB")
    resized = copy.deepcopy(modern_model)
    resized.resize_token_embeddings(config.vocab_size + 7, mean_resizing=False)
    add("resized", resized)
    untied = copy.deepcopy(config)
    untied.tie_word_embeddings = False
    add("untied", TercetForCausalLM(untied))
    add("subclass", Reinitialised(copy.deepcopy(config)))
    add("loaded_by_the_package", TercetForCausalLM.from_pretrained(tmp_path / "sharded"))
    run_stranger(folders, tmp_path)

    for folder, auto_class, shard_size in folders:
        again = folder / "again"
        assert len(list(again.glob("*.safetensors"))) > 1 or shard_size == "1GB"
        for path in (folder, again, folder / "sibling", folder / "subclass"):
            assert_whole(path)
        expected = torch.load(folder / "expected.pt", weights_only=True)["state"]
        loaded = getattr(transformers, auto_class).from_pretrained(again, dtype="auto")
        assert type(loaded).__module__.startswith("tercet.")
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.items())


def assert_whole(folder):
    """All of the code is in the folder, and each Auto class finds its class there."""
    assert {path.name for path in folder.glob("*.py")} == CODE_FILES
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map.keys() == {"AutoConfig", "AutoModel", *(f"AutoModelFor{task}" for task in HEADS)}
    for reference in auto_map.values():
        module, _, name = reference.partition(".")
        assert f"class {name}(" in (folder / f"{module}.py").read_text()


def test_a_config_saved_by_itself_carries_the_code(modern_model, tmp_path):
    modern_model.config.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == CODE_FILES


def test_a_subclass_that_registers_itself_ships_its_own_file(modern_model, tmp_path):
    """What `register_for_auto_class` is for, asked for by name."""

    class Registered(TercetForCausalLM):
        pass

    Registered.register_for_auto_class("AutoModelForCausalLM")
    Registered(modern_model.config).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {*CODE_FILES, "test_saving.py"}
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForCausalLM"] == "test_saving.Registered"
    assert auto_map["AutoModel"] == "modeling_tercet.TercetModel"
