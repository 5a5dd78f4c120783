"""kill -9 at any moment, many times: the run ends with the bits of one that was never touched."""

import random
import subprocess
import sys
import time

import pytest
from forked_runs import is_saving, kill_tree, newest_step, train_through_kills
from resumed_runs import assert_same_run, silently

from tercet.training.pipeline import train
from tercet.training.recipe import recipe_from_fields, recipe_to_yaml

# A save at every step, so that a kill at a random moment often hits one.
TRAINING = {"save_every": 1, "evaluate_every": 50, "log_every": 1, "keep_last": 3}


def test_one_process_killed_many_times(make_recipe, tmp_path):
    recipe = make_recipe(training={**TRAINING, "num_steps": 80}, optimizer={"ema_decay": 0.9})
    assert train_through_kills(recipe, tmp_path / "killed") >= 1  # of the two that were aimed at a save
    train(recipe, output_dir=tmp_path / "untouched", say=silently)
    assert_same_run(tmp_path / "killed", tmp_path / "untouched")


@pytest.fixture(scope="module")
def two_processes(text_folder, make_fields, tmp_path_factory):
    """Starts a run of two processes under torchrun in a folder; and the folder of one that nothing has stopped."""
    home = tmp_path_factory.mktemp("two-processes")
    fields = make_fields(text_folder)
    fields["training"] |= {**TRAINING, "num_steps": 300, "evaluate_every": 100, "log_every": 5}
    (home / "recipe.yaml").write_text(recipe_to_yaml(recipe_from_fields(fields)))

    def start(folder):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                   "-m", "tercet.training", str(home / "recipe.yaml"), "--output", str(folder)]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    run_to_its_end(start(home / "untouched"))
    return start, home / "untouched"


def run_to_its_end(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "2 processes" in output


@pytest.mark.slow  # two processes that each import torch, more than twenty times in all
@pytest.mark.parametrize("in_a_save", [True, False], ids=["in a save", "at any moment"])
def test_two_processes_killed_many_times(two_processes, tmp_path, in_a_save):
    """A real run of two processes under torchrun, the launcher and all that it started killed 11 times."""
    (start, untouched), folder = two_processes, tmp_path / "killed"
    num_kills, hits, dice = 11, 0, random.Random(0)
    for _ in range(num_kills):
        begun_at, process, deadline = newest_step(folder), start(folder), time.monotonic() + 120
        try:
            while newest_step(folder) <= begun_at and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            if not in_a_save:
                time.sleep(dice.uniform(0, 0.5))
            while in_a_save and not is_saving(folder) and process.poll() is None and time.monotonic() < deadline:
                pass
            ended = process.poll()
        finally:
            kill_tree(process.pid)
        output, _ = process.communicate()
        assert ended is None, output
        assert newest_step(folder) > begun_at, output
        hits += is_saving(folder)
    assert hits >= num_kills // 2 or not in_a_save
    run_to_its_end(start(folder))
    assert_same_run(folder, untouched)
