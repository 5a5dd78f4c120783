"""Run transformers' own tests of causal language models over Tercet and over Llama, and set the counts side by side.

    HF_TREE=... HF_SUITE=... python tests/conformance/run_hf_suite.py [--modes plain distributed slow] [-- pytest args]

HF_TREE is a folder with transformers' `tests/`, `utils/`, `conftest.py` and `pyproject.toml`; HF_SUITE one with the
harness, whose `run.sh` runs that tree over the classes named in EXT_LM. Prints a Markdown table, and exits with 1 where
Tercet fails a test or skips one that Llama runs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

_CLASSES = (
    "Config", "Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
)  # fmt: skip
_MODULES = {"Tercet": "tercet.modeling", "Llama": "transformers"}
_SWITCHES = {"plain": {}, "distributed": {"EXT_LM_DIST": "1"}, "slow": {"RUN_SLOW": "1"}}

# (test, subtest) -> outcomes with their reasons
Outcomes = dict[tuple[str, str], list[tuple[str, str]]]


def run(family: str, mode: str, pytest_arguments: list[str]) -> Outcomes:
    """One run of the suite over one family of classes.

    Raises:
        RuntimeError: pytest did not come to its end; the message has the end of what it said.
    """
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.json"
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("EXT_LM_DIST", "RUN_SLOW")},
            **_SWITCHES[mode],
            "EXT_LM": f"{_MODULES[family]}:" + ",".join(family + name for name in _CLASSES),
            "HF_SUITE_OUTCOMES": str(outcomes),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")])),
            # The harness says `python`, and means the one that has Tercet.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        done = subprocess.run(
            ["bash", str(Path(os.environ["HF_SUITE"]) / "run.sh"), "-q", "-p", "hf_suite_plugin", *pytest_arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1) or not outcomes.is_file():
            raise RuntimeError(f"{family}, {mode}: pytest ended with {done.returncode}.\n{done.stdout[-4000:]}")
        found: Outcomes = {}
        for outcome in json.loads(outcomes.read_text()):
            # Class names differ between the families; what is left names the same check.
            key = (outcome["test"], outcome["subtest"].replace(family, ""))
            found.setdefault(key, []).append((outcome["outcome"], outcome["reason"]))
    return found


def count(outcomes: Outcomes) -> Counter:
    """Numbers as pytest's last line has them: subtests that passed apart, skipped and failed ones among the rest."""
    counts: Counter = Counter()
    for (_, subtest), found in outcomes.items():
        for outcome, _ in found:
            counts["subtests" if subtest and outcome == "passed" else outcome] += 1
    return counts


def skipped_alone(ours: list[Outcomes], reference: list[Outcomes]) -> list[tuple[str, str, str]]:
    """Tests and subtests that pass for the reference in some run and for us in none, with our reason."""
    passed_by_us, passed_by_reference = _passed(ours), _passed(reference)
    missing = []
    for outcomes in ours:
        for key, found in outcomes.items():
            reasons = [reason for outcome, reason in found if outcome == "skipped"]
            if reasons and key in passed_by_reference - passed_by_us and (*key, reasons[0]) not in missing:
                missing.append((*key, reasons[0]))
    return missing


def _passed(runs: list[Outcomes]) -> set[tuple[str, str]]:
    return {key for run in runs for key, found in run.items() if any(outcome == "passed" for outcome, _ in found)}


def failures(outcomes: Outcomes) -> list[str]:
    """Names of tests with a failure in them."""
    return sorted({test for (test, _), found in outcomes.items() if any(outcome == "failed" for outcome, _ in found)})


def table(runs: dict[str, dict[str, Outcomes]]) -> str:
    """Markdown: a row for each mode, Tercet's and Llama's counts beside each other."""
    lines = [
        "| Mode | | passed | skipped | failed | subtests passed |",
        "|---|---|---|---|---|---|",
    ]
    for mode, by_family in runs.items():
        for family, outcomes in by_family.items():
            counts = count(outcomes)
            numbers = " | ".join(str(counts[name]) for name in ("passed", "skipped", "failed", "subtests"))
            lines.append(f"| {mode} | {family} | {numbers} |")
    return "\n".join(lines)


def main() -> int:
    """Run, print, and say with the exit code whether Tercet stands where Llama stands."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("--modes", nargs="+", choices=sorted(_SWITCHES), default=list(_SWITCHES))
    parser.add_argument("pytest_arguments", nargs="*", help="after --, handed to pytest, for example -n 2")
    arguments = parser.parse_args()
    for variable in ("HF_TREE", "HF_SUITE"):
        if not os.environ.get(variable):
            parser.error(f"{variable} is not set: see the head of this file.")
    runs: dict[str, dict[str, Outcomes]] = {}
    for mode in arguments.modes:
        runs[mode] = {}
        for family in _MODULES:
            print(f"{family}, {mode} …", file=sys.stderr, flush=True)
            runs[mode][family] = run(family, mode, arguments.pytest_arguments)
    print(table(runs))
    failed = {mode: failures(by_family["Tercet"]) for mode, by_family in runs.items()}
    missing = skipped_alone(*([by_family[family] for by_family in runs.values()] for family in ("Tercet", "Llama")))
    print(f"\nRun by Llama and not by Tercet: {len(missing)}")
    for test, subtest, reason in missing:
        print(f"- {test} {subtest}: {reason}")
    for mode, names in failed.items():
        for name in names:
            print(f"- failed, {mode}: {name}")
    return 1 if missing or any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
