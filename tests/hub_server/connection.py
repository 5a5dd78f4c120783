"""One connection: a request read, its fault looked up, its answer written. HTTP/1.1, kept alive."""

import json
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from hub_server.errors import HubError
from hub_server.faults import Fault, RequestRecord

if TYPE_CHECKING:
    from hub_server.server import HubServer

_PART_BYTES = 64 * 1024


class ConnectionCutError(Exception):
    """A fault ended this connection."""


@dataclass
class Reply:
    """An answer: bytes, or a part of a file."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    file: Path | None = None
    start: int = 0
    length: int | None = None

    @classmethod
    def of_json(cls, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> "Reply":
        return cls(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    @property
    def num_bytes(self) -> int:
        return len(self.body) if self.file is None else self.length or 0

    def parts(self) -> Iterator[bytes]:
        """The body, at most 64 KiB at a time."""
        if self.file is None:
            for at in range(0, len(self.body), _PART_BYTES):
                yield self.body[at : at + _PART_BYTES]
            return
        left = self.num_bytes
        with self.file.open("rb") as file:
            file.seek(self.start)
            while left > 0 and (part := file.read(min(left, _PART_BYTES))):
                left -= len(part)
                yield part


def file_reply(path: Path, size: int, wanted: str | None, headers: dict[str, str]) -> Reply:
    """A file, or the range of it that is wanted: "bytes=a-b", "bytes=a-" or "bytes=-n".

    Raises:
        HubError: 416, if the range lies outside of it.
    """
    headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **headers}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if not match or not any(match.groups()):
        return Reply(200, headers=headers, file=path, length=size)
    first, last = match.groups()
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last), size - 1) if first and last else size - 1
    if start > end:
        raise HubError(416, "The range lies outside of the file", headers={"Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{end}/{size}"
    return Reply(206, headers=headers, file=path, start=start, length=end - start + 1)


class Request:
    """A request as it came, its body still to be read."""

    def __init__(self, connection: "Connection", record: RequestRecord, cut: int | None) -> None:
        self.method = connection.command
        self.headers = connection.headers
        self.record = record
        url = urlsplit(connection.path)
        # Split before the percent signs are read: a branch's name may hold a slash.
        self.segments = [unquote(segment) for segment in url.path.split("/")[1:]]
        self.query = parse_qs(url.query, keep_blank_values=True)
        self.path = url.path
        self._connection = connection
        self._cut = cut
        self._is_read = False

    def parts(self) -> Iterator[bytes]:
        """The body as it comes.

        Raises:
            ConnectionCutError: Where a fault says so.
        """
        if self._is_read:
            return
        self._is_read = True
        for part in self._connection.body_parts():
            self.record.received_bytes += len(part)
            if self._cut is not None and self.record.received_bytes >= self._cut:
                raise ConnectionCutError
            yield part
        if self._cut is not None:
            raise ConnectionCutError

    def body(self) -> bytes:
        return b"".join(self.parts())

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            HubError: 400, if it is none.
        """
        try:
            return json.loads(self.body() or b"{}")
        except ValueError as error:
            raise HubError(400, f"The body is no JSON: {error}") from error

    def is_true(self, name: str) -> bool:
        """Whether the query switches something on."""
        return self.query.get(name, ["false"])[-1].lower() in ("true", "1")


class Site(Protocol):
    """What a listener answers with: the Hub itself, or its storage."""

    def __call__(self, request: Request) -> Reply: ...


class Listener(ThreadingHTTPServer):
    """Listens on a free port of the loopback interface."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: "HubServer", site: Site) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.hub = hub
        self.site = site

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        """A client that goes away is no news; a mistake of the server is kept for the test to see."""
        import sys

        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.hub.mistakes.append(repr(error))


class Connection(BaseHTTPRequestHandler):
    """Reads requests and writes answers, with the faults between them."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listener

    def body_parts(self) -> Iterator[bytes]:
        """The request's body, whether its length was told or comes in chunks."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self._exactly(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0:
            part = self._exactly(min(left, _PART_BYTES))
            left -= len(part)
            yield part

    def _exactly(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionCutError
        return data

    def answer(self) -> None:
        """Answer one request; every method comes here."""
        hub = self.server.hub
        record = RequestRecord(self.command, self.path, None, self.headers.get("Range"))
        record.user_agent = self.headers.get("User-Agent", "")
        hub.requests.append(record)
        fault = hub.faults.take(record.line)
        cut = fault.cut if fault else None
        has_body = self.command in ("PUT", "POST")
        request = Request(self, record, cut if has_body else None)
        try:
            if fault and fault.slow:
                hub.is_closing.wait(fault.slow)
            reply = self._reply(request, fault)
            for _ in request.parts():  # what was not read would be taken for the next request
                pass
            if fault and fault.lose_reply:
                raise ConnectionCutError
            self._write(reply, record, None if has_body else cut)
        except ConnectionCutError:
            self._cut(is_upload=has_body)
        except OSError:
            self.close_connection = True  # the client went away

    def _reply(self, request: Request, fault: Fault | None) -> Reply:
        try:
            if fault and fault.status is not None:
                headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
                raise HubError(fault.status, fault.message, fault.code, headers)
            return self.server.site(request)
        except HubError as error:
            headers = {"X-Error-Message": error.message, **error.headers}
            if error.code:
                headers["X-Error-Code"] = error.code
            body = {"error": error.message} if error.body is None else error.body
            return Reply.of_json(body, error.status, headers)
        except (ConnectionCutError, OSError):
            raise
        except Exception as error:
            self.server.hub.mistakes.append(f"{request.record.line}: {error!r}")
            return Reply.of_json({"error": f"a mistake of the test's Hub: {error!r}"}, 500)

    def _write(self, reply: Reply, record: RequestRecord, cut: int | None) -> None:
        record.status = reply.status
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(reply.num_bytes))
        self.end_headers()
        if self.command == "HEAD":
            return
        for part in reply.parts():
            if cut is not None and record.sent_bytes + len(part) >= cut:
                part = part[: cut - record.sent_bytes]
                self.wfile.write(part)
                record.sent_bytes += len(part)
                raise ConnectionCutError
            self.wfile.write(part)
            record.sent_bytes += len(part)

    def _cut(self, is_upload: bool) -> None:
        """End the connection: under an upload with a reset, else as one that just ends, before its time."""
        self.close_connection = True
        with suppress(OSError):
            if is_upload:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args) -> None:
        """Nothing to the terminal: `hub.requests` has it."""

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 (http.server looks for these names)
