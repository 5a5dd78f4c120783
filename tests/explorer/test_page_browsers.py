"""The page in browsers that are not today's Chromium: Firefox, and those that lack what came after 2021."""

import re
from importlib import resources

import numpy as np
import pytest
from firefox_page import firefox

from tercet.explorer import render
from tercet.explorer.render import SCRIPTS, STYLES

# What a browser of 2021 does not know, and what it would do to the page: a rule, or the whole script, without effect.
TOO_NEW_IN_STYLES = (
    r"light-dark\(|color-mix\(|:has\(|@container|@layer|@scope|oklch\(|text-wrap|inset-|\d[dsl]v[hw]\b|^\s*&"
)
TOO_NEW_IN_SCRIPTS = (
    r"[\w)\]]\.at\(|\(\?<[=!]|structuredClone|\.findLast|\.toSorted|\.toReversed|\.with\(|Object\.hasOwn|Object\.groupBy|"
    r"\.replaceChildren\(\.\.\.\)|\bstatic \{|#\w+ in |ariaPressed|/v[;,)\s]|showPopover|showModal|Array\.fromAsync"
)


def source(name: str) -> str:
    return resources.files("tercet.explorer").joinpath("page", name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*STYLES, "dark.css"])
def test_styles_ask_for_nothing_that_came_after_2021(name):
    assert re.findall(TOO_NEW_IN_STYLES, source(name), re.MULTILINE) == []


@pytest.mark.parametrize("name", [*SCRIPTS, "problem.js"])
def test_scripts_ask_for_nothing_that_came_after_2021(name):
    assert re.findall(TOO_NEW_IN_SCRIPTS, source(name)) == []


@pytest.mark.parametrize("theme", ["style.css", "dark.css"])
def test_both_themes_have_every_colour(theme):
    names = re.findall(r"^\s*(--[\w-]+): #", source("style.css"), re.MULTILINE)
    assert len(names) > 12
    assert re.findall(r"^\s*(--[\w-]+): #[0-9a-f]{6};", source(theme), re.MULTILINE) == names


def test_a_browser_without_a_decompressor_unpacks_the_same_arrays(open_page, browser, record, tmp_path):
    text = render(record("llama").trace)
    assert "window.DecompressionStream" in text
    page = open_page(text)
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    context = browser.new_context()
    context.add_init_script("delete window.DecompressionStream; delete Uint8Array.fromBase64")
    old = context.new_page()
    old.goto(file.as_uri())
    old.wait_for_selector("html[data-ready]", state="attached")
    assert old.evaluate("typeof DecompressionStream") == "undefined"
    names = page.run("Object.keys(explorer.facts.arrays)")
    assert {"attentions", "hidden", "logits", "neuron_ids", "rotary"} <= set(names)
    for name in names:
        unpacked = old.evaluate("async (name) => [...(await explorer.load(name)).values]", name)
        np.testing.assert_array_equal(np.array(unpacked), page.array(name).reshape(-1))
    context.close()


@pytest.mark.parametrize("kind", ["stored", "fixed", "own"])
def test_every_kind_of_deflated_block_is_undone(open_page, record, kind):
    """RFC 1951 has three; which one a packer takes depends on what it packs."""
    import base64
    import zlib

    plain = {"stored": bytes(range(256)) * 3, "fixed": b"abcabcabcd", "own": b"the cat sat on the mat. " * 9000}[kind]
    packer = zlib.compressobj(0 if kind == "stored" else 9, strategy=zlib.Z_FIXED if kind == "fixed" else 0)
    packed = base64.b64encode(packer.compress(plain) + packer.flush()).decode()
    page = open_page(render(record("llama").trace))
    same = page.run(
        """([packed, plain]) => {
          const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
          const made = explorer.inflated(bytes(packed)), wanted = bytes(plain);
          return made.length === wanted.length && made.every((byte, i) => byte === wanted[i]);
        }""",
        [packed, base64.b64encode(plain).decode()],
    )
    assert same
    page.close()


COMPLAINTS = "(window.complaints = [], addEventListener('error', (event) => window.complaints.push(event.message)))"


@pytest.mark.slow
def test_firefox_draws_every_section_and_counts_as_the_model_does(record, tmp_path):
    trace = record("tercet-mixed").trace
    file = tmp_path / "page.html"
    file.write_text(render(trace), encoding="utf-8")
    (tmp_path / "profile").mkdir()
    with firefox(
        tmp_path / "profile", ui__systemUsesDarkTheme=0, layout__css__prefers_color_scheme__content_override=1
    ) as seen:
        seen.open(file)
        seen.run(COMPLAINTS)
        sections = seen.run("[...document.querySelectorAll('main section')].map((node) => node.textContent.length)")
        assert len(sections) == 11 and min(sections) > 150
        assert seen.run("document.documentElement.scrollWidth <= innerWidth")
        weights = seen.run("explorer.load('attentions').then((all) => [...all.row(1, 2)])")
        np.testing.assert_allclose(weights, trace.activations.attentions[1, 2].reshape(-1), atol=3e-5)
        ground = "getComputedStyle(document.body).backgroundColor"
        assert seen.run(ground) == "rgb(251, 251, 249)"
        for _ in range(2):  # from the system's to light, to dark
            seen.run("document.getElementById('theme').click()")
        assert seen.run(ground) == "rgb(20, 24, 29)"
        seen.run("document.getElementById('language').click()")
        seen.run("explorer.drawAll()")
        assert "因果掩码" in seen.run("document.getElementById('block').textContent")
        for part in seen.run("[...document.querySelectorAll('.part')].map((node) => node.className.split('part-')[1])"):
            seen.run(f"document.querySelector('.part-{part}').click()")
            seen.until(f"document.querySelector('.part-{part}').getAttribute('aria-pressed') === 'true'")
        seen.run("document.querySelector('[data-focus=play]').click()")
        seen.until("explorer.state.step > 0")
        assert seen.run("[...explorer.missing]") == []
        assert seen.run("window.complaints") == []
        _look(seen.picture())


def _look(picture: bytes) -> None:
    """The window is no blank sheet."""
    import io

    from PIL import Image

    shown = np.asarray(Image.open(io.BytesIO(picture)).convert("L"))
    assert shown.shape[0] > 500
    assert shown.std() > 10
