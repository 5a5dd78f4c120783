"""Clients of the Hub, each in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hub_server.server import HubServer


def run_client(
    hub: HubServer,
    command: Sequence[str | Path],
    *,
    token: str | None = "",
    home: str = "client",
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    timeout_s: float = 280,
) -> subprocess.CompletedProcess[str]:
    """Run a command as a client of the Hub, and hand back what it wrote and its exit code.

    Args:
        token: "" for the Hub's own, None for none.
        home: Name of the client's HF_HOME.
        folder: Where it runs.
        environment: Variables beyond `hub.environment()`.
    """
    return subprocess.run(
        [str(word) for word in command],
        env={**hub.environment(token, home), **(environment or {})},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def run_python(
    hub: HubServer, code: str, *arguments: str | Path, without_tercet: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python code as a client of the Hub; `options` are those of `run_client`.

    Args:
        code: It finds the arguments in sys.argv[1:].
        without_tercet: Let `import tercet` fail, as for a reader who never installed it.
    """
    if without_tercet:
        code = f"import sys\nsys.modules['tercet'] = None\n{code}"
    return run_client(hub, [sys.executable, "-c", code, *arguments], **options)


def answer_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON that a client printed last.

    Raises:
        AssertionError: With all that it wrote, if it failed.
    """
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.strip().splitlines()[-1])
