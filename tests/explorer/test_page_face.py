"""What a reader meets: languages, themes, widths, the keyboard, the player; in a browser."""

import re

import pytest

from tercet.explorer import render

KINDS = ["gpt2", "llama4_text", "gemma2", "openai-gpt", "qwen3_next"]
MORE_KINDS = [
    "llama", "tercet-classic", "mistral", "smollm3", "cohere", "olmo", "nanochat", "glm4_moe", "olmo2", "gpt_neox",
    "phi3", "opt", "falcon", "bloom", "granite", "mixtral", "gpt_oss",
]  # fmt: skip
SECTIONS = [
    "tokens", "embeddings", "block", "attention", "inference", "ffn", "lens", "sampling", "loss", "weights",
    "hyperparameters",
]  # fmt: skip

CLICK_ALL_PARTS = """async () => {
  const parts = document.querySelectorAll('.part').length, names = new Set();
  for (let i = 0; i < parts; i++) {
    document.querySelectorAll('.part')[i].click();
    // The first look into an array takes as long as unpacking it does.
    for (let waited = 0; document.querySelectorAll('.part')[i].ariaPressed !== 'true' && waited < 500; waited++)
      await new Promise((done) => setTimeout(done, 10));
    names.add(document.querySelector('.panel h3').textContent + document.querySelector('.panel').childElementCount);
  }
  return names.size;
}"""


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_KINDS)])
def test_every_family_has_every_section_without_a_complaint(open_page, record, kind):
    page = open_page(render(record(kind).trace))
    for section in SECTIONS:
        assert len(page.text(f"#{section} h2")) > 4
        assert len(page.text(f"#{section}")) > 150, section
    page.change(layer=2)  # which attends in every family
    assert page.run(CLICK_ALL_PARTS) >= 16
    page.change(layer=2, head=3, token=4, step=2)
    assert not re.search(r"NaN|undefined|\[object", page.text("main"))
    assert page.complaints == []
    assert page.run("[...explorer.missing]") == []
    page.close()


def test_switch_changes_every_heading_and_is_remembered(open_page, record):
    page = open_page(render(record("llama").trace))
    strings = page.run("explorer.strings")
    english = page.run("[...document.querySelectorAll('h1, h2, .intro, .lead, label')].map((node) => node.textContent)")
    page.page.click("#language")
    page.run("explorer.drawAll()")
    chinese = page.run("[...document.querySelectorAll('h1, h2, .intro, .lead, label')].map((node) => node.textContent)")
    assert page.text("#attention h2") == strings["zh"]["attention.title"]
    assert "因果掩码" in page.text("#block") and "KV 缓存" in page.text("#inference")
    assert [text for text in chinese if text in english and not text.startswith("Top-")] == []
    assert page.run("document.documentElement.lang") == "zh-CN"
    page.run(CLICK_ALL_PARTS)
    assert page.run("[...explorer.missing]") == []
    page.page.reload()
    page.page.wait_for_selector("html[data-ready]", state="attached")
    assert page.text("#attention h2") == strings["zh"]["attention.title"]


def test_a_chinese_browser_reads_chinese(open_page, record):
    page = open_page(render(record("llama").trace), locale="zh-CN")
    assert page.text("#loss h2") == page.run("explorer.strings.zh['loss.title']")


HARD_TO_READ = """() => {
  const parse = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    const size = text.startsWith('color(') ? 255 : 1;
    return [...parts.slice(0, 3).map((part) => part * size), parts[3] ?? 1];
  };
  const over = (top, under, alpha) => under.map((part, i) => top[i] * alpha + part * (1 - alpha));
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [], seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.textContent.trim() || !node.checkVisibility() || seen.has(node)) continue;
    if (node.closest('script, style, noscript, option, .skip')) continue;
    seen.add(node);
    const line = [];
    for (let at = node; at; at = at.parentElement) line.unshift(getComputedStyle(at));
    let ground = [255, 255, 255], opacity = 1;
    for (const style of line) {
      const [r, g, b, alpha] = parse(style.backgroundColor);
      ground = over([r, g, b], ground, alpha);
      opacity *= Number(style.opacity);
    }
    const style = line.at(-1), ink = over(parse(style.color), ground, opacity);
    const [a, b] = [light(ink), light(ground)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5))
      found.push(`${contrast.toFixed(2)} ${node.className || node.tagName} ${text.textContent.slice(0, 20)}`);
  }
  return [found, seen.size];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(open_page, record, scheme):
    """WCAG AA of all that is drawn: on the page's ground, on shades of attention, probability and loss."""
    page = open_page(render(record("tercet-mixed").trace), color_scheme=scheme)
    for step, token in ((0, 3), (3, 12), (4, 20)):
        page.change(step=step, token=token, head=step % 4)
        for part in (".part-mask", ".part-expand"):
            page.page.click(part)
            page.until(f"document.querySelector('{part}').ariaPressed === 'true'")
            hard, seen = page.run(HARD_TO_READ)
            assert hard == []
            assert seen > 500
    page.close()


