"""docs/ecosystem.md and docs/serving.md keep to what is run: rows, versions and commands, without running them."""

import json
import re
import tomllib

import pytest

from conformance.clients.serving import command
from conformance.ecosystem_table import BEGIN, CLIENTS, PAGE, marked_clients, marks, render, rows

ROOT = PAGE.parents[1]
ROWS = rows(PAGE.read_text(encoding="utf-8"))


def pinned_versions() -> dict[str, str]:
    """By package name, lower case with dashes."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pins |= json.loads((CLIENTS / "package.json").read_text())["dependencies"]
    return {name.lower().replace("_", "-"): number for name, number in pins.items()}


def test_each_test_of_a_client_is_a_row_and_each_row_a_test():
    assert [(client, what) for client, _, what, _ in ROWS] == marked_clients()


def test_no_test_of_a_client_goes_unrecorded():
    unmarked = [
        f"{path.name}: {test}" for path in CLIENTS.glob("test_*.py") for test, mark in marks(path) if mark is None
    ]
    assert not unmarked


@pytest.mark.parametrize(("client", "number", "what", "result"), ROWS)
def test_a_row_says_what_came_of_the_version_that_is_pinned(client, number, what, result):
    assert number == pinned_versions()[client.partition(" ")[0]]
    said, _, figure = result.partition(": ")
    assert said in ("passed", "not run")
    assert len(figure) > 10
    assert said == "not run" or re.search(r"\d", figure)


def test_a_failure_is_not_written_down_as_a_row():
    records = [{"client": client, "what": what, "version": "1", "outcome": "passed", "result": "7 of 7"}
               for client, what in marked_clients()]  # fmt: skip
    table = render(records)
    assert len(rows(f"{BEGIN}\n{table}")) == len(records)
    records[2]["outcome"] = "failed"
    with pytest.raises(SystemExit, match=re.escape(f"failed: {records[2]['client']}; not run: none")):
        render(records)
    with pytest.raises(SystemExit, match="not run: .*" + re.escape(records[-1]["client"])):
        render(records[:-1])


def test_every_client_is_installed_by_the_extra_or_by_make():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = " ".join([*extras["ecosystem"], *extras["interop"], *extras["eval"], "transformers"])
    besides = (ROOT / "Makefile").read_text() + (CLIENTS / "package.json").read_text()
    for client in {row[0].partition(" ")[0] for row in ROWS}:
        assert re.search(rf"(^|[\s\"]){re.escape(client)}\b", named + " " + besides), client
    # Newcomers' `make` and `pip install tercet` stay light.
    light = " ".join([*extras["dev"], *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]])
    assert not re.search(r"ecosystem|\b(trl|peft|bitsandbytes|ctranslate2|openai|torchao)\b", light)


def test_the_commands_of_the_serving_page_are_those_that_the_tests_run():
    """Each is there once, with the paths and ports that the tests put others in place of."""
    assert command("transformers serve", {"out/demo-native": "x", "8000": "1"})[1:] == [
        "serve", "x", "--host", "127.0.0.1", "--port", "1", "--device", "cpu",
    ]  # fmt: skip
    assert command("python serve_gguf.py", {"out/demo.gguf": "x.gguf", "8080": "1"})[1:] == [
        "serve_gguf.py",
        "x.gguf",
        "1",
    ]
    for port in ("8000", "8080"):
        for beginning, path in (("curl -s ", "completions"), ("curl -sN ", "chat/completions")):
            words = command(f"{beginning}http://127.0.0.1:{port}/v1/{path} ", {port: "1"})
            assert json.loads(words[-1])["max_tokens"] == 16
