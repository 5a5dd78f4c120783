"""A finished run is a folder that others can use, and a folder that is someone else's is left alone."""

import json
import re

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from tercet.training.errors import UserError
from tercet.training.export import check_loads_without_tercet
from tercet.training.pipeline import train
from tercet.training.results import RunResults
from tercet.training.split import is_validation


@pytest.fixture(scope="module")
def finished(text_folder, tmp_path_factory):
    from tercet.training.recipe import recipe_from_fields

    folder, said = tmp_path_factory.mktemp("runs") / "finished", []
    recipe = recipe_from_fields(
        {
            "output_dir": str(folder),
            "data": {"path": str(text_folder), "validation_fraction": 0.2},
            "tokenizer": {"vocab_size": 320},
            "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            "training": {"num_steps": 6, "sequence_length": 32, "global_batch_size": 4, "per_device_batch_size": 4,
                         "device": "cpu", "log_every": 2, "evaluate_every": 3, "save_every": 3},
            "optimizer": {"warmup_steps": 0},
            "samples": {"prompts": ["The", "A"], "max_new_tokens": 5},
            "card": {"license": "mit", "language": ["en"]},
        }
    )  # fmt: skip
    outcome = train(recipe, say=said.append)
    return recipe, folder, outcome, said


def test_what_is_in_the_folder(finished):
    _, folder, _, _ = finished
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "modeling_tercet.py", "layers_tercet.py", "cache_tercet.py", "configuration_tercet.py",
        "README.md", "loss.png", "metrics.jsonl", "recipe.yaml", "results.json",
    }  # fmt: skip
    assert [name for name in names if name.startswith(".")] == [".tercet-run"]


def test_it_loads_and_generates(finished):
    _, folder, _, _ = finished
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    inputs = tokenizer(["The module", "A"], return_tensors="pt", padding=True)
    assert model.generate(**inputs, max_new_tokens=4).shape[0] == 2


def test_it_loads_without_tercet(finished):
    _, folder, _, _ = finished
    check = check_loads_without_tercet(folder, "The", max_new_tokens=3)
    assert check.model_class.startswith("transformers_modules.")
    assert check.model_class.endswith("TercetForCausalLM")


def test_the_results_are_what_was_measured(finished):
    recipe, folder, outcome, _ = finished
    results = RunResults.load(folder / "results.json")
    assert results == outcome.results
    assert results.training.num_steps == 6
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss_nats" in record] == [1, 2, 4, 6]
    assert [record["step"] for record in records if "validation_loss_nats" in record] == [3, 6]
    assert results.training.final_loss_nats == records[-2]["loss_nats"]
    # No padding in these rows to speak of: nearly every slot is a label.
    assert 6 * 4 * 32 * 0.98 <= results.training.tokens_seen <= 6 * 4 * 32
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert results.model.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert [sample.prompt for sample in results.samples] == list(recipe.samples.prompts)


def test_the_loss_falls(finished):
    _, folder, _, _ = finished
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [record["loss_nats"] for record in records if "loss_nats" in record]
    assert training[-1] < training[0] - 0.1


def test_the_card_says_it(finished):
    _, folder, outcome, _ = finished
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "mit"
    assert card.data.eval_results is not None
    measured = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert outcome.results.evaluation.bits_per_byte == pytest.approx(
        next(value for name, value in measured.items() if "bit" in name), rel=1e-3
    )


