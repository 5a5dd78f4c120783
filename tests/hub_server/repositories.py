"""Repositories as a Hub keeps them: commits of files by path, branches and tags, contents stored once by their hash."""

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from hub_server.errors import HubError, entry_not_found, revision_not_found

Kind = Literal["model", "dataset", "space"]
Gate = Literal["auto", "manual", False]

LARGE_BYTES = 10 * 1024 * 1024
_LARGE_SUFFIXES = "arrow bin gguf gz h5 model npz onnx parquet pt safetensors zip zst"
GIT_ATTRIBUTES = "".join(f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in _LARGE_SUFFIXES.split())


class ContentStore:
    """Contents in a folder, each under its SHA-256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Where the content lies, or would."""
        return self.folder / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def put(self, parts: Iterable[bytes]) -> str:
        """Store what the parts make together; nothing is left of one that breaks off."""
        digest = hashlib.sha256()
        unfinished = self.folder / f"{uuid.uuid4().hex}.unfinished"
        try:
            with unfinished.open("wb") as file:
                for part in parts:
                    digest.update(part)
                    file.write(part)
            os.replace(unfinished, self.path(digest.hexdigest()))
        finally:
            unfinished.unlink(missing_ok=True)
        return digest.hexdigest()


@dataclass(frozen=True)
class File:
    """A file of a commit.

    Attributes:
        blob_id: Git's name of it: SHA-1 of the content, or of the pointer that stands for a large file.
        sha256: The content's name in the store.
        size: Bytes of the content.
        pointer_size: Bytes of the pointer of a file in large-file storage; None for one that is in git itself.
    """

    blob_id: str
    sha256: str
    size: int
    pointer_size: int | None = None

    @property
    def is_lfs(self) -> bool:
        return self.pointer_size is not None

    @property
    def etag(self) -> str:
        """What changes with the content: SHA-256 of a large file, git's name of another."""
        return self.sha256 if self.is_lfs else self.blob_id


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


@dataclass(frozen=True)
class Commit:
    """One state of a repository: its files by path."""

    oid: str
    parent: str | None
    title: str
    description: str
    author: str
    date: datetime
    files: Mapping[str, File]


