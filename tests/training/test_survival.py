"""What a run lives through: damaged checkpoints, full disks, signals, deadlines, a second run in its folder."""

import errno
import fcntl
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from resumed_runs import assert_same_run, dying_step, losses, silently, train_until_killed, weights
from safetensors import SafetensorError

import tercet.training.loop as loop_module
import tercet.training.pipeline as pipeline_module
from tercet.training.atomic import is_disk_full
from tercet.training.checkpoints import CHECKPOINTS, list_checkpoints, newest_whole, read_state
from tercet.training.deadline import Deadline
from tercet.training.errors import UserError
from tercet.training.lock import LOCK_NAME, run_lock
from tercet.training.pipeline import train
from tercet.training.retention import Retention
from tercet.training.run_folder import RECIPE_NAME


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


@pytest.fixture
def killed(killed_run, tmp_path):
    """A copy of a run that was killed after step 7: checkpoints of steps 3 and 6 are there."""
    assert names(killed_run) == ["step-00000003", "step-00000006"]
    return shutil.copytree(killed_run, tmp_path / "killed")


class TestDamage:
    def test_a_byte_of_any_file(self, killed):
        """Each file of the newest checkpoint in turn, its manifest too: it is passed over, named, and kept."""
        newest = list_checkpoints(killed)[-1]
        files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
        assert {"model.safetensors", "config.json", "state/run.json", "state/manifest.json", RECIPE_NAME} <= set(
            map(str, files)
        )
        for file in files:
            path, said = newest / file, []
            content = path.read_bytes()
            middle = len(content) // 2
            damaged = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            path.write_bytes(damaged)
            assert newest_whole(killed, said.append).name == "step-00000003", file
            assert len(said) == 1
            # A manifest is damaged in what it says of another file.
            assert file.name in said[0] or file.name == "manifest.json"
            assert "damaged-step-00000006" in said[0]
            aside = newest.with_name("damaged-step-00000006")
            assert (aside / file).read_bytes() == damaged
            (aside / file).write_bytes(content)
            aside.rename(newest)
        assert newest_whole(killed, said.append) == newest

    @pytest.mark.parametrize("file", ["state/optimizer-1.safetensors", "state/manifest.json", "tokenizer.json"])
    def test_a_missing_file(self, killed, file):
        (list_checkpoints(killed)[-1] / file).unlink()
        said = []
        assert newest_whole(killed, said.append).name == "step-00000003"
        assert file.rpartition("/")[2] in said[0]

    def test_the_run_goes_on_from_the_one_before_to_the_same_bits(self, killed, make_recipe, untouched, capsys):
        path = list_checkpoints(killed)[-1] / "state" / "optimizer-0.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        train(make_recipe(), output_dir=killed, say=silently)
        assert "step-00000006 is damaged (state/optimizer-0.safetensors has" in capsys.readouterr().out
        assert_same_run(killed, untouched)
        assert (killed / CHECKPOINTS / "damaged-step-00000006").is_dir()

    def test_none_is_whole(self, killed, make_recipe):
        for folder in list_checkpoints(killed):
            (folder / "model.safetensors").write_bytes(b"not tensors")
        with pytest.raises(UserError, match=r"no checkpoint .* is whole .*model.safetensors has 11 bytes.*--restart"):
            train(make_recipe(), output_dir=killed, say=silently)
        assert names(killed) == ["step-00000003", "step-00000006"]

    def test_what_is_no_file_of_the_checkpoint_does_not_matter(self, killed):
        newest = list_checkpoints(killed)[-1]
        (newest / ".DS_Store").write_bytes(b"a file manager was here")
        assert newest_whole(killed, silently) == newest


