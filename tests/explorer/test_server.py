"""The server as a browser, and as a foreign page in that browser, meets it."""

import http.client
import threading
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

from tercet.explorer.server import MAX_BODY_BYTES, ExplorerServer
from tercet.training.errors import UserError

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class Runs:
    """Makes pages that say what they are of; one run can be held in the middle."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.has_begun = threading.Event()

    def make_page(self, prompt, new_tokens, step) -> str:
        self.asked.append((prompt, new_tokens))
        self.has_begun.set()
        self.goes_on.wait(20)
        step("half")
        if prompt == "bad":
            raise UserError("bad <prompt>: give another")
        if prompt == "bug":
            raise RuntimeError("<bug>")
        return f"page of {prompt}"


@pytest.fixture
def runs() -> Runs:
    return Runs()


@pytest.fixture
def server(runs) -> Iterator[ExplorerServer]:
    server = ExplorerServer(0, "first page", runs.make_page, 16)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    runs.goes_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def ask(server):
    def send(method="GET", path="/", body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.request(method, path, body, {**(FORM if method == "POST" else {}), **headers})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer, text

    return send


def run_body(prompt, new_tokens="4"):
    return urlencode({"prompt": prompt, "new_tokens": new_tokens})


def test_listens_to_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_shows_the_page(ask):
    answer, text = ask()
    assert (answer.status, text) == (200, "first page")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert ask(path="/other")[0].status == 404
    assert ask("POST", "/other", "")[0].status == 404


def test_a_run_makes_another_page(ask, runs):
    answer, _ = ask("POST", "/run", run_body("é\r\n<script>&"))
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    assert runs.asked == [("é\n<script>&", 4)]
    assert ask()[1] == "page of é\n<script>&"


def test_what_is_wrong_is_told_and_escaped_and_the_page_stays(ask, runs):
    answer, text = ask("POST", "/run", run_body("bad"))
    assert answer.status == 400
    assert "bad &lt;prompt&gt;: give another" in text
    runs.asked.clear()
    for new_tokens in ("0", "-1", "many", "", "9" * 5000):
        answer, text = ask("POST", "/run", run_body("</textarea><script>alert(1)</script>", new_tokens))
        assert answer.status == 400
        assert "at least 1" in text
        assert "<script>alert" not in text
        assert "&lt;/textarea&gt;" in text
    assert runs.asked == []
    assert ask()[1] == "first page"


def test_a_bug_ends_neither_the_server_nor_the_next_run(ask, capfd):
    answer, text = ask("POST", "/run", run_body("bug"))
    assert answer.status == 500
    assert "RuntimeError: &lt;bug&gt;" in text
    assert "Traceback" in capfd.readouterr().err
    assert ask("POST", "/run", run_body("next"))[0].status == 303


def test_one_run_at_a_time_and_the_page_is_shown_meanwhile(ask, runs):
    runs.goes_on.clear()
    first = threading.Thread(target=ask, args=("POST", "/run", run_body("slow")))
    first.start()
    assert runs.has_begun.wait(20)
    answer, text = ask("POST", "/run", run_body("second"))
    assert answer.status == 503
    assert "another run" in text
    assert "second" in text
    assert ask()[1] == "first page"
    runs.goes_on.set()
    first.join()
    assert [prompt for prompt, _ in runs.asked] == ["slow"]
    assert ask()[1] == "page of slow"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", ""]
)
def test_another_host_name_is_refused(ask, runs, server, host):
    """A foreign name that resolves to 127.0.0.1 would let its page read ours."""
    host = host.format(port=server.server_port)
    for answer, text in (ask(Host=host), ask("POST", "/run", run_body("x"), Host=host)):
        assert answer.status == 403
        assert "first page" not in text
    assert runs.asked == []


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_a_foreign_page_starts_no_run(ask, runs, server, origin):
    answer, _ = ask("POST", "/run", run_body("x"), Origin=origin.format(port=server.server_port))
    assert answer.status == 403
    assert runs.asked == []


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_its_own_page_starts_one(ask, server, name):
    host = f"{name}:{server.server_port}"
    assert ask("POST", "/run", run_body("x"), Host=host, Origin=f"http://{host}")[0].status == 303


def test_a_get_starts_no_run(ask, runs):
    ask(path=f"/run?{run_body('x')}")
    ask(path=f"/?{run_body('x')}")
    assert runs.asked == []


def test_other_bodies_are_refused(ask, runs):
    assert ask("POST", "/run", "x" * (MAX_BODY_BYTES + 1))[0].status == 413
    assert ask("POST", "/run", b"{}", **{"Content-Type": "application/json"})[0].status == 415
    for length in ("nonsense", "9" * 5000):
        assert ask("POST", "/run", "", **{"Content-Length": length})[0].status == 411
    assert runs.asked == []


def test_a_body_that_is_far_too_large_is_answered(ask, runs):
    """Cut off while it sends, a browser would show a broken connection and not what is wrong."""
    answer, text = ask("POST", "/run", run_body("x" * 10_000_000))
    assert answer.status == 413
    assert "10,000,0" in text and "too long" in text
    assert runs.asked == []


def test_the_page_cannot_be_framed_or_cached(ask):
    answer, _ = ask()
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Cache-Control"] == "no-store"


def test_a_run_ends_when_the_server_does(ask, runs, server, capfd):
    runs.goes_on.clear()

    def run():
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask("POST", "/run", run_body("slow"))

    first = threading.Thread(target=run)
    first.start()
    assert runs.has_begun.wait(20)
    server.is_stopping.set()
    runs.goes_on.set()
    first.join()
    assert server.is_running.acquire(timeout=20)
    assert server.page == "first page"
    assert "Traceback" not in capfd.readouterr().err
