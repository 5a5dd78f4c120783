"""What the Hub tells of a repository, and its files."""

import hashlib
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

import yaml

from hub_server.cards import front_matter
from hub_server.connection import Reply, Request, file_reply
from hub_server.errors import HubError, entry_not_found
from hub_server.repositories import Commit, File, Repository, lfs_pointer

if TYPE_CHECKING:
    from hub_server.server import HubServer

Answer = Callable[["HubServer", Repository, Request, list[str]], Reply]


def answer_file(
    hub: "HubServer", repository: Repository, request: Request, verb: str, revision: str, path: str
) -> Reply:
    """/user/name/resolve/revision/path, or raw for what git itself has of a large file: its pointer."""
    user = hub.caller(request)
    if repository.gated and (user is None or user.name != repository.owner):
        message = "Access to this repository is granted by its owner, on request"
        raise HubError(401 if user is None else 403, message, "GatedRepo")
    commit = repository.find(revision)
    if path not in commit.files:
        raise entry_not_found(path, commit.oid)
    file = commit.files[path]
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.etag}"'}
    headers["Content-Disposition"] = f'inline; filename="{path.rsplit("/", 1)[-1]}"'
    if file.is_lfs and verb == "raw":
        return Reply(200, lfs_pointer(file.sha256, file.size), headers)
    if file.is_lfs:
        headers |= {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.sha256}"'}
        headers["Location"] = hub.storage.download_url(file.sha256)
        return Reply(302, b"", headers)
    return file_reply(repository.store.path(file.sha256), file.size, request.headers.get("Range"), headers)


def _info(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/api/models/user/name, also /revision/revision."""
    commit = repository.find(rest[0] if rest else "main")
    return Reply.of_json(describe(repository, commit, request))


def describe(repository: Repository, commit: Commit, request: Request) -> dict[str, Any]:
    """A repository at a commit; the query may choose the fields with `expand`."""
    card = _card(repository, commit)
    siblings = [_sibling(path, file, request.is_true("blobs")) for path, file in sorted(commit.files.items())]
    tags = [tag for tag in card.get("tags") or [] if isinstance(tag, str)]
    info = {
        "author": repository.owner,
        "sha": commit.oid,
        "lastModified": _date(commit.date),
        "createdAt": _date(repository.history(commit.oid)[-1].date),
        "private": repository.is_private,
        "gated": repository.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": tags,
        "cardData": card,
        "siblings": siblings,
        "usedStorage": sum(file.size for file in commit.files.values()),
    }
    if repository.kind == "model":
        info |= {key: card[key] for key in ("library_name", "pipeline_tag", "model-index") if key in card}
    wanted = [name for key in ("expand", "expand[]") for name in request.query.get(key, [])]
    if wanted:
        info = {key: value for key, value in info.items() if key in wanted}
    return {"_id": hashlib.sha1(repository.name.encode()).hexdigest()[:24], "id": repository.name, **info}


def _card(repository: Repository, commit: Commit) -> dict[str, Any]:
    if "README.md" not in commit.files:
        return {}
    try:
        card = front_matter(repository.read("README.md", commit.oid).decode())
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    return card if isinstance(card, dict) else {}


def _sibling(path: str, file: File, with_blobs: bool) -> dict[str, Any]:
    if not with_blobs:
        return {"rfilename": path}
    blob: dict[str, Any] = {"rfilename": path, "size": file.size, "blobId": file.blob_id}
    if file.is_lfs:
        blob["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": file.pointer_size}
    return blob


def _entry(path: str, commit: Commit, is_expanded: bool) -> dict[str, Any]:
    """A file or a folder of a commit, as tree and paths-info give it."""
    file = commit.files.get(path)
    entry: dict[str, Any]
    if file is None:
        below = {name: found.blob_id for name, found in sorted(commit.files.items()) if name.startswith(path + "/")}
        entry = {"type": "directory", "oid": hashlib.sha1(repr(below).encode()).hexdigest(), "size": 0, "path": path}
    else:
        entry = {"type": "file", "oid": file.blob_id, "size": file.size, "path": path}
        if file.is_lfs:
            entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": file.pointer_size}
    if is_expanded:
        entry["lastCommit"] = {"id": commit.oid, "title": commit.title, "date": _date(commit.date)}
    return entry


def _folders(commit: Commit) -> set[str]:
    return {path[:at] for path in commit.files for at, character in enumerate(path) if character == "/"}


def _tree(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/tree/revision[/path], the entries below it or right in it."""
    commit = repository.find(rest[0])
    folder = "/".join(rest[1:]).strip("/")
    paths = sorted(_folders(commit) | set(commit.files))
    if folder and folder not in _folders(commit):
        raise entry_not_found(folder, commit.oid)
    inside = [path for path in paths if not folder or path.startswith(folder + "/")]
    if not request.is_true("recursive"):
        inside = [path for path in inside if "/" not in path[len(folder) :].strip("/")]
    is_expanded = request.is_true("expand")
    return _page(hub, request, [_entry(path, commit, is_expanded) for path in inside])


def _page(hub: "HubServer", request: Request, entries: list[Any]) -> Reply:
    """The page of a long answer that the query's cursor asks for, with the address of the next."""
    start = int(request.query.get("cursor", ["0"])[-1])
    end = start + hub.page_size
    headers = {}
    if end < len(entries):
        query = urlencode({**request.query, "cursor": end}, doseq=True)
        headers["Link"] = f'<{hub.endpoint}{request.path}?{query}>; rel="next"'
    return Reply.of_json(entries[start:end], headers=headers)


def _paths_info(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/paths-info/revision: of the paths asked for those that there are."""
    commit = repository.find(rest[0])
    if "json" in request.headers.get("Content-Type", ""):
        body = request.json()
        paths, is_expanded = body["paths"], bool(body.get("expand"))
    else:
        form = parse_qs(request.body().decode())
        paths, is_expanded = form.get("paths", []), form.get("expand", ["false"])[-1].lower() == "true"
    folders = _folders(commit)
    names = [path.strip("/") for path in paths]
    return Reply.of_json([_entry(p, commit, is_expanded) for p in names if p in commit.files or p in folders])


def _refs(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/refs: branches and tags."""

    def references(of: dict[str, str], kind: str) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid} for name, oid in of.items()]

    found = {"branches": references(repository.branches, "heads"), "tags": references(repository.tags, "tags")}
    return Reply.of_json({**found, "converts": [], "pullRequests": []})


def _commits(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/commits/revision: the newest first."""
    history = [
        {
            "id": commit.oid,
            "title": commit.title,
            "message": commit.description,
            "authors": [{"user": commit.author}],
            "date": _date(commit.date),
        }
        for commit in repository.history(rest[0] if rest else "main")
    ]
    return _page(hub, request, history)


def _may_enter(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/auth-check, /auth-check/write."""
    hub.open(request, repository.kind, repository.name, to_write=rest == ["write"])
    return Reply.of_json({})


def _date(date: datetime) -> str:
    return date.strftime("%Y-%m-%dT%H:%M:%S.") + f"{date.microsecond // 1000:03d}Z"


ANSWERS: dict[tuple[str, str], Answer] = {
    ("GET", ""): _info,
    ("GET", "revision"): _info,
    ("GET", "tree"): _tree,
    ("POST", "paths-info"): _paths_info,
    ("GET", "refs"): _refs,
    ("GET", "commits"): _commits,
    ("GET", "auth-check"): _may_enter,
}