class TestFullDisk:
    def test_the_checkpoint_before_survives(self, make_recipe, tmp_path, untouched, monkeypatch):
        """The system refuses to put the second checkpoint on the disk."""
        folder, real_fsync = tmp_path / "run", os.fsync

        def fsync(descriptor):
            if "writing-step-00000006" in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real_fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(UserError, match=r"could not be saved .*the disk is full.*free some.*step-00000003"):
                train(make_recipe(), output_dir=folder, say=silently)
        assert names(folder) == ["step-00000003"]
        assert not list((folder / CHECKPOINTS).glob(".writing-*"))
        train(make_recipe(), output_dir=folder, say=silently)
        assert_same_run(folder, untouched)

    def test_the_prepared_text_survives_without_one(self, make_recipe, tmp_path, untouched, monkeypatch):
        """The very first checkpoint finds no room; the text, which may have taken hours, is not prepared again."""
        folder, real_fsync, said = tmp_path / "run", os.fsync, []

        def fsync(descriptor):
            if "writing-step-00000003" in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real_fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(UserError, match=r"the disk is full.*goes on from the start"):
                train(make_recipe(), output_dir=folder, say=silently)
        shards = {path: path.stat().st_mtime_ns for path in (folder / "data").rglob("*") if path.is_file()}
        assert shards
        train(make_recipe(), output_dir=folder, say=said.append)
        assert all(path.stat().st_mtime_ns == written for path, written in shards.items())
        assert_same_run(folder, untouched)

    @pytest.mark.skipif(sys.platform != "linux", reason="limits its own files as Linux does")
    def test_a_file_that_may_not_be_so_large(self, make_recipe, tmp_path, monkeypatch):
        """The limit is said by safetensors, in words, and not by Python."""
        folder, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
        set_limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE)

        def limit(model):
            if names(folder):
                set_limit((20_000, limits[1]))

        monkeypatch.setattr(loop_module, "training_step", dying_step(100, limit))
        try:
            with pytest.raises(UserError, match=r"became larger than .*ulimit -f.*raise the limit.*from step-00000003"):
                train(make_recipe(), output_dir=folder, say=silently)
        finally:
            set_limit(limits)
        assert names(folder) == ["step-00000003"]

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_quotas_are_disks_too(self, number):
        in_words = SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")
        assert is_disk_full(in_words)
        assert is_disk_full(OSError(number, os.strerror(number)))
        assert not is_disk_full(SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)"))

    def test_a_disk_that_is_really_full(self, make_recipe, tmp_path, untouched, monkeypatch):
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("needs the right to mount a small file system")
        try:
            filler = disk / "filler"

            def fill(model):
                if not filler.exists() and names(disk / "run"):
                    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                    filler.write_bytes(b"x" * (free - 100_000))

            with monkeypatch.context() as patch:
                patch.setattr(loop_module, "training_step", dying_step(100, fill))
                with pytest.raises(UserError, match="the disk is full"):
                    train(make_recipe(), output_dir=disk / "run", say=silently)
            assert names(disk / "run") == ["step-00000003"]
            filler.unlink()
            train(make_recipe(), output_dir=disk / "run", say=silently)
            assert_same_run(disk / "run", untouched)
        finally:
            gc.collect()  # the error that was caught holds the run's mapped shards in a cycle
            subprocess.run(["umount", str(disk)], check=True)


def test_training_goes_on_while_a_checkpoint_is_written(make_recipe, tmp_path, monkeypatch):
    """The first save is held up until two more steps are done, and still writes what was there when it began."""
    seen, may_write, real_write = [], threading.Event(), pipeline_module.write_model_folder

    def slow_write(model, tokenizer, path, weights):
        assert may_write.wait(60)
        real_write(model, tokenizer, path, weights)

    def watch(model):
        seen.append(model.model.embed_tokens.weight.detach().clone())
        if len(seen) == 6:
            may_write.set()

    monkeypatch.setattr(pipeline_module, "write_model_folder", slow_write)
    train_until_killed(make_recipe(training={"save_every": 3}), tmp_path / "run", 7, watch)
    (first, *_) = list_checkpoints(tmp_path / "run")
    assert first.name == "step-00000003"
    assert torch.equal(weights(first)["model.embed_tokens.weight"], seen[3])
    assert not torch.equal(seen[3], seen[5])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_within_the_step(make_recipe, tmp_path, untouched, monkeypatch, number):
    calls = []

    def send(model):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "training_step", dying_step(100, send))
        outcome = train(make_recipe(), output_dir=tmp_path / "run", say=silently)
    assert outcome.loop.interrupted_by == number.name
    assert outcome.loop.checkpoint.name == "step-00000005"
    assert names(tmp_path / "run")[-1] == "step-00000005"
    train(make_recipe(), output_dir=tmp_path / "run", say=silently)
    assert_same_run(tmp_path / "run", untouched)