def test_the_switch_goes_through_the_themes(open_page, record):
    page = open_page(render(record("llama").trace), color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.run(ground)
    dark_picture = page.run("document.querySelector('.head canvas').toDataURL()")
    page.page.click("#theme")  # from the system's to light
    page.run("explorer.drawAll()")
    assert page.run(ground) != dark
    assert page.run("document.querySelector('.head canvas').toDataURL()") != dark_picture
    page.page.click("#theme")
    page.run("explorer.drawAll()")
    assert page.run(ground) == dark
    assert page.run("document.querySelector('.head canvas').toDataURL()") == dark_picture
    assert page.run("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_the_page_never_scrolls_sideways(open_page, record, width, locale):
    trace = record("tercet-mixed").trace
    page = open_page(render(trace), viewport={"width": width, "height": 844}, locale=locale)
    assert page.run("document.documentElement.scrollWidth") <= width
    page.run(CLICK_ALL_PARTS)
    assert page.run("document.documentElement.scrollWidth") <= width


def test_keyboard_reaches_every_control_and_shows_where_it_is(open_page, record):
    page = open_page(render(record("llama").trace))
    wanted = page.run(
        """[...document.querySelectorAll('button, select, input, a[href], summary, [tabindex="0"]')]
        .filter((node) => node.tabIndex === 0 && node.checkVisibility()).length"""
    )
    page.run("document.activeElement.blur()")
    reached = 0
    for _ in range(wanted + 5):
        page.page.keyboard.press("Tab")
        ring = page.run(
            """() => {
              const node = document.activeElement;
              if (node === document.body) return null;
              const style = getComputedStyle(node);
              const again = Boolean(node.dataset.seen);
              node.dataset.seen = 'yes';
              const ring = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;
              return [ring, again, node.outerHTML];
            }"""
        )
        if ring is None:
            break
        assert ring[0], ring[2][:200]
        reached += not ring[1]
    assert reached >= wanted > 60


def test_arrow_keys_move_through_tokens_and_heads_and_keep_focus(open_page, record):
    page = open_page(render(record("llama").trace))
    start = page.run("explorer.state.token")
    page.page.focus("#attention [role=option][tabindex='0']")
    for _ in range(3):
        page.page.keyboard.press("ArrowLeft")
    assert page.run("explorer.state.token") == start - 3
    page.until(f"Number(document.activeElement.dataset.index) === {start - 3}")
    assert page.run("document.activeElement.closest('section').id") == "attention"
    page.change(layer=0, head=0)
    page.page.focus(".head[tabindex='0']")
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("ArrowRight")
    page.until("document.activeElement.dataset.head === '1' && document.activeElement.ariaPressed === 'true'")
    assert page.run("[explorer.state.layer, explorer.state.head]") == [1, 1]
    assert page.text("#attention .one-head h3") == "Layer 1, head 1"


def test_pointing_at_the_picture_says_who_looks_at_whom(open_page, record):
    page = open_page(render(record("gpt2").trace))
    box = page.page.locator(".large-head")
    box.scroll_into_view_if_needed()
    size = box.bounding_box()
    count = page.run("explorer.facts.tokens.length")
    cell = size["width"] / count
    box.hover(position={"x": cell * 2.5, "y": cell * 5.5})
    weight = page.array("attentions")[page.run("explorer.state.layer"), page.run("explorer.state.head"), 5, 2]
    said = page.text("#attention .readout")
    assert said.startswith("5 ") and "→ 2 " in said
    assert float(said.split()[-1].rstrip("%")) == pytest.approx(weight * 100, abs=0.051)
    box.hover(position={"x": cell * 8.5, "y": cell * 5.5})
    assert "masked" in page.text("#attention .readout")


def test_player_plays_to_the_end_and_steps(open_page, record):
    page = open_page(render(record("llama").trace))
    last = page.run("explorer.facts.steps.length") - 1
    page.page.focus("[data-focus=speed]")
    page.page.keyboard.press("End")
    page.page.click("[data-focus=play]")
    page.until("explorer.state.step > 1")
    assert page.text("[data-focus=play]").endswith("Pause")
    page.until(f"explorer.state.step === {last} && !explorer.player.playing")
    assert page.run("explorer.player.frames.length") > 10
    assert f"Decode {last}: one query" in page.text("#inference .status")
    page.page.click("[data-focus=previous]")
    assert page.run("explorer.state.step") == last - 1
    page.page.focus("[data-focus=step-slider]")
    page.page.keyboard.press("Home")
    assert page.text("#inference .status").startswith("Prefill: ")
    assert page.run("document.querySelectorAll('#inference .token.asked').length") == page.run(
        "explorer.facts.num_prompt_tokens"
    )
    assert page.complaints == []


def test_without_motion_a_pass_is_one_still_picture(open_page, record):
    page = open_page(render(record("llama").trace), reduced_motion="reduce")
    picture = "document.querySelector('#inference canvas').toDataURL()"
    page.page.click("[data-focus=play]")
    first = page.run(picture)
    page.until("explorer.player.progress > 0.5")
    assert page.run("explorer.state.step") == 0
    assert page.run(picture) == first
    page.until("explorer.state.step === 1")
    page.page.click("[data-focus=play]")
    assert page.run(picture) != first
