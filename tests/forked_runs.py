"""A process that forks a training run again and again, kills it, and lets the last one end.

Importing takes seconds and a fork none, so a test can afford many deaths. `train_through_kills` starts it; run as
`python forked_runs.py RECIPE FOLDER NUM_KILLS SEED` it prints how many kills hit a save.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tercet.training.pipeline import train
from tercet.training.recipe import Recipe, load_recipe, recipe_to_yaml


def train_through_kills(recipe: Recipe, folder: Path, num_kills: int = 4) -> int:
    """Train to the end in a folder, killed so often on the way; returns how many kills hit a save."""
    path = folder.with_name(f"{folder.name}.yaml")
    path.write_text(recipe_to_yaml(recipe))
    done = subprocess.run(
        [sys.executable, __file__, str(path), str(folder), str(num_kills), "0"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def run(recipe_path: str, folder: Path) -> int:
    """Start a run in a child; returns the child's number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(load_recipe(recipe_path), output_dir=folder, say=lambda line: None)
            code = 0
        finally:
            os._exit(code)
    return child


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is half-written."""
    return any((folder / "checkpoints").glob(".writing-step-*"))


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all that it has started, the children first found, so that none is missed."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(FileNotFoundError):
        for child in children.read_text().split():
            kill_tree(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_at_random(child: int, folder: Path, dice: random.Random, *, in_a_save: bool) -> bool:
    """Kill the run once it has got further than it was, or in the save after; returns whether a save was hit."""
    begun_at, deadline = newest_step(folder), time.monotonic() + 60
    while newest_step(folder) <= begun_at and time.monotonic() < deadline:
        time.sleep(0.001)
    if in_a_save:
        while not is_saving(folder) and time.monotonic() < deadline:
            pass
    else:
        time.sleep(dice.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the run ended before it was killed: give it more steps"
    return is_saving(folder)


def main() -> None:
    """See the module."""
    recipe_path, folder, num_kills, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    dice, hits = random.Random(seed), 0
    for number in range(num_kills):
        hits += kill_at_random(run(recipe_path, folder), folder, dice, in_a_save=number % 2 == 1)
    _, status = os.waitpid(run(recipe_path, folder), 0)
    assert status == 0, status
    print(hits)


if __name__ == "__main__":
    main()