class TestDeadline:
    def test_the_time_is_over_before_the_first_step(self, make_recipe, tmp_path, untouched):
        outcome = train(make_recipe(training={"max_hours": 1e-6}), output_dir=tmp_path / "run", say=silently)
        assert outcome.loop.state.step == 1
        assert "training.max_hours" in outcome.loop.interrupted_by
        assert names(tmp_path / "run") == ["step-00000001"]
        train(make_recipe(training={"max_hours": 1.0}), output_dir=tmp_path / "run", say=silently)
        assert_same_run(tmp_path / "run", untouched)

    def test_a_step_and_a_save_fit_in_before_the_end(self):
        """Steps of 10 s, every fifth of 25 s, and saves of 30 s within 1000 s: it ends in time, and not much before."""
        now = [0.0]
        deadline = Deadline(0.0, 1000.0, save_s=5.0, clock=lambda: now[0])
        deadline.save_done(30.0)
        now[0] += 200.0  # the first step compiles; no later one will
        deadline.step_done()
        for step in range(2, 100):
            if deadline.is_near():
                break
            now[0] += 25.0 if step % 5 == 0 else 10.0
            deadline.step_done()
        assert 1000.0 - 25.0 - 30.0 - 25.0 <= now[0] <= 1000.0 - 30.0

    def test_a_save_that_is_under_way_must_end_first(self):
        deadline = Deadline(0.0, 100.0, save_s=40.0, clock=lambda: 30.0)
        assert not deadline.is_near()
        assert deadline.is_near(saves=2)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_run_that_goes_on_lets_go_of_the_checkpoint(killed, make_recipe, monkeypatch):
    """A file that is still mapped keeps its place on the disk after it was removed, and on NFS its folder."""
    mapped = []

    def look(model):
        with open("/proc/self/maps") as maps:
            mapped.append([line for line in maps if str(killed) in line and "checkpoints" in line])

    monkeypatch.setattr(loop_module, "training_step", dying_step(100, look))
    train(make_recipe(), output_dir=killed, say=silently)
    assert mapped == [[], []]  # in steps 7 and 8


class TestLock:
    def test_two_runs_in_one_folder(self, make_recipe, tmp_path):
        (tmp_path / "run").mkdir()
        with (
            run_lock(tmp_path / "run"),
            pytest.raises(UserError, match=rf"in use by another run \(process {os.getpid()} on "),
        ):
            train(make_recipe(), output_dir=tmp_path / "run", say=silently)
        assert not (tmp_path / "run").exists()  # it was empty but for the lock

    def test_a_killed_holder_locks_nothing(self, tmp_path):
        script = (
            "import sys, time\nfrom pathlib import Path\nfrom tercet.training.lock import run_lock\n"
            "with run_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
        )
        holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(UserError, match=f"process {holder.pid} on "), run_lock(tmp_path):
                pass
        finally:
            holder.kill()
            holder.wait()
        assert (tmp_path / LOCK_NAME).exists()
        with run_lock(tmp_path):
            pass

    def test_a_file_system_without_locks_is_named(self, make_recipe, tmp_path, monkeypatch):
        def no_locks(descriptor, operation):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", no_locks)
        (tmp_path / "run").mkdir()
        with pytest.raises(UserError, match=rf"run: its file system keeps no locks \({os.strerror(errno.ENOLCK)}\)"):
            train(make_recipe(), output_dir=tmp_path / "run", say=silently)
        assert list((tmp_path / "run").iterdir()) == []

    def test_restart_keeps_the_lock(self, make_recipe, tmp_path, monkeypatch):
        folder, found = tmp_path / "run", []
        train_until_killed(make_recipe(), folder, 4)

        def try_to_lock(model):
            try:
                with run_lock(folder):
                    found.append("free")
            except UserError:
                found.append("locked")

        monkeypatch.setattr(loop_module, "training_step", dying_step(100, try_to_lock))
        train(make_recipe(training={"num_steps": 2}), output_dir=folder, restart=True, say=silently)
        assert found == ["locked", "locked"]
        assert not (folder / LOCK_NAME).exists()


