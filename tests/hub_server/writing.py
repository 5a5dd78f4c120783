"""What changes a repository: creation, upload, commit, branches, tags, settings, deletion."""

import base64
import binascii
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hub_server.cards import complaints
from hub_server.connection import Reply, Request
from hub_server.errors import HubError, entry_not_found, repository_not_found, revision_not_found
from hub_server.reading import Answer, describe
from hub_server.repositories import File, Repository

if TYPE_CHECKING:
    from hub_server.server import HubServer

_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_]([\w.-]{0,94}[A-Za-z0-9_])?")
_REFERENCE = re.compile(r"(?!refs/|/|.*(//|\.\.|@\{)|.*[/.]$)[\w./@+-]+")


def answer_general(hub: "HubServer", request: Request) -> Reply:
    """Addresses under /api that are of no repository."""
    answers: dict[tuple[str, str], Callable[[HubServer, Request], Reply]] = {
        ("GET", "/api/whoami-v2"): _who_am_i,
        ("GET", "/api/agent-harnesses"): _client_programs,
        ("GET", "/api/models"): _list,
        ("GET", "/api/datasets"): _list,
        ("POST", "/api/repos/create"): _create,
        ("DELETE", "/api/repos/delete"): _delete,
        ("POST", "/api/validate-yaml"): _validate_card,
    }
    answer = answers.get((request.method, request.path))
    return answer(hub, request) if answer else hub.unknown(request)


def _who_am_i(hub: "HubServer", request: Request) -> Reply:
    user = hub.caller(request)
    if user is None:
        raise HubError(401, "Sign in to be known")
    role = "write" if user.can_write else "read"
    return Reply.of_json(
        {
            "type": "user",
            "id": user.name,
            "name": user.name,
            "fullname": user.name.title(),
            "isPro": False,
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": {"displayName": "for tests", "role": role}},
        }
    )


def _client_programs(hub: "HubServer", request: Request) -> Reply:
    """The command `hf` asks for programs that it would name in its User-Agent; there are none."""
    return Reply.of_json({"standardEnvVars": [], "harnesses": {}})


def _list(hub: "HubServer", request: Request) -> Reply:
    """/api/models?author=...&search=..."""
    user = hub.caller(request)
    kind = "model" if request.path.endswith("models") else "dataset"
    author, search = (request.query.get(key, [""])[-1] for key in ("author", "search"))
    found = [
        describe(repository, repository.find(), request)
        for repository in hub.repositories.values()
        if repository.kind == kind
        and (not author or repository.owner == author)
        and search in repository.name
        and (not repository.is_private or (user is not None and user.name == repository.owner))
    ]
    return Reply.of_json(found)


def _repository_of_body(hub: "HubServer", request: Request) -> tuple[Any, str, dict[str, Any]]:
    """Kind, full name and the rest of a body that names a repository; the caller must be allowed to have it."""
    user = hub.caller(request)
    body = request.json()
    if user is None:
        raise HubError(401, "Sign in to do that")
    owner = body.get("organization") or user.name
    if owner != user.name or not user.can_write:
        raise HubError(403, f"This token may not create or delete under the name {owner}")
    return body.get("type") or "model", f"{owner}/{body.get('name')}", body


def _create(hub: "HubServer", request: Request) -> Reply:
    kind, name, body = _repository_of_body(hub, request)
    if not _NAME.fullmatch(str(body.get("name"))) or str(body["name"]).endswith(".git"):
        raise HubError(400, f"{name} is no name that a repository can have")
    repository = hub.create(name, kind, is_private=_is_private(body))
    return Reply.of_json({"url": f"{hub.endpoint}/{repository.url_path}", "name": name, "id": name})


def _is_private(body: dict[str, Any]) -> bool:
    return body.get("visibility") == "private" or bool(body.get("private"))


def _delete(hub: "HubServer", request: Request) -> Reply:
    kind, name, _ = _repository_of_body(hub, request)
    if hub.repositories.pop((kind, name), None) is None:
        raise repository_not_found(is_signed_in=True)
    return Reply.of_json({})


def _validate_card(hub: "HubServer", request: Request) -> Reply:
    body = request.json()
    errors, warnings = complaints(body.get("content", ""))
    told = {"errors": [{"message": text} for text in errors], "warnings": [{"message": text} for text in warnings]}
    if errors:
        raise HubError(400, "The card's front matter is not valid", body=told)
    return Reply.of_json(told)


