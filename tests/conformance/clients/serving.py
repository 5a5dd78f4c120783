"""The commands of docs/serving.md: read from the page, run with the paths and ports of a test."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from conformance.clients.packages import environment

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def command(beginning: str, changes: dict[str, str]) -> list[str]:
    """The one line of the page's shell blocks that begins so, with other paths and ports, as words."""
    (line,) = [line for block in blocks("bash") for line in block.splitlines() if line.startswith(beginning)]
    for given, other in changes.items():
        assert given in line, f"{given} is not in: {line}"
        line = line.replace(given, other)
    words = shlex.split(line)
    if words[0] in ("python", "transformers", "tercet"):  # this environment's own
        words[0] = str(Path(sys.executable).with_name(words[0]))
    return words


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(words: list[str], folder: Path, health: str) -> Iterator[None]:
    """A server, up until the block ends; its output goes to a file in `folder`, and is shown if it does not come up."""
    log = folder / "server.log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            words, cwd=folder, env=environment(folder / "modules"), stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(health, timeout=5).close()
                break
            assert server.poll() is None, log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)
        else:
            raise AssertionError(log.read_text(errors="replace")[-4000:])
        yield
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", env=dict(os.environ))
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
