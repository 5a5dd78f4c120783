"""Pushes while training goes on: what arrives, and that the run does not care whether anything does."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from hub_server.clients import run_client
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file

from small_runs import small_settings
from tercet.training.atomic import TEMPORARY_PREFIX
from tercet.training.hub_section import HubSection
from tercet.training.publishing import Publisher

STEPS = ["training.num_steps=6", "training.save_every=6", "training.evaluate_every=2", "training.keep_last=1"]
TRAIN = (sys.executable, "-m", "tercet.training")


@pytest.fixture(scope="session")
def text_file(small_corpus, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("\n\n".join(small_corpus[:20]), encoding="utf-8")
    return path


@pytest.fixture
def words(text_file: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """A recipe's words; the text lies where the run begins, so its path is none that tells of the machine."""
    (tmp_path / "book.txt").write_bytes(text_file.read_bytes())

    def make(*settings: str, output: str = "run") -> list[str]:
        settings = ("data.path=book.txt", *STEPS, *settings)
        return [*TRAIN, "shakespeare", *small_settings(*settings), "-o", output]

    return make


HUB = ["card.license=mit", "hub.repo_id=user/live", "hub.every_steps=2"]


def train(hub: HubServer, words: list[str], folder: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    return run_client(hub, words, folder=folder, **settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_checkpoints_arrive_with_tags_and_cards(hub: HubServer, words, tmp_path: Path) -> None:
    """Retention keeps one checkpoint, so what is pushed has been removed underneath."""
    done = train(hub, words(*HUB), tmp_path)
    assert done.returncode == 0, done.stderr
    repository = hub.repository("user/live")
    assert repository.is_private
    # Pushes take as long as they take, and only the newest waits: the last is always there.
    pushed = [int(step) for step in re.findall(r"step +(\d+)   pushed to ", done.stdout)]
    assert pushed[-1] == 6
    assert set(pushed) <= {2, 4, 6}
    assert set(repository.tags) == {f"step-{step}" for step in pushed}
    assert len(repository.history()) == len(pushed) + 1
    assert re.search(rf"Hub +{len(pushed)} pushed, 0 failed", done.stdout)
    for step in pushed:
        card = ModelCard(repository.read("README.md", f"step-{step}").decode())
        assert f"| Steps | {step} |" in card.text
        assert {item.metric_type for item in card.data.eval_results} == {"bits_per_byte", "loss", "perplexity"}
        files = set(repository.files(f"step-{step}"))
        assert {"model.safetensors", "modeling_tercet.py", "tokenizer.json", "loss.png", "metrics.jsonl"} <= files
        assert not [name for name in files if "/" in name or "optimizer" in name]
    assert_same_weights(load(repository.read("model.safetensors")), weights(tmp_path / "run"))
    held = load(repository.read("model.safetensors", f"step-{pushed[0]}"))
    assert any(not torch.equal(held[name], tensor) for name, tensor in weights(tmp_path / "run").items())
    assert not list((tmp_path / "run").glob(".writing*"))


@pytest.mark.slow
def test_a_run_without_a_network_ends_as_one_that_pushes_nothing(hub: HubServer, words, tmp_path: Path) -> None:
    plain = train(hub, words(output="plain"), tmp_path)
    assert plain.returncode == 0, plain.stderr
    with HubServer(tmp_path / "gone") as gone:
        pass
    done = train(hub, words(*HUB, "hub.wait_s=3"), tmp_path, environment={"HF_ENDPOINT": gone.endpoint})
    assert done.returncode == 0, done.stderr
    assert "cannot be reached" in done.stdout.splitlines()[0]
    assert "training begins" in done.stdout.splitlines()[0]
    assert re.search(
        r"Hub +0 pushed, [1-9] failed.*the finished model is not there.*tercet push run user/live --private sends it",
        done.stdout,
    )
    assert_same_weights(weights(tmp_path / "plain"), weights(tmp_path / "run"))
    assert not list((tmp_path / "run").glob(".writing*"))


@pytest.mark.slow
def test_of_two_processes_one_pushes(hub: HubServer, words, tmp_path: Path) -> None:
    command = words(*HUB, "training.per_device_batch_size=2")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = train(hub, [*launcher, *command[1:]], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    repository = hub.repository("user/live")
    assert done.stdout.count("   pushed to ") == len(repository.history()) - 1 == len(repository.tags)
    assert done.stdout.count("pushed, 0 failed") == 1
    assert_same_weights(load(repository.read("model.safetensors")), weights(tmp_path / "run"))


@pytest.mark.slow
def test_a_push_that_fails_is_told_and_the_next_one_works(hub: HubServer, words, tmp_path: Path) -> None:
    hub.faults.add(r"POST /api/.*/commit/", status=403)
    done = train(hub, words(*HUB), tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step +2   push failed: .*may not write", done.stdout)
    assert re.search(r"Hub +\d pushed, 1 failed", done.stdout)
    assert "step-6" in hub.repository("user/live").tags


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "client", "message"),
    [
        (["card.license=mit"], {"token": None}, "no token"),
        (["card.license=mit"], {"token": "hf_" + "nobody" * 5}, "does not know this token"),
        (["card.license=mit", "hub.repo_id=other/x"], {}, "may not write to other/x"),
        (["card.license=null"], {}, "license: unknown"),
        (["card.license=no-such-licence"], {}, "the Hub would refuse the card"),
        (["card.license=mit", "data.path={folder}/book.txt"], {}, "hub.shorten_paths: true"),
    ],
)
def test_what_could_never_be_pushed_is_refused_before_a_step(hub, words, tmp_path, settings, client, message) -> None:
    settings = [setting.format(folder=tmp_path) for setting in settings]
    done = train(hub, words("hub.repo_id=user/live", "hub.every_steps=2", *settings), tmp_path, **client)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("tercet: recipe, section hub: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_push_outlives_the_run(hub: HubServer, words, tmp_path: Path, number: signal.Signals) -> None:
    """The Hub does not answer the commit; the run is told to end, or has no say in it."""
    hub.faults.add(r"POST /api/.*/commit/", slow=120)
    command = words(*HUB, "training.num_steps=100000", "training.save_every=100000")
    run = subprocess.Popen(
        command, env=hub.environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 120
        while not hub.requests_to("/commit/") and time.monotonic() < until:
            time.sleep(0.1)
        (child,) = _children(run.pid)
        run.send_signal(number)
        out, err = run.communicate(timeout=120)
    finally:
        run.kill()
    if number == signal.SIGTERM:
        assert run.returncode == 0, err
        assert "push given up: the run was told to end" in out
        assert "Stopped by SIGTERM" in out
        assert not list((tmp_path / "run").glob(".writing*"))
    until = time.monotonic() + 20
    while _is_alive(child) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _is_alive(child)
    assert len(hub.repository("user/live").history()) == 1


def _children(parent: int) -> list[int]:
    """Processes that a process has started and that push."""
    if not Path("/proc").is_dir():
        pytest.skip("needs /proc to see processes")
    found = []
    for folder in Path("/proc").iterdir():
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text()
        except (OSError, ValueError):
            continue
        if int(state[1]) == parent and "tercet.hub.background" in command:
            found.append(int(folder.name))
    return found


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestCheckpointRecord:
    """Every checkpoint tells what was measured up to it; in this process, with no Hub."""

    def test_the_step_and_the_evaluation_of_its_own_weights(self, text_file, tmp_path):
        from tercet.hub import build_card
        from tercet.training.pipeline import train
        from tercet.training.recipe import load_recipe
        from tercet.training.results import RunResults

        settings = [word for word in small_settings(*STEPS, f"data.path={text_file}") if word != "--set"]
        settings += ["training.save_every=3", "training.evaluate_every=2", "training.keep_last=9", "card.license=mit"]
        final = train(load_recipe("shakespeare", settings), output_dir=tmp_path / "run", say=lambda line: None).results
        checkpoints = tmp_path / "run" / "checkpoints"
        records = {step: RunResults.load(checkpoints / f"step-{step:08d}" / "results.json") for step in (3, 6)}
        assert [record.training.num_steps for record in records.values()] == [3, 6]
        assert records[3].evaluation is None  # evaluated at 2 and 4
        assert records[6].evaluation == final.evaluation
        assert records[3].training.tokens_seen < records[6].training.tokens_seen == final.training.tokens_seen
        assert (records[3].data, records[3].model) == (final.data, final.model)
        assert "| Steps | 3 |" in build_card(checkpoints / "step-00000003")

    def test_of_averaged_weights_a_checkpoint_has_no_evaluation(self, text_file, tmp_path):
        """The average was evaluated, and the checkpoint's model is that of its step."""
        from tercet.training.pipeline import train
        from tercet.training.recipe import load_recipe
        from tercet.training.results import RunResults

        settings = [word for word in small_settings(*STEPS, f"data.path={text_file}") if word != "--set"]
        settings += ["optimizer.ema_decay=0.5"]
        final = train(load_recipe("shakespeare", settings), output_dir=tmp_path / "run", say=lambda line: None).results
        record = RunResults.load(tmp_path / "run" / "checkpoints" / "step-00000006" / "results.json")
        assert record.evaluation is None
        assert final.evaluation is not None
        assert "averaged" in final.training.optimizer
        assert "averaged" not in record.training.optimizer


class TestPublisher:
    """The part in the run's own process, with real processes that push."""

    @pytest.fixture
    def publisher(self, hub: HubServer, tmp_path, monkeypatch):
        for name, value in hub.environment().items():
            if name.startswith("HF_"):
                monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        said: list[str] = []
        section = HubSection(repo_id="user/live", every_steps=10, wait_s=60)
        publisher = Publisher(section, tmp_path / "run", said.append)
        yield publisher, said
        publisher.close()

    @staticmethod
    def checkpoint(small_checkpoint: Path, run: Path, step: int) -> Path:
        import json
        import shutil

        from pushed_runs import RESULTS

        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for path in small_checkpoint.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        training = {**RESULTS["training"], "num_steps": step}
        (folder / "results.json").write_text(json.dumps({**RESULTS, "training": training}))
        return folder

    def test_one_at_a_time_and_the_newest_of_those_that_wait(self, hub, publisher, small_checkpoint, tmp_path):
        import shutil

        publisher, said = publisher
        hub.faults.add("POST /api/repos/create", slow=1.0)
        for step in (10, 15, 20, 30):
            folder = self.checkpoint(small_checkpoint, tmp_path / "run", step)
            publisher.offer(folder)
            shutil.rmtree(folder)  # as retention does
            publisher.poll()
        until = time.monotonic() + 20
        while publisher.num_pushed < 2 and time.monotonic() < until:
            publisher.poll()
            time.sleep(0.02)
        assert (publisher.num_pushed, publisher.num_failed, publisher.num_replaced) == (2, 0, 1), said
        assert set(hub.repository("user/live").tags) == {"step-10", "step-30"}
        assert [line.split()[1] for line in said] == ["10", "30"]
        assert not list((tmp_path / "run").glob(".writing*"))

    def test_a_poll_does_not_wait_for_the_hub(self, hub, publisher, small_checkpoint, tmp_path):
        publisher, said = publisher
        hub.faults.add("GET /api/", slow=30.0)
        publisher.offer(self.checkpoint(small_checkpoint, tmp_path / "run", 10))
        for _ in range(100):
            publisher.poll()
        assert publisher._pushing is not None
        assert publisher._pushing[1].is_running
        assert said == []
        publisher.close()
        assert not list((tmp_path / "run").glob(".writing*"))

    @pytest.mark.parametrize(
        ("settings", "command"),
        [
            ({}, "tercet push {run} user/live --private --tag-step"),
            ({"every_steps": 10}, "tercet push {run} user/live --private"),  # the tag may be on the checkpoint
            ({"private": False, "branch": "b", "tag": False}, "tercet push {run} user/live --public --branch b"),
            ({"shorten_paths": True, "allow": ["a b"]},
             "tercet push {run} user/live --private --tag-step --shorten-paths --allow 'a b'"),
        ],
    )  # fmt: skip
    def test_the_command_that_is_left_to_the_user_does_what_the_recipe_says(self, tmp_path, settings, command):
        """Above all it makes no private model public."""
        said: list[str] = []
        section = HubSection(repo_id="user/live", wait_s=0, **settings)
        Publisher(section, tmp_path / "run", said.append).finish(10, None)
        assert f": {command.format(run=tmp_path / 'run')} sends it" in said[-1]

    def test_a_machine_that_starts_no_process_is_no_reason_to_end_the_run(
        self, small_checkpoint, tmp_path, monkeypatch
    ):
        said: list[str] = []
        publisher = Publisher(HubSection(repo_id="user/live", every_steps=10), tmp_path / "run", said.append)
        monkeypatch.setattr("sys.executable", str(tmp_path / "nowhere"))
        publisher.offer(self.checkpoint(small_checkpoint, tmp_path / "run", 10))
        publisher.poll()
        assert said == ["step     10   not pushed: no process could be started (No such file or directory)"]
        publisher.finish(10, None)
        assert publisher.num_failed == 2
        assert "the finished model is not there" in said[-1]
        assert not list((tmp_path / "run").glob(f"{TEMPORARY_PREFIX}push-step*"))

    def test_the_last_words_of_a_process_that_broke_are_told(self, small_checkpoint, tmp_path, monkeypatch):
        said: list[str] = []
        publisher = Publisher(HubSection(repo_id="user/live", every_steps=10), tmp_path / "run", said.append)
        program = tmp_path / "python"
        program.write_text("#!/bin/sh\necho first >&2\necho 'ImportError: no such library' >&2\nexit 3\n")
        program.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(program))
        publisher.offer(self.checkpoint(small_checkpoint, tmp_path / "run", 10))
        until = time.monotonic() + 20
        while not said and time.monotonic() < until:
            publisher.poll()
            time.sleep(0.02)
        assert said == [
            "step     10   push failed: the process that pushes ended with exit code 3 (ImportError: no such library)"
        ]
        publisher.close()
