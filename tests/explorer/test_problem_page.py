"""The page that says why a text was not run: in the language that its reader chose, or whose browser asks for."""

import html
import re
import threading
from collections.abc import Iterator

import pytest

from tercet.explorer import render
from tercet.explorer.problem_page import language_of, problem_page, told
from tercet.explorer.server import RUN_PATH, ExplorerServer
from tercet.explorer.words import LANGUAGES, BilingualError, strings
from tercet.training.errors import UserError

LONG = BilingualError("prompt.long", tokens=200, context=96)


@pytest.mark.parametrize(
    ("chosen", "accepted", "language"),
    [
        (None, "zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        (None, "en-US,en;q=0.9,zh;q=0.8", "en"),
        (None, "de, zh-TW;q=0.5, en;q=0.4", "zh"),
        (None, "de", "en"),
        (None, "zh;q=0, en", "en"),
        (None, "zh;q=x, en;q=0.1", "en"),
        (None, None, "en"),
        ("zh", "en", "zh"),
        ("en", "zh-CN", "en"),
        ("klingon", "zh", "zh"),
    ],
)
def test_language_of(chosen, accepted, language):
    assert language_of(chosen, accepted) == language


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("key", sorted(key for key in strings("problems", "en") if "." in key))
def test_every_problem_is_told_in_both_languages(key, language):
    values = dict.fromkeys(re.findall(r"\{(\w+)\}", strings("problems", "en")[key]), "<7>")
    problem = BilingualError(key, **values)
    page = problem_page(problem, "a", 3, language, RUN_PATH)
    shown = re.search(r'data-text="problem">(.*?)</p>', page, re.DOTALL)[1]
    assert html.unescape(shown) == strings("problems", language)[key].format_map(values)
    assert "<7>" not in page
    assert str(problem) == problem.told_in("en")


def test_what_has_no_sentence_says_that_it_is_english():
    assert told(UserError("bad: give another")).told_in("zh").startswith("原因")
    assert told(UserError("bad: give another")).told_in("zh").endswith("bad: give another")
    assert told(UserError("bad: give another")).told_in("en") == "bad: give another"
    assert told(ValueError("x")).told_in("zh").startswith("运行失败")
    assert told(LONG) is LONG


@pytest.fixture
def server(record) -> Iterator[ExplorerServer]:
    def refuse(prompt, new_tokens, step):
        raise LONG

    page = render(record("llama").trace, form_action=RUN_PATH)
    server = ExplorerServer(0, page, refuse, 16)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def reader(browser, server):
    """Opens the served page as a browser of a language does."""
    contexts = []

    def of(locale, **more):
        contexts.append(browser.new_context(locale=locale, **more))
        page = contexts[-1].new_page()
        page.goto(server.url)
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield of
    for context in contexts:
        context.close()


def send(page, selector="#ask-run"):
    page.fill("#ask-prompt", "<b>another</b> text")
    page.click(selector)
    page.wait_for_selector("[role=alert]")


def alert(page):
    return page.inner_text("[role=alert]")


def test_a_chinese_browser_reads_chinese_and_changes_for_good(reader):
    page = reader("zh-CN")
    send(page)
    assert alert(page) == LONG.told_in("zh")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    words = page.inner_text("body").replace("<b>another</b> text", "")
    assert re.findall(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}", words) == []
    assert page.input_value("#ask-prompt") == "<b>another</b> text"
    page.click("#language")
    assert alert(page) == LONG.told_in("en")
    assert page.title() == strings("problems", "en")["title"]
    send(page, "[data-text=run]")  # again from here: still English
    assert alert(page) == LONG.told_in("en")
    page.click("[data-text=back]")
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.inner_text("#loss h2").endswith(strings("page", "en")["loss.title"])


def test_who_switched_the_page_reads_the_mistake_in_that_language(reader):
    page = reader("en-US", color_scheme="light")
    page.click("#language")
    page.click("#theme")
    page.click("#theme")  # dark
    send(page)
    assert alert(page) == LONG.told_in("zh")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"


def test_a_run_under_way_says_so(reader):
    """The browser itself shows little while it waits for minutes."""
    page = reader("zh-CN")
    shown = page.evaluate(
        """() => {
          document.forms[0].addEventListener('submit', (event) => event.preventDefault());
          const button = document.getElementById('ask-run');
          button.click();
          return [button.textContent, button.disabled];
        }"""
    )
    assert shown == [strings("page", "zh")["ask.running"], True]
