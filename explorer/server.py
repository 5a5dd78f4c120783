"""`tercet explore --serve`: the page on this machine alone, with a box that makes another one.

Any web page that the user has open can send requests to 127.0.0.1. So a request must name this server as its host (a
foreign name that was bound to 127.0.0.1 does not), and one that starts a run must be a POST from the page itself.
"""

import sys
import threading
import traceback
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from tercet.explorer.problem_page import in_all_languages, language_of, problem_page, told
from tercet.explorer.words import BilingualError
from tercet.training.errors import UserError

RUN_PATH = "/run"
MAX_BODY_BYTES = 64 << 10
_MAX_THROWN_AWAY_BYTES = 64 << 20
_MAX_DIGITS = 6  # of a number of tokens
_MAX_WAIT_S = 10.0
_FORM_TYPE = "application/x-www-form-urlencoded"

MakePage = Callable[[str, int, Callable[[str], None]], str]
"""Makes the page of a prompt and a number of new tokens; is given what to call between the parts of its work."""


class StoppedError(Exception):
    """The server ends while a page is being made."""


class ExplorerServer(ThreadingHTTPServer):
    """Serves one page on 127.0.0.1, and makes it anew on demand, one run at a time.

    Args:
        port: 0 takes a free one.
        page: What is shown first.
        make_page: Makes another one.
        new_tokens: What the box of a page that says what is wrong begins with.

    Raises:
        OSError: The port is taken.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, page: str, make_page: MakePage, new_tokens: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.page = page
        self.make_page = make_page
        self.new_tokens = new_tokens
        self.is_running = threading.Lock()
        self.is_stopping = threading.Event()
        port = self.server_port
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}", *({"127.0.0.1", "localhost"} if port == 80 else ())}

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/"

    def serve_until_interrupted(self) -> None:
        """Serve; Ctrl-C ends, also in the middle of a run."""
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            self.is_stopping.set()
            self.server_close()
            # A thread that is inside torch when Python goes away can crash it.
            self.is_running.acquire(timeout=_MAX_WAIT_S)

    def check_running(self, line: str) -> None:
        """Called between the parts of a run.

        Raises:
            StoppedError: The server ends.
        """
        if self.is_stopping.is_set():
            raise StoppedError

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that has gone is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError | StoppedError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30  # of a client that says nothing
    _chosen: str | None = None  # language of the page that sent the text

    def do_GET(self) -> None:
        if not self._is_from_here():
            return
        if self.path.partition("?")[0] != "/":
            self._send(HTTPStatus.NOT_FOUND, in_all_languages("request.unknown"), "text/plain")
            return
        self._send(HTTPStatus.OK, self.server.page)

    def do_POST(self) -> None:
        if not self._is_from_here():
            return
        if self.path != RUN_PATH:
            self._send(HTTPStatus.NOT_FOUND, in_all_languages("request.unknown"), "text/plain")
            return
        body = self._read_body()
        if body is None:
            return
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        # Browsers send line ends of a text box as CR LF.
        prompt = fields.get("prompt", [""])[-1].replace("\r\n", "\n")
        wanted = fields.get("new_tokens", [str(self.server.new_tokens)])[-1]
        self._chosen = fields.get("language", [None])[-1]
        self._run(prompt, wanted)

    def _run(self, prompt: str, wanted: str) -> None:
        if not wanted.strip().isdecimal() or len(wanted) > _MAX_DIGITS or int(wanted) < 1:
            self._send_problem(HTTPStatus.BAD_REQUEST, BilingualError("new_tokens.number"), prompt)
            return
        if not self.server.is_running.acquire(blocking=False):
            self._send_problem(HTTPStatus.SERVICE_UNAVAILABLE, BilingualError("run.busy"), prompt)
            return
        try:
            failure = self._failure_of_run(prompt, int(wanted))
        finally:
            # Before the answer: who has it may ask for the next run.
            self.server.is_running.release()
        if failure is not None:
            self._send_problem(*failure, prompt)
            return
        # Another page, so that a reload shows it and does not run again.
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _failure_of_run(self, prompt: str, new_tokens: int) -> tuple[HTTPStatus, BilingualError] | None:
        """Make the page, or say why there is none."""
        try:
            self.server.page = self.server.make_page(prompt, new_tokens, self.server.check_running)
        except UserError as error:
            return HTTPStatus.BAD_REQUEST, told(error)
        except StoppedError:
            raise
        except Exception as error:
            traceback.print_exc()
            return HTTPStatus.INTERNAL_SERVER_ERROR, told(error)
        return None

    def _is_from_here(self) -> bool:
        """Whether the request is meant for this server and comes from its page or from no page; else it is refused."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host in self.server.hosts and (origin is None or origin.removeprefix("http://") in self.server.hosts):
            return True
        refusal = in_all_languages("request.foreign", url=self.server.url)
        self._send(HTTPStatus.FORBIDDEN, refusal, "text/plain")
        return False

    def _read_body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 12:
            self._send_problem(HTTPStatus.LENGTH_REQUIRED, BilingualError("request.length"), "")
        elif int(length) > MAX_BODY_BYTES:
            self._throw_away(int(length))
            problem = BilingualError("prompt.size", size=f"{int(length):,}", most=f"{MAX_BODY_BYTES:,}")
            self._send_problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, problem, "")
        elif self.headers.get_content_type() != _FORM_TYPE:
            problem = BilingualError("request.type", type=_FORM_TYPE)
            self._send_problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, problem, "")
        else:
            return self.rfile.read(int(length))
        return None

    def _throw_away(self, length: int) -> None:
        """Read a body that is not wanted: a browser that is still sending when it is cut off shows no answer."""
        left = min(length, _MAX_THROWN_AWAY_BYTES)
        while left > 0 and (got := len(self.rfile.read(min(left, MAX_BODY_BYTES)))):
            left -= got

    def _send_problem(self, status: HTTPStatus, problem: BilingualError, prompt: str) -> None:
        language = language_of(self._chosen, self.headers.get("Accept-Language"))
        self._send(status, problem_page(problem, prompt, self.server.new_tokens, language, RUN_PATH))

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/html") -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is for what the user asked to know."""
