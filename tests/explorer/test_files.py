"""A saved trace comes back equal, or is refused in one line."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from traced_models import make_model

from tercet.explorer import Sampling, load_trace, save_trace, trace
from tercet.training.errors import UserError


@pytest.fixture(scope="module")
def saved(record, tmp_path_factory):
    return save_trace(record("llama").trace, tmp_path_factory.mktemp("traces") / "new" / "llama")


def are_equal(left, right):
    fields = [field.name for field in dataclasses.fields(left) if field.name != "activations"]
    assert all(getattr(left, name) == getattr(right, name) for name in fields)
    for name, tensor in vars(left.activations).items():
        other = getattr(right.activations, name)
        assert (tensor is None) == (other is None)
        assert tensor is None or (tensor.dtype == other.dtype and torch.equal(tensor, other))
    return True


@pytest.mark.parametrize("kind", ["llama", "tercet-mixed", "tercet-classic", "openai-gpt", "mixtral"])
def test_comes_back_equal(record, tmp_path, kind):
    run = record(kind).trace
    save_trace(run, tmp_path / "trace")
    assert are_equal(run, load_trace(tmp_path / "trace"))


def test_sampled_of_one_token_comes_back_equal(small_tokenizer, tmp_path):
    tokenizer = small_tokenizer
    run = trace(make_model("gpt2"), tokenizer, "The", new_tokens=1, timing_s=0.0,
                sampling=Sampling(temperature=1.5, top_k=None, top_p=0.9, seed=4))  # fmt: skip
    assert are_equal(run, load_trace(save_trace(run, tmp_path)))


def test_replaces_an_earlier_one_and_nothing_else(record, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    save_trace(record("tercet-modern").trace, tmp_path)
    save_trace(record("llama").trace, tmp_path)
    assert load_trace(tmp_path).model.model_type == "llama"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["activations.safetensors", "notes.txt", "trace.json"]


class TestRefused:
    @pytest.fixture
    def folder(self, saved, tmp_path):
        return shutil.copytree(saved, tmp_path / "trace")

    @staticmethod
    def refuse(folder, *words):
        with pytest.raises(UserError) as refused:
            load_trace(folder)
        for word in (str(folder), *words):
            assert word in str(refused.value)
        assert "\n" not in str(refused.value)

    @staticmethod
    def change(folder, **changes):
        path = folder / "trace.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def test_no_folder(self, tmp_path):
        self.refuse(tmp_path / "nowhere", "no trace")

    def test_no_trace(self, tmp_path):
        self.refuse(tmp_path, "no trace", "--save-trace")

    def test_another_version(self, folder):
        self.change(folder, format=1)
        self.refuse(folder, "format 1", "reads 4")

    @pytest.mark.parametrize("name", ["trace.json", "activations.safetensors"])
    @pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
    def test_torn(self, folder, name, share):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])
        self.refuse(folder, "damaged")

    def test_no_tensors(self, folder):
        (folder / "activations.safetensors").unlink()
        self.refuse(folder, "damaged")

    def test_tensors_of_another_run(self, folder, record, tmp_path):
        other = save_trace(record("qwen3").trace, tmp_path / "other")
        shutil.copy(other / "activations.safetensors", folder)
        self.refuse(folder, "another trace")

    def test_a_needed_tensor_is_not_there(self, folder):
        tensors = load_file(folder / "activations.safetensors")
        del tensors["logits"]
        save_file(tensors, folder / "activations.safetensors")
        self.change(folder, activations={name: list(tensor.shape) for name, tensor in tensors.items()})
        self.refuse(folder, "logits is missing")

    @pytest.mark.parametrize(
        "changes",
        [{"tokens": 3}, {"prompt": 3}, {"model": []}, {"prefill": {"flops": 1}}, {"losses": ["x"]}, {"more": 1}],
    )
    def test_other_content(self, folder, changes):
        self.change(folder, **changes)
        self.refuse(folder, "damaged")

    @pytest.mark.parametrize("content", ["", "[]", "3", "null", "{}", '{"format": 4}', "\udcff"])
    def test_no_record(self, folder, content):
        (folder / "trace.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        self.refuse(folder)

    def test_a_place_where_no_folder_can_be(self, record, tmp_path):
        (tmp_path / "file").write_text("mine")
        for place in (tmp_path / "file", tmp_path / "file" / "trace"):
            with pytest.raises(UserError, match="cannot be written"):
                save_trace(record("llama").trace, place)
        assert (tmp_path / "file").read_text() == "mine"
