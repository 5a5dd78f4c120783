"""Pushes checkpoints to the Hub while training goes on, by a process of its own.

Hashing, reading and waiting for the network happen there, at low priority: neither the interpreter's lock nor a silent
server can hold a step up, and nothing that goes wrong there can end the run. One push runs at a time; of those that
wait, the newest goes next. What is pushed is a copy of the checkpoint made of hard links the moment it was whole, so
retention may remove the checkpoint underneath.

The child ends with us, however we end: it reads a pipe from us, and the system closes that.
"""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.training.atomic import TEMPORARY_PREFIX
from tercet.training.checkpoints import step_of
from tercet.training.curve import METRICS_NAME
from tercet.training.errors import UserError
from tercet.training.hub_section import HubSection
from tercet.training.recipe import Recipe, recipe_to_yaml

Say = Callable[[str], None]

_STAGED = f"{TEMPORARY_PREFIX}push-"
_CHECK_S = 60.0
# After a signal, the machine may be taken away within seconds.
_INTERRUPTED_S = 10.0
_END_S = 5.0


class PushProcess:
    """`python -m tercet.hub.background` at work on one request.

    Args:
        request: What to do; see there.
        workspace: Made for what it writes meanwhile, and removed with it: ended in the middle, it leaves nothing.
    """

    def __init__(self, request: dict[str, Any], workspace: Path) -> None:
        self._workspace = workspace
        workspace.mkdir(parents=True, exist_ok=True)
        self._log = workspace / "log"
        # -P: a file of the user's in this folder must not be taken for a library. A session of its own: Ctrl-C in the
        # terminal is for the run, which decides what becomes of the push.
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tercet.hub.background"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "TMPDIR": str(workspace.resolve())},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it says why in its exit code
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def is_running(self) -> bool:
        """Whether it is still at work."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if the time was over first."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(timeout_s, 0.0))
        return not self.is_running

    def answer(self) -> dict[str, Any]:
        """What it found, once it has ended; `error` says that it failed."""
        assert self._process.stdout is not None
        lines = self._process.stdout.read().splitlines()
        last_words = self._last_words()
        self._close()
        try:
            return json.loads(lines[-1])
        except (IndexError, ValueError):
            ended = f"the process that pushes ended with exit code {self._process.returncode}"
            return {"error": f"{ended} ({last_words or 'without a word'})"}

    def end(self) -> None:
        """End it now. A commit is made whole or not at all, so nothing half is left on the Hub."""
        if self.is_running:
            self._process.terminate()
            if not self.wait(_END_S):
                self._process.kill()
                self._process.wait()
        self._close()

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text("utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        return " ".join(next((line for line in reversed(lines) if line.strip()), "").split())[:300]

    def _close(self) -> None:
        shutil.rmtree(self._workspace, ignore_errors=True)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


@dataclass(frozen=True)
class _Waiting:
    """A push that can begin: of this step, from this folder."""

    step: int
    folder: Path
    is_staged: bool = True

    def remove(self) -> None:
        """Remove the copy."""
        if self.is_staged:
            shutil.rmtree(self.folder, ignore_errors=True)


class Publisher:
    """Pushes for one run. Used by the main process; `offer` by the thread that writes checkpoints.

    Args:
        hub: The recipe's section.
        output_dir: Of the run.
        say: Gets a line for each push.

    Attributes:
        num_pushed: That went well.
        num_failed: That did not.
        num_replaced: Whose turn did not come before a newer one was there.
    """

    def __init__(self, hub: HubSection, output_dir: Path, say: Say) -> None:
        self._hub, self._output_dir, self._say = hub, output_dir, say
        self._workspace = output_dir / f"{_STAGED}work"
        self._lock = threading.Lock()
        self._waiting: _Waiting | None = None
        self._problem: str | None = None
        self._pushing: tuple[_Waiting, PushProcess] | None = None
        self.num_pushed = self.num_failed = self.num_replaced = 0

    def check(self, recipe: Recipe) -> None:
        """See to it, before a step is trained, that pushes can work: token, name, licence, the repository.

        Raises:
            UserError: None would ever work. A network that is away is no reason: it may come back.
        """
        for leftover in self._output_dir.glob(f"{_STAGED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        options = {**self._options(), "license": recipe.card.license}
        process = PushProcess({"check": recipe_to_yaml(recipe), "options": options}, self._workspace)
        try:
            answer = process.answer() if process.wait(_CHECK_S) else {"error": "it does not answer", "passes": True}
        finally:
            process.end()
        if "error" not in answer:
            self._say(f"Hub        pushes to {answer['url']} ({'private' if answer['private'] else 'public'})")
        elif answer.get("passes"):
            self._say(f"Hub        {answer['error']}; training begins")
        else:
            raise UserError(f"recipe, section hub: {answer['error']}")

    def offer(self, checkpoint: Path) -> None:
        """Take a checkpoint that has just been written, if its step is one to push."""
        step = step_of(checkpoint)
        if not self._hub.is_due(step):
            return
        staged = _Waiting(step, self._output_dir / f"{_STAGED}{checkpoint.name}")
        try:
            _stage(checkpoint, self._output_dir / METRICS_NAME, staged.folder)
        except OSError as error:
            staged.remove()
            with self._lock:
                self._problem = f"step {step:>6}   not pushed: it could not be set aside ({error.strerror or error})"
            return
        self._put(staged)

    def poll(self) -> None:
        """Begin what waits, tell what has ended; takes no time."""
        if self._pushing is not None and not self._pushing[1].is_running:
            self._take_answer()
        with self._lock:
            problem, self._problem = self._problem, None
            waiting = self._waiting if self._pushing is None else None
            if waiting is not None:
                self._waiting = None
        if problem is not None:
            self.num_failed += 1
            self._say(problem)
        if waiting is not None:
            self._begin(waiting)

    def finish(self, step: int, ends_at: float | None) -> None:
        """Push the finished folder, and wait for it, but no longer than the recipe says.

        Args:
            ends_at: When the run must have ended (`time.monotonic`), None if it need not.
        """
        until = min(time.monotonic() + self._hub.wait_s, ends_at or math.inf)
        self._put(None)
        if self._pushing is not None and self._pushing[1].wait(until - time.monotonic()):
            self.poll()
        if self._pushing is None:
            self._begin(_Waiting(step, self._output_dir, is_staged=False))
            if self._pushing is None:
                self._sum_up(step, "its push could not begin")
                return
            if self._pushing[1].wait(until - time.monotonic()):
                self._sum_up(step, None if self._take_answer() else "its push failed")
                return
        self.num_failed += 1
        self.close()
        self._sum_up(step, f"a push took longer than the run could wait (hub.wait_s: {self._hub.wait_s:g})")

    def interrupt(self) -> None:
        """Wait a moment for a push that is under way; what only waits is left."""
        self._put(None)
        if self._pushing is not None:
            step = self._pushing[0].step
            if self._pushing[1].wait(min(_INTERRUPTED_S, self._hub.wait_s)):
                self._take_answer()
            else:
                self.num_failed += 1
                self._say(f"step {step:>6}   push given up: the run was told to end")
        self.close()

    def close(self) -> None:
        """End what is under way."""
        self._put(None)
        if self._pushing is not None:
            waiting, process = self._pushing
            self._pushing = None
            process.end()
            waiting.remove()

    def _begin(self, waiting: _Waiting) -> None:
        options = {**self._options(), "tag_step": self._hub.tag}
        request = {"push": str(waiting.folder.resolve()), "options": options}
        try:
            self._pushing = (waiting, PushProcess(request, self._workspace))
        except OSError as error:  # no room for a file or a process: no reason to end the run
            waiting.remove()
            self.num_failed += 1
            self._say(f"step {waiting.step:>6}   not pushed: no process could be started ({error.strerror or error})")

    def _take_answer(self) -> bool:
        """Tell how the push ended that was under way; True if well."""
        assert self._pushing is not None
        waiting, process = self._pushing
        self._pushing = None
        answer = process.answer()
        waiting.remove()
        if error := answer.get("error"):
            self.num_failed += 1
            self._say(f"step {waiting.step:>6}   push failed: {error}")
            return False
        self.num_pushed += 1
        facts = ", ".join([f"commit {answer['commit'][:8]}", *(f"tag {tag}" for tag in answer["tags"])])
        self._say(f"step {waiting.step:>6}   pushed to {answer['url']} ({facts}) in {answer['duration_s']:.1f} s")
        return True

    def _sum_up(self, step: int, problem: str | None) -> None:
        counts = f"{self.num_pushed} pushed, {self.num_failed} failed"
        if self.num_replaced:
            counts += f", {self.num_replaced} left out for a newer one"
        if problem is None:
            self._say(f"Hub        {counts}")
        else:
            self._say(
                f"Hub        {counts}; the finished model is not there ({problem}): "
                f"{shlex.join(self._command(step))} sends it"
            )

    def _command(self, step: int) -> list[str]:
        """What a user types to push the finished model as the recipe would have.

        Where a checkpoint of the same step was to be pushed, its tag may be there, and is left where it is.
        """
        hub = self._hub
        words = ["tercet", "push", str(self._output_dir), hub.repo_id, "--private" if hub.private else "--public"]
        words += ["--branch", hub.branch] if hub.branch != "main" else []
        words += ["--tag-step"] if hub.tag and not hub.is_due(step) else []
        words += ["--shorten-paths"] if hub.shorten_paths else []
        return words + [word for text in hub.allow for word in ("--allow", text)]

    def _options(self) -> dict[str, Any]:
        hub = self._hub
        return {
            "repo_id": hub.repo_id,
            "branch": hub.branch,
            "private": hub.private,
            "shorten_paths": hub.shorten_paths,
            "allow": list(hub.allow),
            "move_tag": True,  # a run that goes on from before a push makes it again
            "from_recipe": True,
        }

    def _put(self, staged: _Waiting | None) -> None:
        """Let this wait, and not what has waited so far."""
        with self._lock:
            replaced, self._waiting = self._waiting, staged
        if replaced is not None:
            self.num_replaced += 1
            replaced.remove()


@contextmanager
def publishing(recipe: Recipe, output_dir: Path, say: Say, *, is_main: bool) -> Iterator[Publisher | None]:
    """The publisher of a run, checked; None where the recipe asks for none, and in all processes but the main one.

    Raises:
        UserError: Pushes can never work.
    """
    if recipe.hub is None or not is_main:
        yield None
        return
    publisher = Publisher(recipe.hub, output_dir, say)
    publisher.check(recipe)
    try:
        yield publisher
    finally:
        publisher.close()


def _stage(checkpoint: Path, metrics: Path, folder: Path) -> None:
    """A copy of what is published: weights as links, which keep them whatever becomes of the checkpoint's folder."""
    # The Hub's business, which stands on a finished checkpoint; imported here, where there is one.
    from tercet.hub.selection import what_is

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in checkpoint.iterdir():
        what = what_is(path.name)
        if not path.is_file() or what is None:
            continue
        if what == "weights":
            try:
                os.link(path, folder / path.name)
                continue
            except OSError:  # a file system without links
                pass
        shutil.copyfile(path, folder / path.name)
    if metrics.is_file():
        shutil.copyfile(metrics, folder / METRICS_NAME)