def test_the_tokenizer_has_not_seen_the_held_out_text(make_recipe, tmp_path):
    """A word that only held-out documents have is no token; one that only the others have is."""
    fraction, folder = 0.2, tmp_path / "text"
    folder.mkdir()
    for index in range(200):
        body = f"Document {index} says something of its own. "
        kind = "zzyxqk" if is_validation(body + "zzyxqk " * 20, fraction) else "vvblorg"
        if is_validation(body + kind + " ", fraction) or kind == "zzyxqk":
            text = body + "zzyxqk " * 20
            if not is_validation(text, fraction):
                continue
        else:
            text = body + "vvblorg " * 20
            if is_validation(text, fraction):
                continue
        (folder / f"{index}.txt").write_text(text)
    texts = [path.read_text() for path in folder.iterdir()]
    assert any("zzyxqk" in text for text in texts)
    recipe = make_recipe(data={"path": str(folder), "validation_fraction": fraction}, training={"num_steps": 1},
                         tokenizer={"vocab_size": 290})  # fmt: skip
    train(recipe, output_dir=tmp_path / "run", say=lambda line: None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert len(tokenizer.tokenize(" vvblorg")) < len(tokenizer.tokenize(" zzyxqk"))
    assert len(tokenizer.tokenize(" vvblorg")) == 1


def test_starting_a_finished_run_again_does_nothing(finished):
    recipe, folder, outcome, _ = finished
    before = (folder / "model.safetensors").stat().st_mtime_ns
    said = []
    again = train(recipe, say=said.append)
    assert again.results == outcome.results
    assert again.loop is None
    assert "finished run" in said[0]
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_what_it_says_is_short_and_has_the_numbers(finished):
    _, _, outcome, said = finished
    text = "\n".join(said)
    assert len(said) <= 6
    assert re.search(r"Tokenizer +320 tokens", text)
    assert re.search(r"Data +\d+ documents", text)
    assert f"{outcome.results.model.num_parameters:,} parameters" in text
    assert f"{outcome.results.evaluation.bits_per_byte:.4f} bits per byte" in text


class TestFolders:
    def test_something_else_is_refused(self, make_recipe, tmp_path):
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(UserError, match=r"holds something else \(thesis.tex\)"):
            train(make_recipe(), output_dir=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_file_is_refused(self, make_recipe, tmp_path):
        path = tmp_path / "file"
        path.write_text("x")
        with pytest.raises(UserError, match="is a file"):
            train(make_recipe(), output_dir=path)

    def test_another_recipe_is_refused_by_the_fields_that_differ(self, finished, tmp_path):
        recipe, folder, _, _ = finished
        changed = recipe.model_copy(update={"seed": 5, "training": recipe.training.model_copy(update={"num_steps": 9})})
        with pytest.raises(UserError, match=r"different: seed, training.num_steps.*--restart"):
            train(changed)
        assert (folder / "results.json").exists()

    def test_what_decides_no_weight_may_differ(self, finished):
        recipe, _, outcome, _ = finished
        changed = recipe.model_copy(update={"training": recipe.training.model_copy(update={"log_every": 1})})
        assert train(changed, say=lambda line: None).results == outcome.results

    def test_a_folder_with_somebodys_own_recipe_is_not_a_runs(self, make_recipe, tmp_path):
        (tmp_path / "recipe.yaml").write_text("# my notes\n")
        with pytest.raises(UserError, match=r"holds something else \(recipe.yaml\)"):
            train(make_recipe(), output_dir=tmp_path, restart=True)
        assert (tmp_path / "recipe.yaml").read_text() == "# my notes\n"

    def test_restart_removes_only_what_a_run_wrote(self, make_recipe, tmp_path):
        folder = tmp_path / "run"
        train(make_recipe(training={"num_steps": 2}), output_dir=folder, say=lambda line: None)
        (folder / "thesis.tex").write_text("years of work")
        train(make_recipe(training={"num_steps": 3}), output_dir=folder, restart=True, say=lambda line: None)
        assert (folder / "thesis.tex").read_text() == "years of work"

    def test_another_vocabulary_before_training_is_trained_anew(self, make_recipe, tmp_path, monkeypatch):
        import tercet.training.pipeline as pipeline_module

        def stop(*args, **kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pipeline_module, "make_model", stop)
            with pytest.raises(KeyboardInterrupt):
                train(make_recipe(), output_dir=tmp_path / "run", say=lambda line: None)
        assert len(AutoTokenizer.from_pretrained(tmp_path / "run")) == 300
        train(make_recipe(tokenizer={"vocab_size": 310}), output_dir=tmp_path / "run", say=lambda line: None)
        assert len(AutoTokenizer.from_pretrained(tmp_path / "run")) == 310

    def test_a_finished_run_keeps_its_recipe(self, finished):
        recipe, folder, _, _ = finished
        before = (folder / "recipe.yaml").read_text()
        changed = recipe.model_copy(update={"training": recipe.training.model_copy(update={"log_every": 1})})
        train(changed, say=lambda line: None)
        assert (folder / "recipe.yaml").read_text() == before

    def test_files_are_readable_by_others(self, finished):
        import os

        _, folder, _, _ = finished
        umask = os.umask(0)
        os.umask(umask)
        for path in folder.rglob("*"):
            if path.is_file():
                assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path

    def test_restart_begins_anew(self, make_recipe, tmp_path):
        quick = make_recipe(training={"num_steps": 2})
        train(quick, output_dir=tmp_path / "run", say=lambda line: None)
        outcome = train(make_recipe(training={"num_steps": 3}), output_dir=tmp_path / "run", restart=True,
                        say=lambda line: None)  # fmt: skip
        assert outcome.results.training.num_steps == 3


def test_a_tracker_that_is_not_installed(make_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb, which is not installed: pip install 'tercet\[track\]'"):
        train(make_recipe(training={"trackers": ["wandb"]}), output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there(make_recipe, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(UserError, match="no CUDA device is there"):
        train(make_recipe(training={"device": "cuda"}), output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