class TestRetention:
    @pytest.mark.parametrize(
        ("retention", "best", "gone"),
        [
            (Retention(2), None, [10, 20, 30]),
            (Retention(1, keep_every=20), None, [10, 30]),
            (Retention(1, keep_best=True), 20, [10, 30, 40]),
            (Retention(1), 20, [10, 20, 30, 40]),
            (Retention(9), None, []),
        ],
    )
    def test_what_goes(self, retention, best, gone):
        assert retention.to_remove([30, 10, 20, 50, 40], best) == gone

    def test_every_so_many_and_the_best_stay(self, make_recipe, tmp_path):
        """The loss rises at once with this learning rate, so the first evaluation stays the best, over a kill, too."""
        recipe = make_recipe(
            optimizer={"learning_rate": 30.0, "warmup_steps": 0},
            training={"evaluate_every": 1, "save_every": 2, "keep_every": 4, "keep_last": 1, "keep_best": True},
        )
        train_until_killed(recipe, tmp_path / "run", 7)
        train(recipe, output_dir=tmp_path / "run", say=silently)
        best = min(
            (record["validation_bits_per_byte"], record["step"])
            for record in losses(tmp_path / "run")
            if "validation_bits_per_byte" in record
        )[1]
        assert names(tmp_path / "run") == [f"step-{step:08d}" for step in sorted({best, 4, 8})]
        assert best not in (4, 8)


def test_an_evaluation_that_is_no_number_ends_no_run(make_recipe, tmp_path, monkeypatch, capsys):
    """The first one, of weights that are broken for one step; it is told, and stands in the way of none behind it."""
    folder, whole = tmp_path / "run", []

    def break_and_mend(model):
        weight = model.model.norm.weight
        whole.append(weight.detach().clone())
        with torch.no_grad():
            weight.copy_(weight * float("nan") if len(whole) == 4 else whole[3] if len(whole) == 5 else weight)

    monkeypatch.setattr(loop_module, "training_step", dying_step(100, break_and_mend))
    train(make_recipe(training={"keep_best": True}), output_dir=folder, say=silently)
    assert "step      4   validation: the loss of the text is nan" in capsys.readouterr().out
    records = [record for record in losses(folder) if any("validation" in name for name in record)]
    assert records[0] == {"step": 4, "validation_not_finite": True}
    assert [record["step"] for record in records if "validation_bits_per_byte" in record] == [8]
    assert read_state(list_checkpoints(folder)[-1]).best_step == 8


def test_a_changed_tokenizer_is_named(killed, make_recipe, tmp_path):
    """Another tokenizer in the run's folder: the shards would be made anew, and the weights mean something else."""
    other = tmp_path / "other"
    train(make_recipe(tokenizer={"vocab_size": 280}, training={"num_steps": 1}), output_dir=other, say=silently)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(other / name, killed / name)
    with pytest.raises(UserError, match="the tokenizer is another than that of"):
        train(make_recipe(), output_dir=killed, say=silently)
