"""A page of the explorer in headless Firefox, driven by Marionette, the protocol that every Firefox speaks.

Messages are "length:json" over a socket; a command is [0, id, name, arguments], its answer [1, id, error, result].
"""

import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("firefox-esr", "firefox")
_START_S = 60.0
# No request of its own, no first-run pages; scripts may be told the answer without a time limit of theirs.
_PREFERENCES = {
    "marionette.port": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.homepage_override.mstone": "ignore",
    "app.update.disabledForTesting": True,
    "extensions.update.enabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
    "services.settings.server": "data:,",
}


class Firefox:
    """One running browser with one window."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._count = 0
        self._read()  # its greeting
        self.tell("WebDriver:NewSession", capabilities={"alwaysMatch": {"pageLoadStrategy": "normal"}})

    def tell(self, command: str, **arguments: Any) -> Any:
        """The answer to a command of WebDriver.

        Raises:
            AssertionError: The browser calls it an error.
        """
        self._count += 1
        message = json.dumps([0, self._count, command, arguments]).encode()
        self._socket.sendall(str(len(message)).encode() + b":" + message)
        _, _, error, result = self._read()
        assert error is None, f"{error['error']}: {error['message']}"
        return result

    def open(self, file: Path, width: int = 1280, height: int = 900) -> None:
        """Load a page and wait until all of it is drawn."""
        self.tell("WebDriver:SetWindowRect", width=width, height=height)
        self.tell("WebDriver:Navigate", url=file.as_uri())
        self.until("document.documentElement.dataset.ready === 'true'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited."""
        body = f"const done = arguments[0]; Promise.resolve({script}).then(done, (error) => done(String(error)));"
        return self.tell("WebDriver:ExecuteAsyncScript", script=body, args=[], sandbox=None)["value"]

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        for _ in range(400):
            if self.run(condition):
                return
            time.sleep(0.025)
        raise AssertionError(f"never true: {condition}")

    def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.tell("WebDriver:TakeScreenshot", full=False)["value"])

    def close(self) -> None:
        """End the browser."""
        self.tell("Marionette:Quit", flags=["eForceQuit"])
        self._socket.close()

    def _read(self) -> Any:
        size = b""
        while not size.endswith(b":"):
            size += self._receive(1)
        return json.loads(self._receive(int(size[:-1])))

    def _receive(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self._socket.recv(count - len(found))
            assert part, "the browser has ended"
            found += part
        return found


@contextmanager
def firefox(profile: Path, **preferences: Any) -> Iterator[Firefox]:
    """A browser, or a skipped test where there is none.

    Args:
        profile: An empty folder.
        preferences: Of about:config, with "__" for the dots in their names.
    """
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs firefox, which is not installed: apt-get install firefox-esr fonts-wqy-zenhei")
    wanted = _PREFERENCES | {name.replace("__", "."): value for name, value in preferences.items()}
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in wanted.items()]
    (profile / "user.js").write_text("".join(lines))
    command = [program, "--headless", "--marionette", "--no-remote", "--profile", str(profile), "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        running = Firefox(_port(profile, process))
        yield running
        running.close()
        process.wait(30)
    finally:
        process.kill()
        process.wait()


def _port(profile: Path, process: subprocess.Popen) -> int:
    """Where it listens: it writes that into its profile."""
    file = profile / "MarionetteActivePort"
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(f"firefox ended at once with {process.returncode}")
        if file.is_file() and file.read_text().strip():
            return int(file.read_text())
        time.sleep(0.05)
    raise AssertionError("firefox does not listen")
