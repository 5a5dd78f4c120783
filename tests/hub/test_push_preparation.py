"""What would be published, and what is found in it, without a Hub: options, files, secrets, paths, steps of a run."""

import json
import shutil
from pathlib import Path

import pytest
from pushed_runs import RESULTS

from tercet.hub.inspection import inspect, last_part
from tercet.hub.options import PushOptions
from tercet.hub.preparation import check_publishable, prepared_push
from tercet.hub.selection import PublishedFile
from tercet.training.errors import UserError

OPTIONS = PushOptions("user/verse")


@pytest.fixture
def own_copy(small_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small_checkpoint, tmp_path / "verse")


def refusal(checkpoint: Path, **options) -> str:
    chosen = PushOptions(options.pop("repo_id", "user/verse"), **options)
    with pytest.raises(UserError) as caught, prepared_push(checkpoint, chosen) as prepared:
        check_publishable(prepared, chosen)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def found(tmp_path: Path, name: str, text: str, **options) -> list[tuple[int, str, str]]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [(item.line, item.what, item.text) for item in inspect([PublishedFile(name, path, "")], **options)]


# Made up; put together here, so that no scanner takes this file for a leak.
SECRETS = {
    "a Hugging Face token": "hf_" + "aB3" * 11,
    "an API key": "sk-" + "proj-" + "Ab3" * 10,
    "a GitHub token": "ghp_" + "aB3" * 12,
    "an AWS key": "AKIA" + "ABCDEFGH23456789",
    "a Google key": "AIza" + "Sy-3x" * 7,
    "a Slack token": "xoxb-" + "1234567890-abc",
    "a private key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----",
    "a password in a URL": "postgres://poet:" + "terza9@db.example.org",
    "a secret": "secret_access_key = " + "wJalr7XUtn/FEMI+K7MDENGbPxRfi",
}


class TestInspection:
    @pytest.mark.parametrize("what", SECRETS)
    @pytest.mark.parametrize("name", ["modeling_tercet.py", "recipe.yaml", "README.md", "tour.ipynb", "tokenizer.json"])
    def test_secrets_are_found_with_their_line(self, tmp_path, name, what):
        assert found(tmp_path, name, f"first\nnote: {SECRETS[what]}\n") == [(2, what, SECRETS[what])]

    def test_of_a_secret_only_the_beginning_is_shown(self, tmp_path):
        path = tmp_path / "recipe.yaml"
        path.write_text(SECRETS["an API key"])
        (finding,) = inspect([PublishedFile("recipe.yaml", path, "")])
        assert str(finding) == "recipe.yaml:1 holds an API key (sk-proj…)"

    def test_the_users_own_token_whatever_it_looks_like(self, tmp_path):
        own = "quite-another-kind"
        assert found(tmp_path, "a.txt", f"x {own}", token=own) == [(1, "your own token for the Hub", own)]
        assert found(tmp_path, "a.txt", f"x {own}") == []

    @pytest.mark.parametrize(
        "path",
        [
            "/home/poet/texts/a.txt",
            "/Users/poet/texts",
            "/root/x.py",
            "/tmp/run/x",
            "file:///home/poet/a",
            "C:\\Users\\poet",
        ],
    )
    def test_paths_are_found_in_code_and_text(self, tmp_path, path):
        assert found(tmp_path, "a.py", f"\nopen({path!r}) # {path}") != []
        assert found(tmp_path, "README.md", f"See {path} there.")[0][0] == 1

    @pytest.mark.parametrize(
        "value", ["/srv/x/poems", "/nobody/knows/this", "D:\\texts\\poems", "/data/run/corpus.jsonl"]
    )
    def test_values_of_settings_are_found_below_any_root(self, tmp_path, value):
        assert found(tmp_path, "recipe.yaml", f"a: 1\ndata: {{path: '{value}'}}\n") == [(2, "an absolute path", value)]
        line, _, text = found(tmp_path, "x.json", json.dumps({"a": [value]}, indent=1))[0]
        assert (line, text.replace("\\\\", "\\")) == (3, value)

    def test_paths_below_this_users_home_are_found_wherever_that_is(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", "/export/people/poet")
        assert (
            found(tmp_path, "a.py", "x = '/export/people/poet/texts/a.txt'")[0][2] == "/export/people/poet/texts/a.txt"
        )

    @pytest.mark.parametrize(
        "text",
        [
            "https://huggingface.co/home/poet/x and http://example.org/tmp/x",
            "and/or, 1/2, /usr/bin/env python, see /etc/hosts",
            "data: {path: texts/poems.txt, cache: ./data, home: ~}",
            "tokens: 512 # sk-ip, hf_hub, password: getpass",
            '"pad_token": "<|endoftext|>", "api_key": null',
            "s = 'a:b' # C:",
            "a relative home/poet/x",
        ],
    )
    def test_ordinary_text_is_left_alone(self, tmp_path, text):
        assert found(tmp_path, "a.yaml", text) == []
        assert found(tmp_path, "a.py", text) == []

    def test_what_may_be_published_all_the_same(self, tmp_path):
        token, text = SECRETS["an AWS key"], "a: /home/poet/x\nb: /home/else/y\n"
        assert found(tmp_path, "a.yaml", text, allow=["/home/poet"]) == [(2, "an absolute path", "/home/else/y")]
        assert found(tmp_path, "a.yaml", token, allow=[token]) == []
        assert found(tmp_path, "a.yaml", token, allow=[token[:8]]) != []

    def test_names_inside_weights_are_read(self, tmp_path):
        import torch
        from safetensors.torch import save_file

        save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"from": "/home/poet/run"})
        (finding,) = inspect([PublishedFile("model.safetensors", tmp_path / "model.safetensors", "weights")])
        assert finding.text == "/home/poet/run"

    def test_the_last_part_of_a_path(self):
        assert [last_part(path) for path in ("/a/b c/", "C:\\x\\y.txt", "/x")] == ["b c", "y.txt", "x"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repo_id": "verse"}, ["YOUR-NAME/verse"]),
        ({"branch": "a..b"}, ["'a..b' is no name for a branch"]),
        ({"branch": "refs/heads/x"}, ["no name for a branch"]),
        ({"tag": "-x"}, ["'-x' is no name for a tag"]),
        ({"license": "Apache License"}, ["'Apache License' is no licence", "apache-2.0"]),
        ({"beside": True}, ["--export"]),
        ({"export": "bert"}, ["--export bert", "llama"]),
        ({"message": " "}, ["--message is empty"]),
        ({"include": ["../other"]}, ["leads out of"]),
        ({"include": ["nothing.*"]}, ["matches no file"]),
        ({"include": ["optimizer-0.safetensors"]}, ["never published"]),
        ({"include": ["state/*"]}, ["never published"]),
        ({"include": [".tercet-run"]}, ["never published"]),
    ],
)
def test_options_that_mean_nothing(small_checkpoint, options, words):
    message = refusal(small_checkpoint, **options)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "name", ["config.json", "recipe.yaml", "results.json", "model.safetensors", "tokenizer.json", "modeling_tercet.py"]
)
def test_a_folder_that_is_not_whole(own_copy, name):
    (own_copy / name).unlink()
    assert f"has no {name}" in refusal(own_copy)