def _preupload(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/preupload/revision: how each file is to come, and what is there already under its name."""
    commit = repository.find(rest[0])
    files = []
    for file in request.json()["files"]:
        sample = base64.b64decode(file["sample"])
        is_lfs = repository.goes_to_lfs(file["path"], sample, file["size"], rest[0])
        there = commit.files.get(file["path"])
        # The clients compare it with the SHA-256 of a file that goes to large-file storage.
        oid = there.etag if there is not None and there.is_lfs == is_lfs else None
        mode = "lfs" if is_lfs else "regular"
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return Reply.of_json({"files": files, "commitOid": commit.oid})


def _commit(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/commit/branch: a line of JSON for the words, then one for each change."""
    user = hub.caller(request)
    if request.is_true("create_pr"):
        raise HubError(403, "Pull requests are switched off for this repository")
    try:
        lines = [json.loads(line) for line in request.body().splitlines() if line.strip()]
        header = next(line["value"] for line in lines if line["key"] == "header")
    except (ValueError, KeyError, StopIteration) as error:
        raise HubError(400, f"The body is no list of changes: {error!r}") from error
    changes = [(line["key"], line["value"]) for line in lines if line["key"] != "header"]

    def change(files: dict[str, File]) -> None:
        oid = repository.find(rest[0]).oid
        for key, value in changes:
            _apply(repository, files, key, value, oid)

    commit = repository.commit(
        change,
        header.get("summary", ""),
        description=header.get("description", ""),
        author=user.name if user else None,
        branch=rest[0],
        parent=header.get("parentCommit"),
    )
    url = f"{hub.endpoint}/{repository.url_path}/commit/{commit.oid}"
    return Reply.of_json({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})


def _apply(repository: Repository, files: dict[str, File], key: str, value: dict[str, Any], commit: str) -> None:
    """One line of a commit."""
    path = value["path"].rstrip("/")
    if path.startswith("/") or {"", ".", "..", ".git"} & set(path.split("/")):
        raise HubError(400, f"{value['path']!r} is no path in a repository")
    if key == "file":
        try:
            content = base64.b64decode(value["content"], validate=True)
        except binascii.Error as error:
            raise HubError(400, f"The content of {path} is no base64: {error}") from error
        if path == "README.md" and (errors := complaints(content.decode())[0]):
            raise HubError(400, f"The card's front matter is not valid: {errors[0]}")
        files[path] = repository.git_file(content)
    elif key == "lfsFile":
        files[path] = repository.lfs_file(value["oid"])
    elif key == "deletedFile":
        if files.pop(path, None) is None:
            raise entry_not_found(f"{path}: A file with this name doesn't exist", commit)
    elif key == "deletedFolder":
        below = [name for name in files if name.startswith(path + "/")]
        if not below:
            raise entry_not_found(f"{path}: there is no such folder", commit)
        for name in below:
            del files[name]
    else:
        raise HubError(400, f"A commit has no change {key!r}")


def _create_branch(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/branch/name, from a starting point or main."""
    name, start = rest[0], request.json().get("startingPoint") or "main"
    _check_reference(name)
    with repository.lock:
        if name in repository.branches:
            raise HubError(409, f"There is a branch {name}")
        repository.branches[name] = repository.find(start).oid
    return Reply.of_json({"ref": f"refs/heads/{name}"})


def _delete_branch(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    with repository.lock:
        if rest[0] == "main":
            raise HubError(403, "The branch main cannot be deleted")
        if repository.branches.pop(rest[0], None) is None:
            raise revision_not_found(rest[0])
    return Reply.of_json({})


def _create_tag(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/tag/revision: the body names the tag."""
    body = request.json()
    name = body.get("tag", "")
    _check_reference(name)
    with repository.lock:
        oid = repository.find(rest[0]).oid
        if name in repository.tags:
            raise HubError(409, f"There is a tag {name}")
        repository.tags[name] = oid
        repository.tag_messages[name] = body.get("message", "")
    return Reply.of_json({"ref": f"refs/tags/{name}"})


def _delete_tag(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    with repository.lock:
        if repository.tags.pop(rest[0], None) is None:
            raise revision_not_found(rest[0])
    return Reply.of_json({})


def _check_reference(name: str) -> None:
    if not _REFERENCE.fullmatch(name):
        raise HubError(400, f"{name!r} is no name that a branch or a tag can have")


def _set(hub: "HubServer", repository: Repository, request: Request, rest: list[str]) -> Reply:
    """/settings: who sees it."""
    body = request.json()
    if "visibility" in body or "private" in body:
        repository.is_private = _is_private(body)
    repository.gated = body.get("gated", repository.gated)
    return Reply.of_json({"private": repository.is_private, "gated": repository.gated})


ANSWERS: dict[tuple[str, str], Answer] = {
    ("POST", "preupload"): _preupload,
    ("POST", "commit"): _commit,
    ("POST", "branch"): _create_branch,
    ("DELETE", "branch"): _delete_branch,
    ("POST", "tag"): _create_tag,
    ("DELETE", "tag"): _delete_tag,
    ("PUT", "settings"): _set,
}
