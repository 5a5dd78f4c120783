"""`tercet push` as a user runs it, and what is then on the Hub, seen from the Hub's side."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import huggingface_hub.constants
import pytest
from hub_server import HubServer
from hub_server.clients import run_client, run_python
from huggingface_hub import ModelCard
from pushed_runs import PRIVATE, write_checkpoint

CHANGES = r"^(POST|PUT|DELETE) "
Push = Callable[..., CompletedProcess[str]]


def push_apart(hub: HubServer, checkpoint: Path, *options: str, **settings) -> CompletedProcess[str]:
    """In a process of its own, as a user's shell starts it."""
    return run_client(hub, [sys.executable, "-m", "tercet.hub", "push", checkpoint, "user/verse", *options], **settings)


@pytest.fixture
def push(hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Push:
    """The same command, but in this process, which is spared the imports and set as a client of `hub` would be."""
    from tercet.cli import main

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", hub.token)

    def run(checkpoint: Path, *options: str, repository: str = "user/verse") -> CompletedProcess[str]:
        words = ["tercet", "push", str(checkpoint), repository, *options]
        monkeypatch.setattr("sys.argv", words)
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        shown = capsys.readouterr()
        return CompletedProcess(words, code, shown.out, shown.err)

    return run


def assert_refused(done: CompletedProcess[str], *words: str) -> None:
    """One line on standard error, exit code 2, and these words in it."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("tercet: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture
def own_copy(small_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small_checkpoint, tmp_path / "verse")


def test_the_repository_holds_what_readers_need_and_nothing_else(hub: HubServer, small_checkpoint: Path) -> None:
    done = push_apart(hub, small_checkpoint, "--private", "--tag-step")
    assert done.returncode == 0, done.stderr
    repository = hub.repository("user/verse")
    assert repository.is_private
    commit, first = repository.history()
    assert first.parent is None
    assert commit.title == "Step 640: 1.1270 bits per byte"
    assert repository.tags == {"step-640": commit.oid}
    files = repository.files()
    code = {path.name for path in small_checkpoint.glob("*_tercet.py")}
    assert len(code) > 5
    model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    record = {"README.md", "recipe.yaml", "results.json", "metrics.jsonl", "loss.png"}
    assert set(files) == code | model | record | {"chat_template.jinja"}
    assert not {Path(name).name for name in PRIVATE} & {Path(name).name for name in files} - {"config.json"}
    for name in set(files) - {"README.md"}:
        assert repository.read(name) == (small_checkpoint / name).read_bytes(), name
    assert files["model.safetensors"].is_lfs
    card = ModelCard(repository.read("README.md").decode())
    assert (card.data.license, card.data.language, card.data.library_name) == ("apache-2.0", ["en"], "transformers")
    assert (card.data.pipeline_tag, card.data.model_name) == ("text-generation", "verse")
    assert {item.metric_type: item.metric_value for item in card.data.eval_results}["bits_per_byte"] == 1.127
    assert 'name = "user/verse"' in card.text
    assert done.stdout.splitlines()[-4:] == [
        f"{hub.endpoint}/user/verse  (commit {commit.oid[:8]}, tag step-640, private)",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("user/verse", trust_remote_code=True)',
        'model = AutoModelForCausalLM.from_pretrained("user/verse", trust_remote_code=True)',
    ]
    assert (small_checkpoint / "README.md").read_text() == "what an earlier card said\n"


def test_the_same_again_changes_nothing_and_sends_nothing(hub: HubServer, push: Push, small_checkpoint: Path) -> None:
    assert push(small_checkpoint).returncode == 0
    hub.requests.clear()
    done = push(small_checkpoint)
    assert done.returncode == 0, done.stderr
    assert "nothing to send" in done.stdout
    assert hub.requests_to(CHANGES) == []
    assert len(hub.repository("user/verse").history()) == 2


def test_a_later_push_sends_what_is_new_and_removes_what_is_gone(hub: HubServer, push: Push, own_copy: Path) -> None:
    assert push(own_copy).returncode == 0
    repository = hub.repository("user/verse")
    repository.add({"docs/notes.txt": b"the owner's own", "old_tercet.py": b"of an earlier version"})
    hub.requests.clear()
    (own_copy / "generation_config.json").write_text('{"temperature": 0.5}')
    done = push(own_copy, "--message", "Cooler")
    assert done.returncode == 0, done.stderr
    assert hub.requests_to("PUT ") == []  # weights and curve are there already
    assert repository.history()[0].title == "Cooler"
    assert json.loads(repository.read("generation_config.json")) == {"temperature": 0.5}
    assert "old_tercet.py" not in repository.files()
    assert repository.read("docs/notes.txt") == b"the owner's own"


def test_a_branch_and_a_tag_of_the_users_own(hub: HubServer, push: Push, small_checkpoint: Path) -> None:
    main = hub.create("user/verse").history()[0].oid
    done = push(small_checkpoint, "--branch", "rhymed", "--tag", "v1.0")
    assert done.returncode == 0, done.stderr
    repository = hub.repository("user/verse")
    assert repository.branches["main"] == main
    commit = repository.history("rhymed")[0]
    assert (commit.parent, repository.tags) == (main, {"v1.0": commit.oid})
    assert 'from_pretrained("user/verse", revision="rhymed", trust_remote_code=True)' in done.stdout
    assert (
        'from_pretrained(name, revision="rhymed", trust_remote_code=True)'
        in repository.read("README.md", "rhymed").decode()
    )
    assert f"{hub.endpoint}/user/verse/tree/rhymed  " in done.stdout


def test_a_dry_run_lists_files_and_asks_nobody(hub: HubServer, small_checkpoint: Path) -> None:
    done = push_apart(hub, small_checkpoint, "--dry-run", token=None, environment={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert hub.requests == []
    *rows, total = [line.split() for line in done.stdout.splitlines()]
    listed = {row[2]: float(row[0]) * {"B": 1, "kB": 1e3, "MB": 1e6}[row[1]] for row in rows}
    assert listed["model.safetensors"] == pytest.approx(
        (small_checkpoint / "model.safetensors").stat().st_size, rel=0.02
    )
    assert {"README.md", "modeling_tercet.py", "recipe.yaml"} <= set(listed)
    assert int(total[2]) == len(rows)
    assert float(total[0]) * {"kB": 1e3, "MB": 1e6}[total[1]] == pytest.approx(sum(listed.values()), rel=0.02)
    assert {path.name for path in small_checkpoint.glob("*.py")} <= set(listed)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"token": None}, ["no token", "hf auth login", "HF_TOKEN"]),
        ({"environment": {"HF_HUB_OFFLINE": "1"}}, ["HF_HUB_OFFLINE", "unset it"]),
    ],
)
def test_refused_before_anyone_is_asked(hub, small_checkpoint, settings, words) -> None:
    assert_refused(push_apart(hub, small_checkpoint, **settings), *words)
    assert hub.requests == []


def test_names_and_folders_that_are_none(hub: HubServer, push: Push, own_copy: Path, tmp_path: Path) -> None:
    for name, word in (("verse", "YOUR-NAME/verse"), ("a/b/c", "user/name"), ("user/ve rse", "user/name")):
        assert_refused(push(own_copy, repository=name), word)
    assert_refused(push(tmp_path / "nowhere"), "is not a folder")
    (own_copy / "model.safetensors").unlink()
    assert_refused(push(own_copy), "has no model.safetensors")
    assert hub.requests == []


TOKEN = "hf_" + "a1B2" * 8
ABSOLUTE = "data:\n  path: /srv/texts/poems\ncard: {license: mit}\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("recipe.yaml", ABSOLUTE, ["recipe.yaml:2", "/srv/texts/poems", "--shorten-paths", "--allow"]),
        ("generation_config.json", f'{{"note": "{TOKEN}"}}', ["generation_config.json:1", "hf_a1B2…", "revoke"]),
        ("recipe.yaml", "data: {path: poems}\n", ["license: unknown", "--license"]),
    ],
)
def test_what_must_not_be_published_is_not_sent(hub, push, own_copy, name, text, words) -> None:
    (own_copy / name).write_text(text)
    done = push(own_copy)
    assert_refused(done, *words)
    assert "a1B2a1B2" not in done.stderr
    assert hub.requests == []


def test_paths_are_shortened_or_allowed_when_asked_for(hub: HubServer, push: Push, own_copy: Path) -> None:
    (own_copy / "recipe.yaml").write_text(ABSOLUTE)
    done = push(own_copy, "--shorten-paths")
    assert done.returncode == 0, done.stderr
    repository = hub.repository("user/verse")
    assert repository.read("recipe.yaml") == b"data:\n  path: poems\ncard: {license: mit}\n"
    assert push(own_copy, "--allow", "/srv/texts").returncode == 0
    assert b"/srv/texts/poems" in repository.read("recipe.yaml")


def test_a_repository_with_something_else_is_left_alone(hub: HubServer, push: Push, small_checkpoint: Path) -> None:
    repository = hub.create("user/verse")
    repository.add({"config.json": b'{"model_type": "bert"}', "pytorch_model.bin": b"\0" * 10, "LICENSE": b"mine"})
    before = repository.history()[0]
    assert_refused(push(small_checkpoint), "holds a model of type bert", "tercet", "--replace")
    assert repository.history()[0] == before
    assert hub.requests_to(CHANGES) == []
    assert push(small_checkpoint, "--replace").returncode == 0
    assert "pytorch_model.bin" not in repository.files()
    assert repository.read("LICENSE") == b"mine"
    data = hub.create("user/rows")
    data.add({"rows.parquet": b"PAR1"})
    done = push(small_checkpoint, repository="user/rows")
    assert_refused(done, "holds 1 file and no model", "rows.parquet")


def test_visibility_and_tags_that_are_there_already(
    hub: HubServer, push: Push, small_checkpoint: Path, own_copy: Path
) -> None:
    repository = hub.create("user/verse")
    assert_refused(push(small_checkpoint, "--private"), "is public and should be private")
    assert push(small_checkpoint, "--tag-step").returncode == 0
    assert push(small_checkpoint, "--tag-step").returncode == 0  # the very same
    (own_copy / "generation_config.json").write_text("{}")
    before = repository.history()[0].oid
    assert_refused(push(own_copy, "--tag-step"), "has a tag step-640 already")
    assert repository.branches["main"] == before


def test_further_files_are_included_and_inspected(hub: HubServer, push: Push, own_copy: Path) -> None:
    (own_copy / "tour.ipynb").write_text(json.dumps({"cells": [{"source": ["open('/home/poet/secret.txt')"]}]}))
    assert_refused(push(own_copy, "--include", "*.ipynb"), "tour.ipynb:1", "/home/poet/secret.txt")
    (own_copy / "tour.ipynb").write_text(json.dumps({"cells": [{"source": ["open('poems.txt')"]}]}))
    assert push(own_copy, "--include", "*.ipynb").returncode == 0
    assert "tour.ipynb" in hub.repository("user/verse").files()


@pytest.mark.slow
def test_an_export_in_place_and_beside(
    hub: HubServer, push: Push, small_tokenizer, small_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "llama-like", small_tokenizer, preset="llama")
    done = push(checkpoint, "--export", "llama", "--beside")
    assert done.returncode == 0, done.stderr
    repository = hub.repository("user/verse")
    files = set(repository.files())
    assert {"modeling_tercet.py", "model.safetensors", "llama/model.safetensors", "llama/tokenizer.json"} <= files
    assert json.loads(repository.read("llama/config.json"))["model_type"] == "llama"
    assert 'subfolder="llama"' in repository.read("README.md").decode()
    done = push(checkpoint, "--export", "llama")
    assert done.returncode == 0, done.stderr
    assert 'AutoModelForCausalLM.from_pretrained("user/verse")\n' in done.stdout
    files = set(repository.files())
    assert {"recipe.yaml", "results.json", "metrics.jsonl", "loss.png", "model.safetensors"} <= files
    assert not [name for name in files if name.endswith(".py") or "/" in name]
    card = repository.read("README.md").decode()
    assert "trust_remote_code" not in card
    assert "custom_code" not in card
    assert json.loads(repository.read("config.json"))["model_type"] == "llama"
    assert_refused(push(small_checkpoint, "--export", "llama"), "llama cannot express", "--export gpt2 can")


@pytest.mark.slow
def test_the_lines_it_prints_load_the_model(hub: HubServer, small_checkpoint: Path) -> None:
    done = push_apart(hub, small_checkpoint, "--private")
    lines = done.stdout.splitlines()[-2:]
    code = "\n".join(
        ["from transformers import AutoModelForCausalLM, AutoTokenizer", *lines,
         "ids = tokenizer('The moon', return_tensors='pt')", "print(model(**ids).logits.shape[-1], len(tokenizer))"]
    )  # fmt: skip
    loaded = run_python(hub, code, without_tercet=True)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == ["1024", "1024"]


@pytest.mark.slow
def test_an_imported_model_is_pushed_and_loads(hub: HubServer, small_tokenizer, tmp_path: Path) -> None:
    """Out to Llama and back in: neither folder has a run's record, and both can be published."""
    from tercet.interop.folders import export_checkpoint, import_checkpoint

    checkpoint = write_checkpoint(tmp_path / "llama-like", small_tokenizer, preset="llama")
    export_checkpoint(checkpoint, tmp_path / "native", "llama")
    import_checkpoint(tmp_path / "native", tmp_path / "imported")
    scored = []
    for folder in ("imported", "native"):
        done = push_apart(hub, tmp_path / folder, "--license", "mit", "--branch", folder)
        assert done.returncode == 0, done.stderr
        assert "No run is on record here" in hub.repository("user/verse").read("README.md", folder).decode()
        code = "\n".join(
            ["from transformers import AutoModelForCausalLM, AutoTokenizer", *done.stdout.splitlines()[-2:],
             "print(model(**tokenizer('The moon', return_tensors='pt')).logits.double().sum().item())"]
        )  # fmt: skip
        loaded = run_python(hub, code, without_tercet=True)
        assert loaded.returncode == 0, loaded.stderr
        scored.append(float(loaded.stdout))
    assert scored[0] == pytest.approx(scored[1], rel=1e-4)


def test_native_families_are_those_that_exports_know() -> None:
    from tercet.hub.options import NATIVE_FAMILIES
    from tercet.interop.configs import FAMILIES

    assert set(NATIVE_FAMILIES) == set(FAMILIES)


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once_and_the_same_command_goes_on(hub: HubServer, small_checkpoint: Path, tmp_path) -> None:
    """huggingface_hub alone would wait for the file that is under way."""
    (tmp_path / "temporary").mkdir()
    hub.faults.add("PUT /upload/", slow=100, times=2)
    command = [sys.executable, "-m", "tercet.hub", "push", small_checkpoint, "user/verse", "--branch", "b"]
    environment = {**hub.environment(), "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while not hub.requests_to("objects/batch") and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=50)  # half of what the upload takes
    finally:
        process.kill()
    assert process.returncode == 2
    assert shown.splitlines()[-1].startswith("tercet: stopped;")
    assert list((tmp_path / "temporary").glob("tercet-*")) == []
    assert set(hub.repository("user/verse").branches) == {"main"}
    assert push_apart(hub, small_checkpoint, "--branch", "b").returncode == 0
    assert "model.safetensors" in hub.repository("user/verse").files("b")
