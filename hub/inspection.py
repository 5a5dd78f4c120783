"""Looks for what must not leave the machine: secrets, and paths that tell how the machine is laid out.

Every text file that would be published is read, the names inside weight files too. What is found is told with file and
line; a secret is shown by its first letters alone, since logs are read by others.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from tercet.hub.options import PushOptions
from tercet.hub.selection import PublishedFile
from tercet.training.errors import UserError

_SECRETS = tuple(
    (what, re.compile(pattern))
    for what, pattern in (
        ("a Hugging Face token", r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}"),
        ("an API key", r"\bsk-[A-Za-z0-9_-]{20,}"),
        ("a GitHub token", r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,})"),
        ("an AWS key", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
        ("a Google key", r"\bAIza[0-9A-Za-z_-]{35}"),
        ("a Slack token", r"\bxox[abeprs]-[A-Za-z0-9-]{10,}"),
        ("a JSON web token", r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
        ("a private key", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"),
        ("a password in a URL", r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/:@\"'<>{}]+:[^\s/@\"'<>{}]+@[\w.-]+"),
        (
            "a secret",
            r"(?i)(?:password|passwd|secret|api[_-]?key|access[_-]?key|access[_-]?token|auth[_-]?token)"
            r"[\w-]*[\"']?\s*[:=]\s*[\"']?(?=[A-Za-z0-9+/_=-]*[0-9])[A-Za-z0-9+/_=-]{12,}",
        ),
    )
)
# Where people and machines keep their own: enough of a path to tell whose, and not what ordinary text says of /usr/bin.
_HOMES = r"home|Users|root|mnt|media|scratch|workspace|tmp|private|var/folders|gpfs|lustre|Volumes|content"
_PATHS = re.compile(
    rf"(?<![\w.:/\\~-])(?:file://)?(?:/(?:{_HOMES})/[\w.@+~-][\w.@+~/-]*|(?<!\w)[A-Za-z]:\\{{1,2}}[\w.@+~-][\w.@+~\\-]*)"
)
_STRUCTURED = (".yaml", ".yml", ".json", ".jsonl", ".ipynb")
_BINARY = (".png", ".jpg", ".jpeg", ".gif", ".gguf", ".onnx", ".pdf")
_SECRET_REMEDY = "take it out, and revoke it if others may have seen it"


@dataclass(frozen=True)
class Finding:
    """Something that must not be published.

    Attributes:
        path: Of the file, in the repository.
        line: From 1; 0 where the file has no lines.
        what: Such as "an AWS key".
        text: As it stands there.
        is_secret: Else it is a path.
    """

    path: str
    line: int
    what: str
    text: str
    is_secret: bool

    def __str__(self) -> str:
        shown = f"{self.text[:7]}…" if self.is_secret else self.text
        return f"{self.path}:{self.line} holds {self.what} ({shown})"


def inspect(files: Sequence[PublishedFile], *, allow: Sequence[str] = (), token: str | None = None) -> list[Finding]:
    """Everything in the files that must not leave the machine.

    Args:
        allow: Texts that may: a path, or the beginning of one; a secret only as a whole.
        token: The user's own for the Hub, which must not be in any file.
    """
    own = _own_folders()
    findings: list[Finding] = []
    for file in files:
        for line, text in _lines(file.source):
            findings += _in_line(file.path, line, text, own, token)
        findings += _in_values(file, findings)
    return [finding for finding in findings if not _is_allowed(finding, allow)]


def refuse(findings: Sequence[Finding], options: PushOptions) -> None:
    """Raise what was found as one line.

    Args:
        options: Know how the user says what remedies there are.

    Raises:
        UserError: There is something; the first is named, and how many more there are.
    """
    if not findings:
        return
    first = findings[0]
    more = f"; {len(findings) - 1} more: {', '.join(_place(item) for item in findings[1:6])}" if findings[1:] else ""
    shorten = options.spelled("--shorten-paths", "shorten_paths: true")
    remedy = _SECRET_REMEDY if first.is_secret else f"use a relative path, or {shorten} publishes its last part alone"
    harmless = "THE WHOLE TEXT" if first.is_secret else first.text
    allow = options.spelled(f"--allow '{harmless}'", f"allow: ['{harmless}']")
    raise UserError(f"{first}: {remedy}; if it is harmless, {allow}{more}")


def shorten_paths(folder: Path) -> list[str]:
    """Cut absolute paths to their last part in the record of the run, as the card shows them; returns the files."""
    changed = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in _STRUCTURED or path.name in ("tokenizer.json", "vocab.json"):
            continue
        text = path.read_text("utf-8")
        found = [*_PATHS.findall(text), *(value for value in _strings(_parse(path, text)) if _is_absolute(value))]
        shortened = text
        for value in sorted(set(found), key=len, reverse=True):
            for written in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
                shortened = shortened.replace(written, last_part(value))
        if shortened != text:
            path.write_text(shortened, encoding="utf-8")
            changed.append(path.name)
    return changed


def last_part(path: str) -> str:
    """The name that an absolute path, of whatever system, ends with."""
    return re.split(r"[/\\]+", path.rstrip("/\\"))[-1] or path


def _place(finding: Finding) -> str:
    return f"{finding.path}:{finding.line}"


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file; of weights, the names and notes before them."""
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            yield 0, file.read(min(length, 100_000_000)).decode("utf-8", "replace")
        return
    if path.suffix.lower() in _BINARY:
        return
    with path.open("r", encoding="utf-8", errors="replace") as file:
        yield from enumerate(file, 1)


