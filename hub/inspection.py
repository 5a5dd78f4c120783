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

from tercet.hub.card_text import shortened_yaml, strings
from tercet.hub.options import PushOptions
from tercet.hub.selection import PublishedFile
from tercet.hub.weights import read_header
from tercet.training.errors import UserError

# A name or a sign may stand before a secret, a letter or digit would make it another word.
_APART = r"(?<![A-Za-z0-9])"
_SECRETS = tuple(
    (what, re.compile(pattern))
    for what, pattern in (
        ("a Hugging Face token", rf"{_APART}(?:hf|api_org)_[A-Za-z0-9]{{20,}}"),
        ("an API key", rf"{_APART}(?:sk-[A-Za-z0-9_-]{{20,}}|[rs]k_live_[A-Za-z0-9]{{16,}})"),
        ("a GitHub token", rf"{_APART}(?:gh[pousr]_[A-Za-z0-9]{{30,}}|github_pat_[A-Za-z0-9_]{{22,}})"),
        ("a GitLab token", rf"{_APART}glpat-[A-Za-z0-9_-]{{20,}}"),
        ("a package registry's token", rf"{_APART}(?:npm_[A-Za-z0-9]{{36}}|pypi-[A-Za-z0-9_-]{{50,}})"),
        ("an AWS key", rf"{_APART}(?:AKIA|ASIA)[0-9A-Z]{{16}}(?![0-9A-Za-z])"),
        ("a Google key", rf"{_APART}AIza[0-9A-Za-z_-]{{35}}"),
        ("a Slack token", rf"{_APART}xox[abeprs]-[A-Za-z0-9-]{{10,}}"),
        ("a JSON web token", rf"{_APART}eyJ[A-Za-z0-9_-]{{10,}}\.eyJ[A-Za-z0-9_-]{{10,}}\.[A-Za-z0-9_-]{{10,}}"),
        ("a private key", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"),
        (
            "a password in a URL",
            rf"{_APART}[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/:@\"'<>{{}}]+:[^\s/@\"'<>{{}}]+@[\w.-]+",
        ),
        (
            "a secret",
            r"(?i)(?:password|passwd|secret|api[_-]?key|access[_-]?key|(?:access|api|auth|hf|hub|refresh)[_-]?token)"
            r"[\w-]*[\"']?\s*[:=]\s*[\"']?(?=[A-Za-z0-9+/_=-]*[0-9])[A-Za-z0-9+/_=-]{12,}",
        ),
        (
            "a secret",
            r"(?i)(?<![A-Za-z0-9_])(?:token[\"']?\s*[:=]|bearer[\"']?[:=]?\s)\s*[\"']?"
            r"(?=[A-Za-z0-9+/_=-]*[0-9])(?=[0-9+/_=-]*[A-Za-z])[A-Za-z0-9+/_=-]{24,}",
        ),
    )
)
# What JSON, Python and web addresses write for a character: its last letter is no part of the word behind it.
_ESCAPES = re.compile(r"\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)|%[0-9A-Fa-f]{2}")
# Where people and machines keep their own: enough of a path to tell whose, and not what ordinary text says of /usr/bin.
_HOMES = (
    r"home|Users|root|mnt|media|scratch|workspace|tmp|private|var/folders|gpfs|lustre|nfs|dbfs|export|srv|Volumes|"
    r"content"
)
_PATHS = re.compile(
    rf"(?<![\w.:/\\~-])(?:file://)?(?:/(?:{_HOMES})/[\w.@+~-][\w.@+~/-]*|(?<!\w)[A-Za-z]:\\{{1,2}}[\w.@+~-][\w.@+~\\-]*)"
)
_STRUCTURED = (".yaml", ".yml", ".json", ".jsonl", ".ipynb")
_BINARY = (".png", ".jpg", ".jpeg", ".gif", ".gguf", ".onnx", ".pdf")


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
        return f"{self.place} holds {self.what} ({shown})"

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.path}:{self.line}" if self.line else self.path


def inspect(
    files: Sequence[PublishedFile], *, allow: Sequence[str] = (), token: str | None = None, message: str = ""
) -> list[Finding]:
    """Everything in the files, their names and the commit's message that must not leave the machine.

    Args:
        allow: Texts that may: a path, or the beginning of one; a secret only as a whole.
        token: The user's own for the Hub, which must not be in any file.
        message: Of the commit, which everybody sees as well.
    """
    own = _own_folders()
    findings = [*_in_line("the commit's message", 0, message, own, token)]
    for file in files:
        findings += _in_line("the name of a file", 0, file.path, own, token)
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
    more = f"; {len(findings) - 1} more: {', '.join(item.place for item in findings[1:6])}" if findings[1:] else ""
    harmless = "THE WHOLE TEXT" if first.is_secret else first.text
    allow = options.spelled(f"--allow '{harmless}'", f"allow: ['{harmless}']")
    raise UserError(f"{first}: {_remedy(first, options)}; if it is harmless, {allow}{more}")


def _remedy(finding: Finding, options: PushOptions) -> str:
    if finding.is_secret:
        return "take it out, and revoke it if others may have seen it"
    if "/" in finding.path or not _has_values(finding.path):
        return "use a relative path"
    shorten = options.spelled("--shorten-paths", "shorten_paths: true")
    return f"use a relative path, or {shorten} publishes its last part alone"


