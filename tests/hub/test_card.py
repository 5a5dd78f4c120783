"""The card against huggingface_hub's own parser, and every error a folder can cause."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import save_file

from tercet.hub import build_card, check_card, write_card
from tercet.hub import card as card_module

CONFIG = {
    "model_type": "tercet",
    "auto_map": {"AutoModelForCausalLM": "modeling_tercet.TercetForCausalLM"},
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": None,
}
RECIPE = "# my run\ndata:\n  path: /home/someone/texts/poems.txt\n  cache: data/poems\ntraining: {num_steps: 100}\n"
RESULTS = {
    "tercet_version": "0.1.0",
    "date": "2026-01-02T03:04:05+00:00",
    "versions": dict.fromkeys(("python", "torch", "transformers", "tokenizers", "datasets", "accelerate"), "1.2.3"),
    "hardware": {"device": "cpu", "processor": "A CPU", "num_processes": 1, "num_threads": 2},
    "data": {
        "sources": [
            {
                "name": "poems | verse",
                "documents": 11,
                "bytes": 5000,
                "license": "cc0-1.0",
                "description": "None of it",
            },
            {"name": "/home/someone/prose.txt", "documents": 9, "bytes": 4000},
        ],
        "language": ["en"],
        "train": {"documents": 18, "tokens": 2500, "bytes": 8000},
        "validation": {"documents": 2, "tokens": 300, "bytes": 1000},
    },
    "tokenizer": {"vocab_size": 512, "bytes_per_token": 3.2},
    "model": {"num_parameters": 1234567, "num_non_embedding_parameters": 1000000},
    "training": {
        "num_steps": 100,
        "tokens_seen": 5000,
        "epochs": 2.0,
        "duration_s": 75.2,
        "tokens_per_second": 66.5,
        "mfu": None,
        "optimizer": "Muon",
        "schedule": "cosine",
        "precision": "float32",
        "final_loss_nats": 2.25,
    },
    "evaluation": {"loss_nats": 2.5, "perplexity": 12.18, "bits_per_byte": 1.127, "num_tokens": 300, "num_bytes": 1000},
    "samples": [
        {"prompt": "Use ```", "text": "```python\n{{ None }}\n```\n  and | nan |  ", "settings": "greedy, 20 tokens"}
    ],
}


def copy_results(**changes: object) -> dict:
    return {**json.loads(json.dumps(RESULTS)), **changes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint = tmp_path / "verse"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    (checkpoint / "recipe.yaml").write_text(RECIPE)
    (checkpoint / "results.json").write_text(json.dumps(RESULTS))
    return checkpoint


def test_front_matter_is_what_the_hub_reads(folder: Path) -> None:
    data = ModelCard(build_card(folder)).data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "text-generation"
    assert data.language == ["en"]
    assert data.license == "unknown"
    assert data.tags == ["tercet", "custom_code"]
    assert data.model_name == "verse"
    assert data.get("datasets") is None
    values = {result.metric_type: result.metric_value for result in data.eval_results}
    assert values == {"bits_per_byte": 1.127, "loss": 2.5, "perplexity": 12.18}
    assert {result.dataset_split for result in data.eval_results} == {"validation"}
    assert {result.dataset_name for result in data.eval_results} == {"poems | verse + prose.txt"}


def test_repository_and_licence_are_the_callers(folder: Path) -> None:
    text = build_card(folder, repo_id="poet/terza", license="apache-2.0")
    assert ModelCard(text).data.license == "apache-2.0"
    assert ModelCard(text).data.model_name == "terza"
    assert 'name = "poet/terza"' in text
    assert "Nobody declared" not in text


def test_the_recipe_declares_licence_and_name(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE + "card: {license: mit, name: Terza rima}\n")
    text = build_card(folder)
    assert ModelCard(text).data.license == "mit"
    assert "\n# Terza rima\n" in text
    assert 'name = "verse"' in text  # still what the reader loads


def test_a_model_that_began_as_another_names_it(folder: Path) -> None:
    chat = "model: {from_checkpoint: 'hf://poet/terza@v1'}\ndata: {sources: [{path: a, messages_column: messages}]}\n"
    (folder / "recipe.yaml").write_text(chat)
    card = ModelCard(build_card(folder))
    assert card.data.base_model == "poet/terza"
    assert card.data.tags == ["tercet", "custom_code", "conversational"]
    assert "answer as the assistant does" in card.text
    (folder / "recipe.yaml").write_text("model: {from_checkpoint: out/base}\ndata: {path: poems.txt}\n")
    card = ModelCard(build_card(folder))
    assert card.data.get("base_model") is None
    assert "continues text" in card.text


def test_other_text_and_tasks_stand_in_front_matter_and_tables(folder: Path) -> None:
    text = {**RESULTS["evaluation"], "name": "news.txt", "context": 128, "date": RESULTS["date"], "bits_per_byte": 1.75}
    row = {"task": "arc", "metric": "acc", "value": 0.25, "num_fewshot": 0, "num_documents": 10, "limit": 10}
    tasks = {"harness": "lm-eval 1", "date": RESULTS["date"], "limit": 10, "results": [row]}
    (folder / "results.json").write_text(json.dumps(copy_results(texts=[text], tasks=tasks)))
    card = ModelCard(build_card(folder, named=["news.txt"]))
    measured = {(item.dataset_name, item.metric_type): item.metric_value for item in card.data.eval_results}
    assert measured["news.txt", "bits_per_byte"] == 1.75
    assert measured["arc", "acc"] == 0.25
    assert "| news.txt | 1.7500 | 2.5000 | 12.18 | 300 | 1,000 | 128 |" in card.text
    assert "| arc | acc | 0.2500 | 10 (at most 10) | 0 |" in card.text
    assert "Beside the other text and the tasks named there, nothing else was measured" in card.text


def test_the_name_of_a_file_that_was_scored_is_told_only_when_asked_for(folder: Path) -> None:
    """Its figures are; a dataset of the Hub is public already."""
    text = {**RESULTS["evaluation"], "context": 128, "date": RESULTS["date"]}
    texts = [{**text, "name": name, "hub_id": hub} for name, hub in
             (("my diary.txt", None), ("org/wiki", "org/wiki"), ("letters.txt", None))]  # fmt: skip
    (folder / "results.json").write_text(json.dumps(copy_results(texts=texts)))
    for named, names in (
        ((), {"unnamed text 1", "org/wiki", "unnamed text 2"}),
        (("letters.txt",), {"unnamed text 1", "org/wiki", "letters.txt"}),
    ):
        card = build_card(folder, named=named)
        assert "diary" not in card
        shown = {item.dataset_name for item in ModelCard(card).data.eval_results if item.dataset_split is None}
        assert shown == names
        assert all(f"| {name} | 1.1270 |" in card for name in names)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/usr/share/licenses/*", "*"),
        ("/srv/texts/2024", "2024"),
        ("/srv/texts/no", "no"),
        ("/srv/my own/# notes: {a}", "# notes: {a}"),
        ("/home/x/y.txt", "y.txt"),
    ],
)
@pytest.mark.parametrize("style", [None, "'", '"'])
def test_a_shortened_path_is_still_yaml_and_the_same_text(
    folder: Path, path: str, shown: str, style: str | None
) -> None:
    """What is left of `/texts/*` alone would be an alias, of `/texts/2024` a number."""
    scalar = yaml.dump({"data": {"path": path}, "seed": 1}, default_style=style, width=1000)
    (folder / "recipe.yaml").write_text(f"# mine\n{scalar}", "utf-8")
    text = build_card(folder)
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert yaml.safe_load(recipe)["data"] == {"path": shown}
    assert recipe.startswith("# mine\n")


def test_a_recipe_whose_escapes_hide_a_path_is_written_anew(folder: Path) -> None:
    (folder / "recipe.yaml").write_text('data: {path: "\\x2fhome/x/y.txt"}\n', "utf-8")
    text = build_card(folder)
    assert "x2fhome" not in text and "path: y.txt" in text


def test_a_licence_that_the_hub_does_not_know_is_not_written(folder: Path) -> None:
    with pytest.raises(ValueError, match="'banana' is no licence that the Hub knows: give"):
        write_card(folder, license="banana")
    with pytest.raises(ValueError, match=r"give apache-2\.0"):
        write_card(folder, license="Apache 2.0")
    assert not (folder / "README.md").exists()
    assert ModelCard(write_card(folder, license="cc-by-4.0").read_text()).data.license == "cc-by-4.0"


def test_one_hub_source_is_named_as_a_dataset(folder: Path) -> None:
    data = {**RESULTS["data"], "sources": [{"name": "wiki", "documents": 1, "bytes": 1, "hub_id": "org/wiki"}]}
    (folder / "results.json").write_text(json.dumps(copy_results(data=data)))
    data = ModelCard(build_card(folder)).data
    assert data.datasets == ["org/wiki"]
    assert data.eval_results[0].dataset_type == "org/wiki"


def test_the_hubs_own_renderer_gives_the_same_card(folder: Path) -> None:
    subject, recipe, results = card_module.read_subject(folder)
    context = card_module.card_context(folder, subject, recipe, results)
    data = card_module.card_data(subject, results)
    assert isinstance(data, ModelCardData)
    theirs = ModelCard.from_template(data, template_path=str(card_module.template_path()), **context)
    assert theirs.text.strip() == ModelCard(build_card(folder)).text.strip()


def test_measured_values_and_samples_stand_in_the_text(folder: Path) -> None:
    text = build_card(folder)
    for value in ("1,234,567", "1.1270", "12.18", "1 min 15 s", "poems \\| verse", "cc0-1.0", "2.00 times"):
        assert value in text, value
    assert "````text\n```python\n{{ None }}\n```\n  and | nan |  \n````" in text
    assert "utilization" not in text
    assert "loss.png" not in text


def test_no_absolute_path_of_the_machine(folder: Path) -> None:
    text = build_card(folder)
    assert "/home/" not in text
    assert str(folder.parent) not in text
    assert "path: poems.txt\n  cache: data/poems\n" in text
    assert "| prose.txt | 9 |" in text


@pytest.mark.parametrize("is_native", [False, True])
def test_weights_without_a_run_say_that_nothing_is_on_record(folder: Path, is_native: bool) -> None:
    """As `tercet import` and `tercet export` leave them: the size is counted in the files, and no figure is made up."""
    for name in ("recipe.yaml", "results.json"):
        (folder / name).unlink()
    if is_native:
        native = {key: value for key, value in CONFIG.items() if key != "auto_map"}
        (folder / "config.json").write_text(json.dumps({**native, "model_type": "llama"}))
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, folder / "model.safetensors", metadata={"format": "pt"})
    card = ModelCard(build_card(folder, repo_id="poet/terza", license="mit"))
    assert (card.data.license, card.data.model_name, card.data.eval_results) == ("mit", "terza", None)
    assert card.data.tags == (["tercet", "llama"] if is_native else ["tercet", "custom_code"])
    assert "| Parameters | 22 |" in card.text
    assert "No run is on record here" in card.text
    assert "Its positions are made for at most 256 tokens." in card.text
    assert ("trust_remote_code" in card.text) != is_native
    for heading in ("Training data", "Training procedure", "Recipe", "Samples", "bits per byte"):
        assert heading not in card.text


def test_a_licence_of_ones_own_has_a_name_and_a_link(folder: Path) -> None:
    (folder / "LICENSE.txt").write_text("Do as you please.")
    data = ModelCard(build_card(folder, license="other")).data
    assert (data.license, data.license_name, data.license_link) == ("other", "verse-license", "LICENSE.txt")
    assert ModelCard(build_card(folder, license="mit")).data.get("license_name") is None


def test_code_block_is_code(folder: Path) -> None:
    (block,) = re.findall(r"^```python\n(from transformers.*?)^```", build_card(folder), re.DOTALL | re.MULTILINE)
    compile(block, "card", "exec")
    assert 'name = "verse"' in block
    assert "trust_remote_code=True" in block
    native = {key: value for key, value in CONFIG.items() if key != "auto_map"}
    (folder / "config.json").write_text(json.dumps({**native, "model_type": "llama"}))
    assert "trust_remote_code" not in build_card(folder)


def test_unmeasured_sections_are_absent(folder: Path) -> None:
    (folder / "results.json").write_text(json.dumps(copy_results(evaluation=None, samples=[])))
    text = build_card(folder)
    assert "has not been evaluated" in text
    assert "## Samples" not in text
    assert not ModelCard(text).data.get("eval_results")
    assert "bits per byte" not in text.lower()


def test_curve_and_history(folder: Path) -> None:
    lines = [{"step": 1, "tokens": 50, "loss_nats": 6.0}]
    lines += [
        {"step": s, "tokens": 50 * s, "validation_loss_nats": 4 - s / 100, "validation_bits_per_byte": 2.0}
        for s in range(10, 101, 5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "loss.png").write_bytes(b"")
    text = build_card(folder)
    assert "![Loss over training](loss.png)" in text
    assert "| 10 | 500 | 3.9000 |" in text
    assert "| 100 | 5,000 | 3.0000 |" in text
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({**line, **({"validation_loss_nats": float("nan")} if i else {})}) + "\n"
                for i, line in enumerate(lines))
    )  # fmt: skip
    with pytest.raises(ValueError, match="validation_loss_nats at step 10 is nan"):
        build_card(folder)


def test_write_replaces_whole_or_not_at_all(folder: Path) -> None:
    path = write_card(folder)
    assert path == folder / "README.md"
    before = path.read_text()
    assert before == build_card(folder)
    (folder / "results.json").unlink()
    with pytest.raises(ValueError, match=r"has no results\.json"):
        write_card(folder)
    assert path.read_text() == before
    assert sorted(item.name for item in folder.iterdir()) == ["README.md", "config.json", "recipe.yaml"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json, so it is no checkpoint"),
        ("recipe.yaml", None, "has no recipe.yaml, so it is no whole run"),
        ("results.json", None, "has no results.json, so nothing is known of what was measured"),
        ("config.json", "{", "config.json is not JSON.*save the model again"),
        ("config.json", "{}", "names no model_type"),
        ("recipe.yaml", "a: [", "recipe.yaml is not YAML"),
        ("recipe.yaml", "", "holds no recipe"),
        ("results.json", "{", "results.json: the file: Invalid JSON"),
    ],
)
def test_errors_of_a_folder(folder: Path, name: str, content: str | None, message: str) -> None:
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        build_card(folder)
    assert "\n" not in str(caught.value)


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        build_card(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("---\n", "# title\n"), "no front matter"),
        (("license: unknown\n", ""), "no license"),
        (("pipeline_tag: text-generation", "pipeline_tag: fill-mask"), "must be text-generation"),
        (("library_name: transformers", "library_name: None"), "library_name is None"),
        (("value: 2.5", "value: .nan"), r"metrics\[1\].value is nan"),
        (("model-index:", "model-index: [1]\nother:"), "does not parse"),
        (("## Limitations", "## {{ heading }}"), "not filled"),
        (("| Optimizer | Muon |", "| Optimizer | None |"), "shows None for a value"),
        (("| 2.5000 |", "| nan |"), "shows nan for a value"),
    ],
)
def test_check_refuses(folder: Path, change: tuple[str, str], message: str) -> None:
    text = build_card(folder)
    assert change[0] in text
    with pytest.raises(ValueError, match=message):
        check_card(text.replace(*change, 1))


def test_a_hole_in_the_template_is_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "hub_card.md"
    monkeypatch.setattr(card_module, "template_path", lambda: template)
    template.write_text("---\n{{ card_data }}\n---\n{{ nothing }}")
    with pytest.raises(ValueError, match="'nothing' is undefined"):
        build_card(folder)
    template.write_text("---\n{{ card_data }}\n---\n{{ results.training.mfu }}")
    with pytest.raises(ValueError, match="not measured"):
        build_card(folder)
