"""The Hub on loopback: its life, its users, its repositories, and which part answers a request."""

import os
import re
import secrets
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hub_server import reading, storage, writing
from hub_server.connection import Listener, Reply, Request
from hub_server.errors import HubError, repository_not_found
from hub_server.faults import Faults, RequestRecord
from hub_server.repositories import ContentStore, Gate, Kind, Repository

_KINDS: dict[str, Kind] = {"models": "model", "datasets": "dataset", "spaces": "space"}
# What would lead a client elsewhere, or keep it from asking at all.
_MISLEADING = re.compile(r"HF_|HUGGINGFACE_|HUGGING_FACE_|TRANSFORMERS_|DATASETS_|(ALL|HTTPS?)_PROXY$", re.IGNORECASE)


@dataclass(frozen=True)
class User:
    """Who a token stands for."""

    name: str
    can_write: bool = True


class HubServer:
    """A Hub of its own on 127.0.0.1, from entering the context to leaving it.

    Two listeners, as the real one has two hosts: `endpoint` answers the API and files that are in git, `storage_url`
    takes and gives large files by addresses that carry their own permission, and refuses a request with a token.

    Args:
        folder: Keeps the contents and the clients' homes; None takes a temporary one.
        user: Whose token `token` is.
        multipart_bytes: Large files of at least this size are uploaded in parts.
        part_bytes: The size of such a part.
        page_size: How many entries one answer lists.

    Attributes:
        requests: Every request so far, to both listeners.
        faults: What shall go wrong.
        mistakes: Errors of the server itself; a test's fixture wants none.
        users: User by token.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        user: str = "user",
        multipart_bytes: int = 5_000_000,
        part_bytes: int = 2_000_000,
        page_size: int = 1000,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="hub-") if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else folder or "")
        self.store = ContentStore(self.folder / "contents")
        self.multipart_bytes = multipart_bytes
        self.part_bytes = part_bytes
        self.page_size = page_size
        self.repositories: dict[tuple[Kind, str], Repository] = {}
        self.requests: list[RequestRecord] = []
        self.faults = Faults()
        self.mistakes: list[str] = []
        self.users: dict[str, User] = {}
        self.user = user
        self.token = self.add_user(user)
        self.storage = storage.Storage(self)
        self.is_closing = threading.Event()
        self.lock = threading.RLock()
        self._listeners = [Listener(self, self._answer), Listener(self, self.storage.answer)]
        self.endpoint, self.storage_url = (listener.url for listener in self._listeners)

    def __enter__(self) -> Self:
        for listener in self._listeners:
            threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.is_closing.set()
        for listener in self._listeners:
            listener.shutdown()
            listener.server_close()
        if self._temporary:
            self._temporary.cleanup()

    def add_user(self, name: str, *, can_write: bool = True) -> str:
        """A new token for a user, new or not."""
        token = "hf_" + "".join(secrets.choice("abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(34))
        self.users[token] = User(name, can_write)
        return token

    def environment(self, token: str | None = "", home: str = "client") -> dict[str, str]:
        """What a client's process is to be started with: this Hub, a token, a home of its own, and the rest as here.

        Args:
            token: "" takes `self.token`; None leaves the client without one.
            home: Name of the client's home, where its cache lies: the same name again finds what is there.
        """
        kept = {name: value for name, value in os.environ.items() if not _MISLEADING.match(name)}
        token = self.token if token == "" else token
        return {
            **kept,
            **({} if token is None else {"HF_TOKEN": token}),
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home(home)),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def home(self, name: str = "client") -> Path:
        """HF_HOME of the client of that name."""
        return self.folder / "homes" / name

    def create(self, name: str, kind: Kind = "model", *, is_private: bool = False, gated: Gate = False) -> Repository:
        """A new repository, from the server's side.

        Raises:
            HubError: 409, if there is one of that name.
        """
        with self.lock:
            if (kind, name) in self.repositories:
                message = f"There is a {kind} {name}"
                url = f"{self.endpoint}/{self.repositories[kind, name].url_path}"
                raise HubError(409, message, body={"error": message, "url": url})
            repository = Repository(kind, name, self.store, is_private, gated)
            self.repositories[kind, name] = repository
            return repository

    def repository(self, name: str, kind: Kind = "model") -> Repository:
        """A repository as the server has it.

        Raises:
            KeyError: If there is none.
        """
        return self.repositories[kind, name]

    def requests_to(self, pattern: str) -> list[RequestRecord]:
        """The requests so far whose "METHOD /path?query" has the regular expression."""
        return [record for record in self.requests if re.search(pattern, record.line)]

    def caller(self, request: Request) -> User | None:
        """Who asks; None without a token.

        Raises:
            HubError: 401, if the token is nobody's.
        """
        header = request.headers.get("Authorization")
        if not header:
            return None
        user = self.users.get(header.removeprefix("Bearer "))
        if user is None:
            # The words that huggingface_hub tells a wrong token by.
            raise HubError(401, "Invalid credentials in Authorization header")
        request.record.user = user.name
        return user

    def open(self, request: Request, kind: Kind, name: str, *, to_write: bool = False) -> Repository:
        """The repository, if the caller may see it, or write.

        Raises:
            HubError: As the Hub refuses: what may not be seen is not there.
        """
        user = self.caller(request)
        repository = self.repositories.get((kind, name))
        is_owner = repository is not None and user is not None and user.name == repository.owner
        if repository is None or (repository.is_private and not is_owner):
            raise repository_not_found(user is not None)
        if to_write and user is None:
            raise HubError(401, "Sign in to write to this repository")
        if to_write and not (is_owner and user and user.can_write):
            raise HubError(403, "This token may not write to this repository")
        return repository

    def _answer(self, request: Request) -> Reply:
        """The Hub's own host: the API under /api, files and large-file storage under the repository's name."""
        segments = request.segments
        if segments[0] == "api":
            if len(segments) >= 3 and segments[1] in _KINDS:
                return self._answer_of_repository(request, _KINDS[segments[1]], segments[2:])
            return writing.answer_general(self, request)
        kind = _KINDS.get(segments[0], "model")
        rest = segments[1:] if segments[0] in _KINDS else segments
        if len(rest) > 2 and rest[1].endswith(".git"):
            repository = self.open(request, kind, f"{rest[0]}/{rest[1].removesuffix('.git')}", to_write=True)
            return self.storage.answer_lfs(repository, request, rest[2:])
        if len(rest) > 2 and rest[1] in ("resolve", "raw"):  # a name without a user, which none has here
            raise repository_not_found(self.caller(request) is not None)
        if len(rest) > 4 and rest[2] in ("resolve", "raw"):
            repository = self.open(request, kind, f"{rest[0]}/{rest[1]}")
            return reading.answer_file(self, repository, request, rest[2], rest[3], "/".join(rest[4:]))
        return self.unknown(request)

    def _answer_of_repository(self, request: Request, kind: Kind, rest: list[str]) -> Reply:
        """/api/models/user/name/verb/..."""
        name, verb, further = "/".join(rest[:2]), "".join(rest[2:3]), rest[3:]
        is_reading = request.method in ("GET", "HEAD") or verb == "paths-info"
        repository = self.open(request, kind, name, to_write=not is_reading)
        answer = (reading.ANSWERS if is_reading else writing.ANSWERS).get((request.method, verb))
        return answer(self, repository, request, further) if answer else self.unknown(request)

    def unknown(self, request: Request) -> Reply:
        """An address that this Hub does not have, which the record says too."""
        request.record.is_known = False
        raise HubError(404, f"This Hub has no {request.record.line}")
