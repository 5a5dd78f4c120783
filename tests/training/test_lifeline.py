"""A process that stops, in whatever way, ends the others soon, and they say why."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tercet.training.errors import UserError
from tercet.training.lifeline import LostProcessError, lifeline

# The others are gone well before; only an error of ours, or a machine that stands still, takes longer.
PATIENCE_S = 60


def process(rank, size, store, behave, log):
    """One process of a run, forked: what it says goes to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    accelerator = SimpleNamespace(process_index=rank, num_processes=size)
    try:
        with lifeline(accelerator) as line:  # type: ignore[arg-type]
            behave(rank, line)
    except UserError as error:
        sys.stderr.write(f"raised {type(error).__name__}: {error}\n")
        os._exit(2)
    except BaseException as error:
        sys.stderr.write(f"raised {type(error).__name__}: {error}\n")
        os._exit(1)
    os._exit(0)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `behave(rank, line)` in some processes; returns their exit codes and what each said."""
    # As where all are on one machine, and started by hand: nobody but the lifeline ends them.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr("tercet.training.lifeline._GRACE_S", 0.7)
    context = multiprocessing.get_context("fork")

    def run(behave, size=3):
        logs = [tmp_path / f"said-{rank}" for rank in range(size)]
        processes = [
            context.Process(target=process, args=(rank, size, tmp_path / "store", behave, logs[rank]))
            for rank in range(size)
        ]
        for one in processes:
            one.start()
        deadline = time.monotonic() + PATIENCE_S
        # Not `join`, which also waits for children of theirs.
        while any(one.is_alive() for one in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        late = [rank for rank, one in enumerate(processes) if one.is_alive()]
        for one in processes:
            one.kill()
        assert not late, f"processes {late} did not stop; they said {[log.read_text() for log in logs]}"
        return [one.exitcode for one in processes], [log.read_text() for log in logs]

    return run


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_by_those_that_wait_for_it(run, victim):
    def behave(rank, line):
        if rank == victim:
            die()
        time.sleep(10 * PATIENCE_S)  # as in a collective on a GPU, which no signal and no exception ends

    codes, said = run(behave)
    assert codes[victim] == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        assert codes[rank] == 2
        assert f"tercet: process {victim} has died" in said[rank]
        assert f"process {rank} stops with it" in said[rank]
        assert said[rank].count("\n") == 1


def test_a_collective_that_breaks_off_is_one_line(run):
    """Under gloo the others get an error of the network; what they report is the process that is gone."""

    def behave(rank, line):
        dist.barrier()
        if rank == 1:
            die()
        dist.all_reduce(torch.ones(1))

    codes, said = run(behave)
    assert codes == [2, -signal.SIGKILL, 2]
    for rank in (0, 2):
        assert "process 1 has died" in said[rank]
        assert said[rank].count("\n") == 1


@pytest.mark.parametrize("culprit", [0, 2])
def test_the_reason_of_one_is_told_by_all(run, culprit):
    def behave(rank, line):
        if rank == culprit:
            raise UserError("the disk of this machine is full")
        time.sleep(10 * PATIENCE_S)

    codes, said = run(behave)
    assert codes == [2, 2, 2]
    assert said[culprit] == "raised UserError: the disk of this machine is full\n"
    for rank in {0, 1, 2} - {culprit}:
        assert f"process {culprit} stopped: the disk of this machine is full; process {rank} stops" in said[rank]


def test_a_mistake_that_all_make_is_told_as_it_is(run):
    def behave(rank, line):
        raise UserError("no such recipe")

    codes, said = run(behave)
    assert codes == [2, 2, 2]
    assert all(text == "raised UserError: no such recipe\n" for text in said)


def test_an_error_that_is_nobody_elses_stays_itself(run):
    def behave(rank, line):
        if rank == 1:
            raise RuntimeError("a bug")
        line.news_within(PATIENCE_S)

    codes, said = run(behave)
    assert codes[1] == 1
    assert "raised RuntimeError: a bug" in said[1]


def test_waiting_for_the_main_process(run, tmp_path):
    def behave(rank, line):
        if rank == 0:
            time.sleep(1.0)
            (tmp_path / "prepared").touch()
            line.main_is_ready()
        else:
            line.wait_for_main()
            assert (tmp_path / "prepared").exists()
        line.wait_for_main()  # who comes late does not wait

    codes, said = run(behave)
    assert codes == [0, 0, 0], said


def test_waiting_ends_when_the_main_process_fails(run):
    def behave(rank, line):
        if rank == 0:
            raise UserError("no such file: text")
        line.wait_for_main()

    codes, said = run(behave)
    assert codes == [2, 2, 2]
    for rank in (1, 2):
        assert f"raised {LostProcessError.__name__}: process 0 stopped: no such file: text" in said[rank]


def test_who_is_done_first_ends_nobody(run, tmp_path):
    def behave(rank, line):
        if rank == 1:
            return
        time.sleep(1.5)
        (tmp_path / f"done-{rank}").touch()

    codes, said = run(behave)
    assert codes == [0, 0, 0], said
    assert (tmp_path / "done-0").exists() and (tmp_path / "done-2").exists()


def test_a_child_does_not_keep_its_parent_alive(run):
    """A forked worker that outlives its process must not hold the line for it."""

    def behave(rank, line):
        if rank == 0:
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            die()
        time.sleep(10 * PATIENCE_S)

    started = time.monotonic()
    codes, said = run(behave, size=2)
    assert codes[1] == 2 and "process 0 has died" in said[1]
    assert time.monotonic() - started < 15


def test_strangers_are_not_listened_to(monkeypatch):
    """Another program that finds the port says nothing that ends a run."""
    import socket

    from tercet.training.lifeline import _listen, _Watcher

    watcher = _Watcher(_listen(True), "token")
    with socket.create_connection(("127.0.0.1", watcher.port)) as stranger:
        stranger.sendall(b"hello guess 1\nstopped because\n")
        stranger.settimeout(10)
        assert stranger.recv(10) == b""  # hung up
    assert watcher.news_within(0.1) is None
    watcher.leave(None)


def test_one_process_has_no_line():
    before = threading.enumerate()
    with lifeline(SimpleNamespace(process_index=0, num_processes=1)) as line:  # type: ignore[arg-type]
        line.main_is_ready()
        line.wait_for_main()
        assert threading.enumerate() == before, "nobody is there to be watched"