def test_sharded_weights_go_with_all_their_shards(own_copy):
    (own_copy / "model.safetensors").rename(own_copy / "model-00001-of-00002.safetensors")
    shutil.copy(own_copy / "model-00001-of-00002.safetensors", own_copy / "model-00002-of-00002.safetensors")
    (own_copy / "model-00001-of-00009.safetensors").write_bytes(b"of earlier weights")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (own_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with prepared_push(own_copy, OPTIONS) as prepared:
        chosen = {file.path for file in prepared.files if file.what == "weights"}
    assert chosen == {"model.safetensors.index.json", *weights.values()}
    (own_copy / weights["b"]).unlink()
    assert "has no model-00002-of-00002.safetensors" in refusal(own_copy)


def test_a_step_of_a_run_goes_with_the_runs_metrics_up_to_it(own_copy):
    step = own_copy / "checkpoints" / "step-00000320"
    step.mkdir()
    for path in own_copy.iterdir():
        if path.is_file() and path.name not in ("README.md", "metrics.jsonl", "loss.png"):
            shutil.copy(path, step)
    training = {**RESULTS["training"], "num_steps": 320}
    (step / "results.json").write_text(json.dumps({**RESULTS, "training": training, "evaluation": None}))
    with prepared_push(step, PushOptions("user/verse", tag_step=True)) as prepared:
        content = {file.path: file.source.read_bytes() for file in prepared.files}
    assert prepared.tags == ("step-320",)
    assert prepared.message == "Step 320"
    assert [json.loads(line)["step"] for line in content["metrics.jsonl"].splitlines()] == list(range(20, 321, 20))
    assert content["loss.png"].startswith(b"\x89PNG")
    assert b"has not been evaluated" in content["README.md"]
    assert "optimizer-0.safetensors" not in content


def test_a_recipes_refusal_speaks_of_the_recipe(own_copy):
    (own_copy / "recipe.yaml").write_text("data: {path: /srv/texts/poems}\ncard: {license: mit}\n")
    message = refusal(own_copy, from_recipe=True)
    assert "hub.shorten_paths: true" in message
    assert "--" not in message
    assert "recipe.yaml:1" not in refusal(own_copy, license="Not One")
