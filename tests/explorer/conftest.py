"""Traces of small models of many families, each recorded once."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from page_browser import OpenedPage, chromium
from traced_models import PROMPT, Traced, make_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def record(small_tokenizer) -> Callable[[str], Traced]:
    """Records a kind of model; the same one again where it is asked for again, so neither may be changed."""
    from tercet.explorer import trace

    recorded: dict[str, Traced] = {}

    def of(kind: str) -> Traced:
        if kind not in recorded:
            model = make_model(kind)
            recorded[kind] = Traced(kind, model, trace(model, small_tokenizer, PROMPT, new_tokens=6, timing_s=0.0))
        return recorded[kind]

    return of


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """Headless Chromium, or a skipped test where there is none."""
    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def open_page(browser, tmp_path_factory) -> Iterator[Callable[..., OpenedPage]]:
    """Opens the text of a page; keywords are a browser context's (viewport, color_scheme, locale, reduced_motion)."""
    opened: list[OpenedPage] = []

    def of(text: str, **context: object) -> OpenedPage:
        file = tmp_path_factory.mktemp("page") / "page.html"
        file.write_text(text, encoding="utf-8")
        opened.append(OpenedPage(browser, file, **context))
        return opened[-1]

    yield of
    for page in opened:
        page.close()


@pytest.fixture(scope="session")
def shown(record, open_page) -> Callable[[str], OpenedPage]:
    """The page of a kind of model, opened once: tests that use it may choose other layers and tokens, no more."""
    from tercet.explorer import render

    pages: dict[str, OpenedPage] = {}

    def of(kind: str) -> OpenedPage:
        if kind not in pages:
            pages[kind] = open_page(render(record(kind).trace))
        return pages[kind]

    return of
