"""Where the clients are installed: most in the environment, some in folders of their own beside it."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# transformers imports torchao wherever it finds it, and a torchao for another torch then complains at every command.
TORCHAO_FOLDER = Path(sys.prefix) / "torchao"
NPM_FOLDER = Path(sys.prefix) / "npm" / "node_modules"


def installed_version(client: str) -> str | None:
    """The version of a client, whose first word is its package; None if it is not installed."""
    package = client.partition(" ")[0]
    if package.startswith("@"):
        manifest = NPM_FOLDER / package / "package.json"
        return json.loads(manifest.read_text(encoding="utf-8"))["version"] if manifest.is_file() else None
    path = [str(TORCHAO_FOLDER)] if package == "torchao" else sys.path
    return next((found.version for found in importlib.metadata.distributions(name=package, path=path)), None)


def environment(modules_cache: Path, *more_packages: Path) -> dict[str, str]:
    """For a process, and all that it starts, that cannot import Tercet, and reads remote code anew."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "without_tercet", *more_packages])),
        "HF_MODULES_CACHE": str(modules_cache),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_program(name: str, output: Path, *more_packages: Path, **settings: Any) -> Any:
    """Run a file of `programs/` without Tercet; its settings go in, and its last line comes back, as JSON.

    Args:
        output: Folder of the run, made if missing; passed on as the setting `output`.
        more_packages: Folders with packages that are not in the environment.
    """
    output.mkdir(parents=True, exist_ok=True)
    settings = {"output": str(output), **settings}
    done = subprocess.run(
        [sys.executable, str(HERE / "programs" / name), json.dumps(settings, default=str)],
        env=environment(output / "modules", *more_packages), stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{name}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])
