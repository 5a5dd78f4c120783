"""Large-file storage: git LFS's batch call, and a host that takes and gives contents by signed addresses."""

import hashlib
import math
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hub_server.connection import Reply, Request, file_reply
from hub_server.errors import HubError
from hub_server.repositories import Repository

if TYPE_CHECKING:
    from hub_server.server import HubServer


@dataclass
class _Ticket:
    """Permission to upload one content to one repository.

    Attributes:
        parts: SHA-256 of each part that came, by its number; the name under which it is kept until all are there.
    """

    repository: Repository
    sha256: str
    size: int
    parts: dict[int, str] = field(default_factory=dict)


class Storage:
    """The second host and the calls that lead to it."""

    def __init__(self, hub: "HubServer") -> None:
        self.hub = hub
        self._tickets: dict[str, _Ticket] = {}
        self._lock = threading.Lock()

    def download_url(self, sha256: str) -> str:
        """An address that gives the content to whoever has it."""
        return f"{self.hub.storage_url}/content/{sha256}"

    def answer_lfs(self, repository: Repository, request: Request, rest: list[str]) -> Reply:
        """/user/name.git/info/lfs/..., on the Hub's own host."""
        if request.method == "POST" and rest == ["info", "lfs", "objects", "batch"]:
            return self._batch(repository, request)
        if request.method == "POST" and rest == ["info", "lfs", "objects", "verify"]:
            return self._verify(repository, request)
        return self.hub.unknown(request)

    def answer(self, request: Request) -> Reply:
        """The storage host."""
        if "Authorization" in request.headers:
            raise HubError(400, "The address is the permission; a token has no business here")
        segments = request.segments
        if request.method in ("GET", "HEAD") and segments[0] == "content" and self.hub.store.has(segments[1]):
            path = self.hub.store.path(segments[1])
            headers = {"ETag": f'"{segments[1]}"'}
            return file_reply(path, path.stat().st_size, request.headers.get("Range"), headers)
        ticket = self._tickets.get(segments[1]) if len(segments) > 1 else None
        if ticket is None:
            raise HubError(403, "The address gives no permission")
        if request.method == "PUT" and segments[0] == "upload" and len(segments) == 2:
            return self._take(ticket, request)
        if request.method == "PUT" and segments[0] == "upload":
            return self._take_part(ticket, int(segments[2]), request)
        if request.method == "POST" and segments[0] == "complete":
            return self._complete(ticket, request)
        return self.hub.unknown(request)

    def _batch(self, repository: Repository, request: Request) -> Reply:
        """For each content: nothing to do where the repository has it, else the addresses for it."""
        body = request.json()
        can_have_parts = "multipart" in body.get("transfers", [])
        objects = [self._action(repository, found, can_have_parts) for found in body["objects"]]
        transfer = "multipart" if can_have_parts else "basic"
        return Reply.of_json({"transfer": transfer, "objects": objects}, headers={"Content-Type": _LFS_JSON})

    def _action(self, repository: Repository, wanted: dict[str, Any], can_have_parts: bool) -> dict[str, Any]:
        sha256, size = wanted["oid"], wanted["size"]
        told = {"oid": sha256, "size": size, "authenticated": True}
        if sha256 in repository.lfs_objects and self.hub.store.has(sha256):
            return told
        name = secrets.token_urlsafe(16)
        self._tickets[name] = _Ticket(repository, sha256, size)
        upload: dict[str, Any] = {"href": f"{self.hub.storage_url}/upload/{name}"}
        if can_have_parts and size >= self.hub.multipart_bytes:
            count = math.ceil(size / self.hub.part_bytes)
            parts = {str(number): f"{upload['href']}/{number}" for number in range(1, count + 1)}
            upload = {
                "href": f"{self.hub.storage_url}/complete/{name}",
                "header": {"chunk_size": str(self.hub.part_bytes), **parts},
            }
        verify = {"href": f"{self.hub.endpoint}/{repository.url_path}.git/info/lfs/objects/verify"}
        return {**told, "actions": {"upload": upload, "verify": verify}}

    def _verify(self, repository: Repository, request: Request) -> Reply:
        body = request.json()
        if repository.lfs_file(body["oid"]).size != body["size"]:
            raise HubError(400, "The content has another size")
        return Reply.of_json({})

    def _take(self, ticket: _Ticket, request: Request) -> Reply:
        found = self.hub.store.put(request.parts())
        if found != ticket.sha256:
            raise HubError(400, "The content is not the one that was announced")
        ticket.repository.lfs_objects.add(found)
        return Reply(200, headers={"ETag": f'"{found}"'})

    def _take_part(self, ticket: _Ticket, number: int, request: Request) -> Reply:
        found = self.hub.store.put(request.parts())
        with self._lock:
            ticket.parts[number] = found
        return Reply(200, headers={"ETag": f'"{found}"'})

    def _complete(self, ticket: _Ticket, request: Request) -> Reply:
        """Put the parts together, in the order and with the names that the client says they have."""
        named = {part["partNumber"]: part["etag"].strip('"') for part in request.json()["parts"]}
        if named != ticket.parts or sorted(named) != list(range(1, len(named) + 1)):
            raise HubError(400, "The parts are not those that came")
        paths = [self.hub.store.path(named[number]) for number in sorted(named)]
        digest = hashlib.sha256()
        for path in paths:
            digest.update(path.read_bytes())
        if digest.hexdigest() != ticket.sha256:
            raise HubError(400, "The parts together are not the content that was announced")
        self.hub.store.put(path.read_bytes() for path in paths)
        ticket.repository.lfs_objects.add(ticket.sha256)
        for path in paths:
            if path.name != ticket.sha256:
                path.unlink(missing_ok=True)
        return Reply.of_json({})


_LFS_JSON = "application/vnd.git-lfs+json"
