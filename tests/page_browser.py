"""A page of the explorer, opened in headless Chromium."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser, or a skipped test where there is none."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs chromium, which is not installed: apt-get install chromium fonts-wqy-zenhei")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
    with playwright.sync_playwright() as running:
        # Containers run as root, where Chromium's own sandbox refuses to start.
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class OpenedPage:
    """One opened page, and what the browser said about it.

    Attributes:
        page: Playwright's.
        complaints: Errors and warnings of the console, and exceptions.
        requests: Every address that was asked for.
    """

    def __init__(self, browser: "Browser", file: Path, **context: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        context = {"viewport": {"width": 1280, "height": 900}, "locale": "en-US", "color_scheme": "light", **context}
        self._context = browser.new_context(**context)
        self.page: Page = self._context.new_page()
        self.page.on("console", lambda said: self._note(said.type, said.text))
        self.page.on("pageerror", lambda error: self._note("error", str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached")

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def run(self, script: str, argument: Any = None) -> Any:
        """The value of an expression, or of a function of the argument, in the page."""
        return self.page.evaluate(script, argument)

    def change(self, **state: Any) -> None:
        """Choose a layer, head, token or pass, and draw all that depends on it."""
        self.run("async (patch) => { explorer.change(patch); await explorer.drawAll(); }", state)

    def array(self, name: str) -> Any:
        """One of the page's arrays, as the page unpacks it."""
        import numpy as np

        script = "async (name) => { const got = await explorer.load(name); return [got.shape, [...got.values]]; }"
        shape, values = self.run(script, name)
        return np.array(values).reshape(shape)

    def until(self, condition: str) -> None:
        """Wait until an expression is true: asked from outside, for the page's policy forbids the browser's own way."""
        for _ in range(400):
            if self.run(condition):
                return
            self.page.wait_for_timeout(25)
        raise AssertionError(f"never true: {condition}")

    def text(self, selector: str) -> str:
        """What a reader sees there."""
        return self.page.inner_text(selector)

    def close(self) -> None:
        """Close it and forget what it remembered."""
        self._context.close()
