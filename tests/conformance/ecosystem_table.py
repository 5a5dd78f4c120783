"""Runs every client on a trained checkpoint and writes what came of it into docs/ecosystem.md.

    python tests/conformance/ecosystem_table.py                   # run them all, some minutes
    python tests/conformance/ecosystem_table.py --records FILE    # or take what CLIENT_RECORDS=FILE pytest ... has left

The page is left as it is if a client fails.
"""

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CLIENTS = HERE / "clients"
PAGE = HERE.parents[1] / "docs" / "ecosystem.md"
BEGIN = "<!-- table: python tests/conformance/ecosystem_table.py -->"
END = "<!-- end of table -->"


def marked_clients() -> list[tuple[str, str]]:
    """Name and deed of every client, by the marks of the tests, in the order in which they stand."""
    return [mark for path in sorted(CLIENTS.glob("test_*.py")) for _, mark in marks(path) if mark is not None]


def marks(path: Path) -> list[tuple[str, tuple[str, str] | None]]:
    """Each test of a file and the arguments of its mark `client`, None where it has none."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
            named = [call for call in calls if ast.unparse(call.func) == "pytest.mark.client"]
            arguments = [ast.literal_eval(argument) for argument in named[0].args] if named else []
            found.append((node.name, (arguments[0], arguments[1]) if arguments else None))
    return found


def rows(page: str) -> list[tuple[str, str, str, str]]:
    """Client, version, what was done and result of every row between the marks of a page."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| client |")]
    cells = [[cell.strip() for cell in line.replace(r"\|", "\0").strip("|").split("|")] for line in lines]
    return [tuple(cell.replace("\0", r"\|") for cell in row) for row in cells]  # pyright: ignore


def render(records: list[dict[str, Any]]) -> str:
    """The table with its command, machine and date.

    Raises:
        SystemExit: A client failed, or one was not run.
    """
    by_key = {(record["client"], record["what"]): record for record in records}
    missing = [" ".join(key) for key in marked_clients() if key not in by_key]
    failed = [record["client"] for record in records if record["outcome"] == "failed"]
    if missing or failed:
        sys.exit(
            f"the table stays as it is: failed: {', '.join(failed) or 'none'}; not run: {', '.join(missing) or 'none'}"
        )
    lines = [
        "",
        f"`python tests/conformance/ecosystem_table.py` on {datetime.now(UTC):%Y-%m-%d}: {_machine()}.",
        "",
        "| client | version | what was done | result |",
        "|---|---|---|---|",
    ]
    for key in marked_clients():
        record = by_key[key]
        result = f"not run: {record['result']}" if record["outcome"] == "skipped" else f"passed: {record['result']}"
        lines.append(f"| {record['client']} | {record['version'] or 'none'} | {record['what']} | {result} |")
    return "\n".join([*lines, "", ""])


def _machine() -> str:
    libraries = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "transformers"))
    return f"{os.cpu_count()} CPU cores ({_processor()}), Python {platform.python_version()}, {libraries}"


def _processor() -> str:
    from tercet.training.hardware import processor_name

    return processor_name()


def run_clients() -> list[dict[str, Any]]:
    """One run of all tests of clients, whatever they end with."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        environment = {**os.environ, "CLIENT_RECORDS": str(records), "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, "-m", "pytest", str(CLIENTS)], env=environment, cwd=HERE.parents[1])
        return read_records(records)


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, help="JSON lines of a run that has been")
    records = parser.parse_args().records
    table = render(run_clients() if records is None else read_records(records))
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE} has no marks {BEGIN} and {END}")
    PAGE.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