@dataclass
class Repository:
    """One repository.

    Attributes:
        branches: Branch to the commit at its end.
        tags: Tag to its commit.
        tag_messages: Tag to what was said of it.
        commits: Every commit by its id.
        lfs_objects: SHA-256 of what its large-file storage holds, whether a commit names it or not.
    """

    kind: Kind
    name: str
    store: ContentStore
    is_private: bool = False
    gated: Gate = False
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    tag_messages: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    lfs_objects: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        first = {".gitattributes": self.git_file(GIT_ATTRIBUTES.encode())}
        self.branches["main"] = self._write(None, first, "initial commit", "", self.owner).oid

    @property
    def owner(self) -> str:
        return self.name.split("/")[0]

    @property
    def url_path(self) -> str:
        """The repository's address under the endpoint."""
        return self.name if self.kind == "model" else f"{self.kind}s/{self.name}"

    def find(self, revision: str = "main") -> Commit:
        """The commit that a branch, a tag or a commit id means.

        Raises:
            HubError: RevisionNotFound, if there is none.
        """
        with self.lock:
            oid = self.branches.get(revision) or self.tags.get(revision) or revision
            if oid not in self.commits:
                raise revision_not_found(revision)
            return self.commits[oid]

    def history(self, revision: str = "main") -> list[Commit]:
        """The commits from the newest to the first."""
        found = []
        commit: Commit | None = self.find(revision)
        while commit is not None:
            found.append(commit)
            commit = self.commits[commit.parent] if commit.parent else None
        return found

    def files(self, revision: str = "main") -> dict[str, File]:
        """The files of a revision by path, without the .gitattributes that every repository begins with."""
        return {path: file for path, file in self.find(revision).files.items() if path != ".gitattributes"}

    def file(self, path: str, revision: str = "main") -> File:
        """One file.

        Raises:
            HubError: EntryNotFound, if there is none.
        """
        commit = self.find(revision)
        if path not in commit.files:
            raise entry_not_found(path, commit.oid)
        return commit.files[path]

    def read(self, path: str, revision: str = "main") -> bytes:
        """The content of one file."""
        return self.store.path(self.file(path, revision).sha256).read_bytes()

    def goes_to_lfs(self, path: str, sample: bytes, size: int, revision: str = "main") -> bool:
        """Whether a file belongs in large-file storage: by its name, its size, or as no text."""
        if size == 0:
            return False
        attributes = self.find(revision).files.get(".gitattributes")
        lines = self.store.path(attributes.sha256).read_text().splitlines() if attributes else []
        patterns = [line.split()[0] for line in lines if "filter=lfs" in line.split()]
        name = path.rsplit("/", 1)[-1]
        return size >= LARGE_BYTES or b"\0" in sample or any(fnmatch(name, p) or fnmatch(path, p) for p in patterns)

    def git_file(self, content: bytes) -> File:
        """Store a small file's content."""
        return File(git_blob_id(content), self.store.put([content]), len(content))

    def lfs_file(self, sha256: str) -> File:
        """A file of the large-file storage.

        Raises:
            HubError: If its content never came.
        """
        if sha256 not in self.lfs_objects or not self.store.has(sha256):
            raise HubError(400, f"The content of the large file {sha256} has not been uploaded")
        size = self.store.path(sha256).stat().st_size
        pointer = lfs_pointer(sha256, size)
        return File(git_blob_id(pointer), sha256, size, len(pointer))

    def commit(
        self,
        change: Callable[[dict[str, File]], None],
        title: str,
        *,
        description: str = "",
        author: str | None = None,
        branch: str = "main",
        parent: str | None = None,
    ) -> Commit:
        """Apply a change to a branch's files, wholly or, if it raises, not at all; a change of nothing is no commit.

        Args:
            change: Edits a copy of the branch's files in place.
            parent: Id, or the beginning of it, of the commit that the change was made for.

        Raises:
            HubError: If the branch has gone on from `parent`, or is none.
        """
        with self.lock:
            if branch not in self.branches:
                raise revision_not_found(branch)
            tip = self.commits[self.branches[branch]]
            if parent is not None and not tip.oid.startswith(parent):
                raise HubError(412, "The branch has a newer commit than the one this change was made for")
            files = dict(tip.files)
            change(files)
            if files == tip.files:
                return tip
            commit = self._write(tip.oid, files, title, description, author or self.owner)
            self.branches[branch] = commit.oid
            return commit

    def add(self, contents: Mapping[str, bytes | str], title: str = "Add files", branch: str = "main") -> Commit:
        """Commit files from the server's side, without a client."""
        added: dict[str, File] = {}
        for path, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            if self.goes_to_lfs(path, data[:512], len(data), branch):
                self.lfs_objects.add(self.store.put([data]))
                added[path] = self.lfs_file(hashlib.sha256(data).hexdigest())
            else:
                added[path] = self.git_file(data)
        return self.commit(lambda files: files.update(added), title, branch=branch)

    def add_folder(self, folder: Path, title: str = "Add files", branch: str = "main") -> Commit:
        """Commit all that a folder holds from the server's side, without a client."""
        return self._add_paths(folder, Path(folder).rglob("*"), title, branch)

    def add_files(self, folder: Path, title: str = "Add files", branch: str = "main") -> Commit:
        """Commit the files of a folder, such as that of a run, but not what lies in folders in it."""
        return self._add_paths(folder, Path(folder).iterdir(), title, branch)

    def _add_paths(self, folder: Path, paths: Iterable[Path], title: str, branch: str) -> Commit:
        found = sorted(path for path in paths if path.is_file())
        return self.add({path.relative_to(folder).as_posix(): path.read_bytes() for path in found}, title, branch)

    def _write(self, parent: str | None, files: dict[str, File], title: str, description: str, author: str) -> Commit:
        date = datetime.now(UTC)
        content = {path: file.blob_id for path, file in sorted(files.items())}
        words = json.dumps([parent, content, title, description, author, date.isoformat(), uuid.uuid4().hex])
        oid = hashlib.sha1(words.encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent, title, description, author, date, files)
        return self.commits[oid]
