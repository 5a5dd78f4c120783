"""Commands that take a checkpoint take the name of a model on the Hub as well."""

import sys

import pytest
from hub_server.clients import run_client

TERCET = [sys.executable, "-m", "tercet"]


def refusal(done) -> str:
    """The line that a command ends with; bitsandbytes, where it is installed, may have said something before."""
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("Failed to load CPU gemm")]
    return line


@pytest.fixture
def on_hub(hub, trained):
    """The Hub, with a run's folder as user/verse."""
    hub.create("user/verse").add_folder(trained)
    return hub


def test_generate_as_from_the_folder(on_hub, trained, tmp_path):
    arguments = ["The string", "--max-new-tokens", "8", "--temperature", "0"]
    done = run_client(on_hub, [*TERCET, "generate", "user/verse", *arguments], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    here = run_client(on_hub, [*TERCET, "generate", trained, *arguments], folder=tmp_path)
    assert done.stdout == here.stdout != ""


def test_info_downloads_no_weights(on_hub, tmp_path):
    done = run_client(on_hub, [*TERCET, "info", "user/verse"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "hidden_size" in done.stdout
    assert not any("safetensors" in record.line for record in on_hub.requests)


def test_eval_leaves_the_cache_as_it_is(on_hub, trained, tmp_path):
    """What is measured of a Hub's model is not noted in the Hub's own record of it."""
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 60, "utf-8")
    done = run_client(on_hub, [*TERCET, "eval", "user/verse", "--data", "text.txt"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout
    (copy,) = tmp_path.rglob("models--user--verse/snapshots/*/results.json")
    assert copy.read_bytes() == (trained / "results.json").read_bytes()


def test_code_of_others_is_not_run(on_hub, trained, tmp_path):
    """Tercet's own classes load a checkpoint whose folder brings code of that name."""
    on_hub.repository("user/verse").add({"modeling_tercet.py": "raise SystemExit('ran')"})
    done = run_client(on_hub, [*TERCET, "generate", "user/verse", "--max-new-tokens", "2"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("modeling_tercet.py"))


@pytest.mark.parametrize("name", ["user/none", "none"])
def test_a_name_that_the_hub_does_not_have(on_hub, tmp_path, name):
    done = run_client(on_hub, [*TERCET, "generate", name, "x"], folder=tmp_path)
    assert refusal(done).startswith(f"tercet: {name} is no folder here and no model on the Hub")


def test_a_slip_in_a_path_asks_no_hub(on_hub, tmp_path):
    (tmp_path / "user").mkdir()
    done = run_client(on_hub, [*TERCET, "generate", "user/verse", "x"], folder=tmp_path)
    assert refusal(done).startswith("tercet: user/verse is no folder: give a checkpoint")
    assert on_hub.requests == []


def test_offline(on_hub, tmp_path):
    done = run_client(on_hub, [*TERCET, "info", "user/verse"], folder=tmp_path, environment={"HF_HUB_OFFLINE": "1"})
    assert "is no folder here, and as a model on the Hub it is not in the cache" in refusal(done)
