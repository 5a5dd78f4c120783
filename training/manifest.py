"""Size and SHA-256 of every file of a checkpoint, by which a torn or damaged one is told from a whole one."""

import hashlib
import json
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
_FORMAT = 1


class DamagedError(Exception):
    """A checkpoint that is not what was written; the message says in what."""


def write_manifest(folder: Path, state: str) -> None:
    """Describe every file below `folder`; the description lies in its sub-folder `state`, beside what it describes."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    text = json.dumps({"format": _FORMAT, "files": files}, indent=1) + "\n"
    (folder / state / MANIFEST_NAME).write_text(text, encoding="utf-8")


def check_manifest(folder: Path, state: str) -> list[str]:
    """Read every file of a checkpoint and compare it with what was written.

    Returns:
        The files, relative to `folder`, sorted. What lies there besides is none of the checkpoint's and is not read.

    Raises:
        DamagedError: A file is missing, or another than was written.
    """
    files = _read(folder / state / MANIFEST_NAME)
    # Sizes first: they find most of what a kill or a full disk leaves behind, without reading.
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{name} is missing")
        if path.stat().st_size != entry["size"]:
            raise DamagedError(f"{name} has {path.stat().st_size:,} bytes and not {entry['size']:,}")
    for name, entry in files.items():
        try:
            found = _sha256(folder / name)
        except OSError as error:
            raise DamagedError(f"{name} cannot be read: {error.strerror}") from error
        if found != entry["sha256"]:
            raise DamagedError(f"{name} is not what was written (SHA-256)")
    return sorted(files)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        manifest = json.loads(path.read_text("utf-8"))
        files = manifest["files"]
        if manifest["format"] != _FORMAT:
            raise DamagedError(f"{MANIFEST_NAME} has format {manifest['format']!r}, and this version reads {_FORMAT}")
        if not all(isinstance(entry["size"], int) and isinstance(entry["sha256"], str) for entry in files.values()):
            raise TypeError
    except FileNotFoundError:
        raise DamagedError(
            f"it has no {MANIFEST_NAME}: it is torn, or of an early version of Tercet, with which to go on"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{MANIFEST_NAME} cannot be read") from None
    return files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
