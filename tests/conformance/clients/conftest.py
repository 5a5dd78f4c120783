"""What the clients share: trained checkpoints, their exports, and the record of what each client did with them.

A test says by `@pytest.mark.client(NAME, WHAT)` which client it runs, the first word being the package, and what it
does; `client_record` takes the result in figures. With CLIENT_RECORDS=FILE every such test adds a line of JSON to FILE,
from which `ecosystem_table.py` writes the table of docs/ecosystem.md. CLIENTS_FOLDER=DIR keeps what was trained there
for further runs; delete it when the code of `modeling/` has changed.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from conformance.clients.packages import installed_version
from conformance.clients.reference import Reference
from conformance.clients.serving import command, run

# A minute of the demo: enough for words, and for greedy tokens that are far apart.
_SETTINGS = ["training.num_steps=200", "training.evaluate_every=200", "training.save_every=200"]


@dataclass(frozen=True)
class Trained:
    """A checkpoint and what `tercet export` makes of it: the native family that fits, and float32 GGUF."""

    folder: Path
    native: Path
    gguf: Path


@pytest.fixture(scope="session")
def clients_folder(tmp_path_factory) -> Path:
    """Shared by the processes of one run of tests."""
    kept = os.environ.get("CLIENTS_FOLDER")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = Path(kept) if kept else shared / "clients"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def trained(clients_folder) -> Trained:
    """The demo's own model, trained for a minute; its native family is Qwen3."""
    return _trained(clients_folder, "default", [])


@pytest.fixture(scope="session")
def trained_llama(clients_folder) -> Trained:
    """The same without QK-norm, so that its native family is Llama."""
    return _trained(clients_folder, "llama", ["model.qk_norm=false"])


@pytest.fixture(scope="session")
def reference(trained) -> Reference:
    """What the installed package makes of `trained`."""
    return Reference(trained.folder)


@pytest.fixture(scope="session")
def llama_reference(trained_llama) -> Reference:
    """What the installed package makes of `trained_llama`."""
    return Reference(trained_llama.folder)


def _trained(root: Path, name: str, settings: list[str]) -> Trained:
    made = Trained(root / name, root / f"{name}-native", root / f"{name}.gguf")
    with FileLock(root / "lock"):
        if not (root / f"{name}.done").is_file():
            options = [word for setting in [*_SETTINGS, *settings] for word in ("--set", setting)]
            train = ["train", "demo", "--restart", *options, "--output", str(made.folder)]
            run([sys.executable, "-m", "tercet", *train])
            for named, path in (("out/demo-native", made.native), ("out/demo.gguf", made.gguf)):
                # As docs/serving.md has it; the longer path is put in first, since it begins with the other.
                run(command(f"tercet export out/demo {named}", {named: str(path), "out/demo": str(made.folder)}))
            (root / f"{name}.done").touch()
    return made


@pytest.fixture(autouse=True)
def _needs_the_client(request) -> None:
    mark = request.node.get_closest_marker("client")
    if mark is not None:
        name, does = mark.args
        found = installed_version(name)
        request.node.user_properties.append(("client", [name, found, does]))
        if found is None:
            pytest.skip(f"{name.partition(' ')[0]} is not installed: make ecosystem")


@pytest.fixture
def client_record(request) -> Callable[[str], None]:
    """Takes what was measured, for the table; said after the assertions."""
    return lambda result: request.node.user_properties.append(("client_result", result))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path, properties = os.environ.get("CLIENT_RECORDS"), dict(report.user_properties)
    is_last_word = report.when == "call" or report.outcome != "passed"
    # Of several processes each notes its own tests; the one that gathers their reports finds `node` on them.
    if not path or "client" not in properties or not is_last_word or hasattr(report, "node"):
        return
    name, found, does = properties["client"]
    result = properties.get("client_result", "")
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        result = report.longrepr[2].removeprefix("Skipped: ")
    record = {"client": name, "version": found, "what": does, "outcome": report.outcome, "result": result}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