def shorten_paths(folder: Path) -> list[str]:
    """Cut absolute paths to their last part in the record of the run, as the card shows them; returns the files."""
    changed = []
    for path in sorted(folder.iterdir()):
        if not _has_values(path.name):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:  # no file of ours, and looked at like any other
            continue
        values = [value for value in strings(_parse(path, text)) if _is_absolute(value)]
        if values and path.suffix in (".yaml", ".yml"):
            shortened = _shortened(
                shortened_yaml(text, lambda text: last_part(text) if _is_absolute(text) else text), []
            )
        else:
            shortened = _shortened(text, values)
        if shortened != text:
            path.write_text(shortened, encoding="utf-8")
            changed.append(path.name)
    return changed


def _shortened(text: str, values: Sequence[str]) -> str:
    for value in sorted(values, key=len, reverse=True):
        for written, kept in zip(_spellings(value), _spellings(last_part(value)), strict=True):
            whole = rf"(?<![\w.:/\\~-]){re.escape(written)}(?![\w.@+~/\\-])"
            text = re.sub(whole, lambda match, kept=kept: kept, text)
    for read in (str, _without_escapes):  # both keep every character's place
        for match in reversed(list(_PATHS.finditer(read(text)))):
            text = text[: match.start()] + last_part(match[0]) + text[match.end() :]
    return text


def _spellings(value: str) -> list[str]:
    """How a text may stand in a file: plainly, and as JSON writes it."""
    return [value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]]


def last_part(path: str) -> str:
    """The name that an absolute path, of whatever system, ends with."""
    return re.split(r"[/\\]+", path.rstrip("/\\"))[-1] or path


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file; of weights, the names and notes before them."""
    if path.suffix == ".safetensors":
        yield 0, read_header(path).decode("utf-8", "replace")
        return
    if path.suffix.lower() in _BINARY:
        return
    with path.open("r", encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            yield number, line.replace("\0", "")  # between the letters of UTF-16


def _in_line(path: str, line: int, text: str, own: "re.Pattern[str]", token: str | None) -> Iterator[Finding]:
    if token and token in text:
        yield Finding(path, line, "your own token for the Hub", token, True)
        text = text.replace(token, "")
    readings = dict.fromkeys((text, _without_escapes(text)))  # one, where nothing is escaped
    secrets = dict.fromkeys(
        (what, match[0]) for what, pattern in _SECRETS for reading in readings for match in pattern.finditer(reading)
    )
    for what, secret in secrets:
        yield Finding(path, line, what, secret, True)
    paths = [match[0] for reading in readings for match in _PATHS.finditer(reading)]
    own_paths = [match[0] for reading in readings for match in own.finditer(reading)]
    paths += [value for value in own_paths if not any(value in other for other in paths)]
    for value in dict.fromkeys(paths):
        yield Finding(path, line, "an absolute path", value, False)


def _without_escapes(text: str) -> str:
    """The text with blanks for escaped characters, so that what stands behind one begins there; of the same length."""
    return _ESCAPES.sub(lambda escape: " " * len(escape[0]), text)


def _own_folders() -> "re.Pattern[str]":
    """Matches paths below this user's home and the folder at work, wherever these lie on this machine."""
    folders = {os.path.expanduser("~"), os.getcwd()}
    long_enough = sorted((folder for folder in folders if len(folder) > 4), key=len, reverse=True)
    alternatives = "|".join(map(re.escape, long_enough)) or r"(?!)"
    return re.compile(rf"(?<![\w.~-])(?:{alternatives})(?![\w.-])[\w.@+~/\\-]*")


def _in_values(file: PublishedFile, already: Sequence[Finding]) -> Iterator[Finding]:
    """Values of settings that are absolute paths as a whole, below whatever root."""
    if not _has_values(file.source.name):
        return
    text = file.source.read_text("utf-8", errors="replace")
    known = [finding.text for finding in already if finding.path == file.path]
    for value in sorted(strings(_parse(file.source, text))):
        if _is_absolute(value) and not any(value in other or other in value for other in known):
            yield Finding(file.path, _line_of(text, value), "an absolute path", value, False)


def _has_values(name: str) -> bool:
    """Whether a file holds settings, and not a vocabulary, whose entries may look like anything."""
    return name.endswith(_STRUCTURED) and name not in ("tokenizer.json", "vocab.json")


def _parse(path: Path, text: str) -> Any:
    try:
        if path.suffix in (".yaml", ".yml"):
            return yaml.safe_load(text)
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (ValueError, yaml.YAMLError):
        return None


def _is_absolute(value: str) -> bool:
    """A path of two parts or more from the root, in one line and without spaces at its ends."""
    if "\n" in value or value != value.strip() or value.startswith("//"):
        return False
    posix = PurePosixPath(value)
    return (posix.is_absolute() and len(posix.parts) > 2) or PureWindowsPath(value).is_absolute()


def _line_of(text: str, value: str) -> int:
    for written in _spellings(value):
        if (at := text.find(written)) >= 0:
            return text.count("\n", 0, at) + 1
    return 0


def _is_allowed(finding: Finding, allow: Sequence[str]) -> bool:
    if finding.is_secret:
        return finding.text in allow
    return any(text and finding.text.startswith(text) for text in allow)
