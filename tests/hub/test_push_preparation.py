"""What would be published, and what is found in it, without a Hub: options, files, secrets, paths, steps of a run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from pushed_runs import RESULTS

from tercet.hub.inspection import inspect, last_part, shorten_paths
from tercet.hub.options import PushOptions
from tercet.hub.preparation import check_publishable, prepared_push
from tercet.hub.selection import PublishedFile, published_files
from tercet.training.errors import UserError
from tercet.training.lock import run_lock

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
    "a GitLab token": "glpat-" + "aB3x" * 5,
    "a package registry's token": "npm_" + "aB3" * 12,
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

    @pytest.mark.parametrize("before", ["\n", "\t", "é", "_", "%3D", "a\\"], ids=repr)
    @pytest.mark.parametrize("what", ["a Hugging Face token", "a GitHub token", "an AWS key", "an API key"])
    def test_whatever_stands_before_a_secret(self, tmp_path, what, before):
        """In JSON a line end is two characters, of which the second is a letter."""
        for name, text in (
            ("results.json", json.dumps({"text": before + SECRETS[what]})),
            ("a.md", before + SECRETS[what]),
        ):
            assert [item[1:] for item in found(tmp_path, name, text)] == [(what, SECRETS[what])]

    def test_a_path_behind_an_escaped_line_end_and_a_secret_in_utf_16(self, tmp_path):
        assert found(tmp_path, "a.json", json.dumps({"text": "see\n/home/poet/x"}))[0][2] == "/home/poet/x"
        (tmp_path / "notes.txt").write_bytes(SECRETS["an AWS key"].encode("utf-16"))
        (finding,) = inspect([PublishedFile("notes.txt", tmp_path / "notes.txt", "")])
        assert finding.what == "an AWS key"

    def test_names_of_files_and_the_commits_message_are_looked_at(self, tmp_path):
        (tmp_path / "a.txt").touch()
        secret = SECRETS["a GitHub token"]
        (finding,) = inspect([PublishedFile(f"{secret}.txt", tmp_path / "a.txt", "")])
        assert str(finding) == "the name of a file holds a GitHub token (ghp_aB3…)"
        (finding,) = inspect([], message=f"made with {secret}")
        assert str(finding).startswith("the commit's message holds a GitHub token")

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

    @pytest.mark.parametrize(
        ("text", "shortened"),
        [
            ("path: /data/x\nurl: https://host/data/x/y\nother: /data/xy/z\n",
             "path: x\nurl: https://host/data/x/y\nother: z\n"),
            ("note: 'from /home/poet/a b and C:\\Users\\poet'\n", "note: 'from a b and poet'\n"),
            (json.dumps({"text": "see\n/home/poet/x", "path": "/my own/café"}),
             json.dumps({"text": "see\nx", "path": "café"})),
            ('{"path": "/my own/café"}', '{"path": "café"}'),
        ],
    )  # fmt: skip
    def test_paths_are_shortened_and_nothing_else_is(self, tmp_path, text, shortened):
        path = tmp_path / ("a.json" if text.startswith("{") else "a.yaml")
        path.write_text(text, encoding="utf-8")
        (tmp_path / "latin.json").write_bytes(b'{"a": "caf\xe9"}')
        assert shorten_paths(tmp_path) == [path.name]
        assert path.read_text("utf-8") == shortened
        assert inspect([PublishedFile(path.name, path, "")]) == []

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


def test_a_folder_without_a_run_is_published_with_what_it_has(own_copy):
    """What `tercet import` writes: neither recipe nor results, whose place in the card says so."""
    for name in ("recipe.yaml", "results.json", "metrics.jsonl", "loss.png"):
        (own_copy / name).unlink()
    assert "--license" in refusal(own_copy)
    assert "give --tag NAME" in refusal(own_copy, license="mit", tag_step=True)
    with prepared_push(own_copy, PushOptions("user/verse", license="mit", tag="v1")) as prepared:
        check_publishable(prepared, OPTIONS)
        card = next(file for file in prepared.files if file.path == "README.md").source.read_text("utf-8")
        names = {file.path for file in prepared.files}
    assert (prepared.message, prepared.tags) == ("A tercet model", ("v1",))
    assert "No run is on record here" in card
    assert {"model.safetensors", "modeling_tercet.py", "tokenizer.json", "config.json"} <= names
    config = json.loads((own_copy / "config.json").read_text())
    (own_copy / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    assert "holds a model of type bert" in refusal(own_copy, license="mit")


def test_a_run_that_is_at_work_in_the_folder(own_copy):
    """Its files change one by one when it ends; its checkpoints are whole at any time."""
    with run_lock(own_copy):
        assert "is being trained" in refusal(own_copy)
        assert "checkpoints/step-00000600" in refusal(own_copy)
        with prepared_push(own_copy, PushOptions("user/verse", from_recipe=True)) as prepared:  # that run itself
            assert prepared.files
    with prepared_push(own_copy, OPTIONS) as prepared:
        assert prepared.files
    (own_copy / "config.json").unlink()
    assert "let that run end, or give " in refusal(own_copy)


def test_a_checkpoint_that_is_removed_while_it_is_read(own_copy, tmp_path):
    """As retention does; without its weights, a push would take them off the Hub."""

    def prepare() -> None:
        with prepared_push(own_copy, OPTIONS) as prepared:
            (own_copy / "model.safetensors").unlink()
            check_publishable(prepared, OPTIONS)

    with pytest.raises(UserError, match=r"model\.safetensors is gone"):
        prepare()
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "model.safetensors").symlink_to(own_copy / "model.safetensors")
    with pytest.raises(FileNotFoundError):
        published_files(tmp_path / "staged")


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("", "is no pattern"),
        ("a/**b", "is no pattern"),
        ("**", "matches no file"),
        ("../*", "leads out of"),
        ("state/*", "never published"),
        ("*.txt", "link.txt, which links to a file elsewhere"),
        ("dangling", "matches no file"),
    ],
)
def test_what_cannot_be_included(own_copy, tmp_path, pattern, word):
    (tmp_path / "own.txt").write_text("of somebody's")
    (own_copy / "link.txt").symlink_to(tmp_path / "own.txt")
    (own_copy / "dangling").symlink_to(tmp_path / "nowhere")
    assert word in refusal(own_copy, include=[pattern])


def test_a_link_inside_the_folder_and_an_empty_file_with_a_strange_name_are_included(own_copy):
    (own_copy / "ü and blanks.txt").touch()
    (own_copy / "link.md").symlink_to("notes.txt")
    with prepared_push(own_copy, PushOptions("user/verse", include=["ü*", "link.md"])) as prepared:
        included = {file.path: file.source.read_bytes() for file in prepared.files if file.what == "included"}
    assert included == {"ü and blanks.txt": b"", "link.md": b"\0"}


def test_a_licence_of_ones_own_needs_its_text(own_copy):
    assert "put it into the folder" in refusal(own_copy, license="other")
    (own_copy / "LICENSE").write_text("Do as you please.")
    with prepared_push(own_copy, PushOptions("user/verse", license="other")) as prepared:
        assert "LICENSE" in {file.path for file in prepared.files}


def test_the_name_of_a_file_that_was_scored_stays_at_home(own_copy):
    record = {
        **RESULTS,
        "texts": [{**RESULTS["evaluation"], "name": "my diary.txt", "context": 64, "date": RESULTS["date"]}],
    }
    (own_copy / "results.json").write_text(json.dumps(record))

    def published(**options) -> tuple[str, list[str]]:
        with prepared_push(own_copy, PushOptions("user/verse", **options)) as prepared:
            texts = [
                file.source.read_text("utf-8") for file in prepared.files if file.path in ("README.md", "results.json")
            ]
            return "".join(texts), prepared.notes

    text, notes = published()
    assert "diary" not in text and text.count("unnamed text 1") > 1
    assert "--allow 'my diary.txt' publishes one" in notes[0]
    text, notes = published(allow=("my diary.txt",))
    assert text.count("my diary.txt") > 1 and notes == []
    assert "my diary.txt" in (own_copy / "results.json").read_text()


def test_a_recipe_with_a_pattern_of_files_is_published_as_yaml(own_copy):
    (own_copy / "recipe.yaml").write_text("data:\n  path: /srv/texts/*\ncard: {license: mit}\n")
    with prepared_push(own_copy, PushOptions("user/verse", shorten_paths=True)) as prepared:
        (recipe,) = [file.source.read_text("utf-8") for file in prepared.files if file.path == "recipe.yaml"]
        check_publishable(prepared, OPTIONS)
    assert yaml.safe_load(recipe) == {"data": {"path": "*"}, "card": {"license": "mit"}}


def test_the_page_tells_how_many_files_there_are(own_copy, root):
    with prepared_push(own_copy, OPTIONS) as prepared:
        count = len(prepared.files)
    page = (root / "docs" / "publishing.md").read_text("utf-8")
    told = re.findall(r"(\d+) of (\d+) files to send|(\d+) files for user", page)
    assert {number for numbers in told for number in numbers if number} == {str(count)}


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