def _in_line(path: str, line: int, text: str, own: "re.Pattern[str]", token: str | None) -> Iterator[Finding]:
    if token and token in text:
        yield Finding(path, line, "your own token for the Hub", token, True)
        text = text.replace(token, "")
    for what, pattern in _SECRETS:
        for match in pattern.finditer(text):
            yield Finding(path, line, what, match[0], True)
    found = [match[0] for match in _PATHS.finditer(text)]
    found += [match[0] for match in own.finditer(text) if not any(match[0] in other for other in found)]
    for value in found:
        yield Finding(path, line, "an absolute path", value, False)


def _own_folders() -> "re.Pattern[str]":
    """Matches paths below this user's home and the folder at work, wherever these lie on this machine."""
    folders = {os.path.expanduser("~"), os.getcwd()}
    long_enough = sorted((folder for folder in folders if len(folder) > 4), key=len, reverse=True)
    alternatives = "|".join(map(re.escape, long_enough)) or r"(?!)"
    return re.compile(rf"(?<![\w.~-])(?:{alternatives})(?![\w.-])[\w.@+~/\\-]*")


def _in_values(file: PublishedFile, already: Sequence[Finding]) -> Iterator[Finding]:
    """Values of settings that are absolute paths as a whole, below whatever root."""
    if file.source.suffix not in _STRUCTURED or file.source.name in ("tokenizer.json", "vocab.json"):
        return
    text = file.source.read_text("utf-8", errors="replace")
    known = [finding.text for finding in already if finding.path == file.path]
    for value in sorted(_strings(_parse(file.source, text))):
        if _is_absolute(value) and not any(value in other or other in value for other in known):
            yield Finding(file.path, _line_of(text, value), "an absolute path", value, False)


def _parse(path: Path, text: str) -> Any:
    try:
        if path.suffix in (".yaml", ".yml"):
            return yaml.safe_load(text)
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (ValueError, yaml.YAMLError):
        return None


def _strings(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*(_strings(item) for item in inside))


def _is_absolute(value: str) -> bool:
    """A path of two parts or more from the root, in one line and without spaces at its ends."""
    if "\n" in value or value != value.strip() or value.startswith("//"):
        return False
    posix = PurePosixPath(value)
    return (posix.is_absolute() and len(posix.parts) > 2) or PureWindowsPath(value).is_absolute()


def _line_of(text: str, value: str) -> int:
    for written in (value, json.dumps(value)[1:-1]):
        if (at := text.find(written)) >= 0:
            return text.count("\n", 0, at) + 1
    return 0


def _is_allowed(finding: Finding, allow: Sequence[str]) -> bool:
    if finding.is_secret:
        return finding.text in allow
    return any(text and finding.text.startswith(text) for text in allow)
