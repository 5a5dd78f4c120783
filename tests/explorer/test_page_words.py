"""What the page says of a family is so, in English; and in Chinese nothing is left in English."""

import dataclasses
import re

import pytest
import torch
from page_browser import OpenedPage
from synthetic_trace import synthetic_trace
from traced_models import WINDOW
from transformers.activations import ACT2FN

from tercet.explorer import render
from tercet.explorer.record import LeftOut
from tercet.explorer.words import LANGUAGES, strings


def panel(page: OpenedPage, part: str, **state: int) -> str:
    """What the panel says of a part, once that is chosen."""
    page.change(**state)
    page.page.click(f".part-{part}")
    page.until(f"document.querySelector('.part-{part}').getAttribute('aria-pressed') === 'true'")
    return page.text(".panel")


@pytest.mark.parametrize(
    ("kind", "layer", "part", "said", "not_said"),
    [
        ("llama4_text", 0, "mask", f"chunks of {WINDOW} tokens", "sliding"),
        ("llama4_text", 1, "mask", "never ahead", "chunk"),
        ("llama4_text", 1, "rotate", "does not rotate", "turns by"),
        ("mistral", 0, "mask", f"keys {WINDOW} or more tokens back are hidden", "chunk"),
        ("llama", 0, "mask", "never ahead", "sliding"),
        ("olmo", 1, "norm1", "Nothing learned follows", "learned scale"),
        ("gemma2", 1, "norm2", "kept as its difference from 1", "shift"),
        ("gemma2", 1, "output", "post_attention_layernorm", "multiplied"),
        ("gemma2", 1, "scores", "50.0 · tanh(score / 50.0)", "distance"),
        ("cohere", 1, "norm1", "/ standard deviation. A learned scale follows", "shift"),
        ("cohere", 1, "norm2", "normed once for both", "same again"),
        ("cohere", 1, "q", "q_norm, k_norm", "none"),
        ("gpt_neox", 1, "norm2", "a norm of its own", "same again"),
        ("cohere2", 1, "rotate", "does not rotate", "turns by"),
        ("cohere2", 0, "rotate", "turns by an angle", "does not rotate"),
        ("gpt_oss", 1, "softmax", "sink", "add up to 1"),
        ("llama", 1, "softmax", "add up to 1", "sink"),
        ("bloom", 1, "scores", "takes something off for distance", "tanh"),
        ("granite", 1, "contract", "multiplied by 0.300", "norm"),
        ("glm4_moe", 0, "expand", "from 32 to 48", "A router"),
        ("glm4_moe", 1, "expand", "from 32 to 24", "from 32 to 48"),
        ("openai-gpt", 1, "k", "what do I have to offer", "read from the cache"),
        ("llama", 1, "k", "read from the cache", "norm"),
        ("gpt_oss", 1, "activation", "could not show", "difference"),
    ],
)
def test_the_sentences_of_a_part_are_those_of_its_layer(shown, kind, layer, part, said, not_said):
    text = panel(shown(kind), part, layer=layer)
    assert said in text
    assert not_said not in text


@pytest.mark.parametrize(
    ("kind", "section", "said", "not_said"),
    [
        ("llama4_text", "attention", "back to the first token of its own piece", "Sliding"),
        ("llama4_text", "embeddings", "layer 1 do not rotate", "learned positions"),
        ("mistral", "attention", "Sliding windows", "Chunks"),
        ("gemma2", "embeddings", "multiplies the row by 5.657", "do not rotate"),
        ("granite", "embeddings", "multiplied by 3.000", "the row by"),
        ("bloom", "embeddings", "Before the first block a norm", "multiplied"),
        ("gemma3_text", "embeddings", "Layers turn by different angles", "do not rotate"),
        ("gemma2", "lens", "3.000 · tanh(x / 3.000)", "multiplies what the head"),
        ("granite", "lens", "multiplies what the head returns by 0.5000", "tanh"),
        ("openai-gpt", "lens", "After the last block, the output head", "final"),
        ("llama", "lens", "After the last block and the final RMSNorm, the output head", "tanh"),
        ("qwen3_next", "inference", "layers 0, 1 add no column", "in each of"),
        ("qwen3_next", "inference", "in 1 of 3 layers and adds one", "in each of"),
        ("qwen3_next", "block", "In 1 of them attention moves", "In each, attention"),
        ("qwen3_next", "attention", "4 heads make 4 patterns", "12 patterns"),
        ("phi", "block", "work side by side", "not plainly"),
        ("mixtral", "ffn", "The sizes are those of one", "Three matrices"),
    ],
)
def test_the_sentences_of_a_section_are_those_of_its_family(shown, kind, section, said, not_said):
    page = shown(kind)
    page.change(layer=0, step=1)
    assert said in page.text(f"#{section}")
    assert not_said not in page.text(f"#{section}")


def test_the_row_of_a_learned_position_is_the_one_that_was_added(shown):
    for kind, offset in (("gpt2", 0), ("opt", 2)):
        page = shown(kind)
        page.change(token=5)
        assert f"row {5 + offset} is added" in page.text("#embeddings")


def test_a_layer_without_attention_has_no_parts_of_it(shown):
    page = shown("qwen3_next")
    parts = "[...document.querySelectorAll('.part')].map((node) => node.className.match(/part-(\\w+)/)[1])"
    page.change(layer=2)
    assert {"q", "k", "v", "scores", "expand"} <= set(page.run(parts))
    page.change(layer=0)
    assert page.run(parts)[:4] == ["input", "norm1", "mixer", "add1"]
    assert "has no attention with softmax" in page.text("#block")
    assert "Qwen3NextGatedDeltaNet" in page.text(".part-mixer")


def test_what_a_chunk_hides_is_masked_in_every_picture(record, shown):
    page, run = shown("llama4_text"), record("llama4_text").trace
    count = len(run.tokens)
    page.change(layer=0, head=0, token=WINDOW)
    assert page.run("document.querySelectorAll('#attention .token.unseen').length") == count - 1
    page.change(token=WINDOW - 1)
    assert page.run("document.querySelectorAll('#attention .token.unseen').length") == count - WINDOW
    page.page.click("#block .choices button:last-child")
    page.until("document.querySelector('.part-scores .shape').textContent.includes('(1, 4, 1, ')")
    for step in (1, 3):
        page.change(step=step)
        tokens = run.decode[step - 1].token
        assert page.text(".part-scores .shape").endswith(f"(1, 4, 1, {(tokens - 1) % WINDOW + 1})")
    page.change(layer=1)
    assert page.text(".part-scores .shape").endswith(f"(1, 4, 1, {tokens})")


CURVE = """() => {
  // Where the curve of the activation runs: of each column of pixels the middle of those in the accent's colour.
  const canvas = [...document.querySelectorAll('#ffn figure canvas')].pop();
  if (!canvas) return null;
  const { width, height } = canvas, { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
  const [r, g, b] = getComputedStyle(document.documentElement).getPropertyValue('--accent').trim()
    .match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16));
  const points = [];
  for (let x = 0; x < width; x++) {
    let [sum, weight] = [0, 0];
    for (let y = 0; y < height; y++) {
      const i = 4 * (y * width + x);
      const far = Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b);
      if (data[i + 3] > 60 && far < 90) [sum, weight] = [sum + y + 0.5, weight + 1];
    }
    if (weight) points.push([(x + 0.5) / width * 8 - 4, (height - 16 - sum / weight) / (height - 16) * 4.5 - 0.5]);
  }
  return points;
}"""


@pytest.mark.parametrize("name", ["relu", "relu2", "silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "tanh"])
def test_the_curve_is_that_of_the_activation(open_page, name):
    trace = synthetic_trace(num_layers=1, num_heads=2, num_key_value_heads=2, head_dim=8, vocab_size=250, num_tokens=50)
    facts = dataclasses.replace(trace.model, activation=name)
    page = open_page(render(dataclasses.replace(trace, model=facts)))
    points = torch.tensor(page.run(CURVE))
    page.close()
    flat = points[(points[:, 0] > -3.9) & (points[:, 0] < 1.5)]
    assert len(flat) > 100
    assert (ACT2FN[name](flat[:, 0]) - flat[:, 1]).abs().max() < 0.16  # a line of two pixels; one pixel is 0.04
    assert flat[:, 1].max() > 0.8


def test_an_activation_that_the_page_does_not_know_has_no_curve(open_page, record):
    trace = record("llama").trace
    page = open_page(render(dataclasses.replace(trace, model=dataclasses.replace(trace.model, activation="xielu"))))
    assert page.run(CURVE) is None
    page.close()


# ---- Chinese ----

WORDS_SEEN = """(root) => {
  // Everything that a reader meets as words: text, and what a screen reader says instead. Not: names in code, tokens of
  // the model, what says of itself that it is in another language.
  const aside = 'script, style, noscript, code, .token, .bar-label, .lens-cell, #generated, #bar-name, bdi, '
    + '.proper-name, .drawn, .shape, body [lang=en], option, .panel .numbers';
  const found = [];
  const within = document.querySelector(root);
  const walker = document.createTreeWalker(within, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    if (!text.parentElement.closest(aside)) found.push(text.textContent);
  }
  for (const node of within.querySelectorAll('[aria-label], [title], [placeholder], [aria-valuetext], [alt]')) {
    if (node.closest('.token, body [lang=en]')) continue;
    for (const name of ['aria-label', 'title', 'placeholder', 'aria-valuetext', 'alt']) {
      if (node.hasAttribute(name)) found.push(node.getAttribute(name));
    }
  }
  return found;
}"""
SLOW_KINDS = ["llama", "gpt2", "gpt_oss", "gemma2", "bloom", "falcon", "cohere2", "tercet-mixed"]
ENGLISH = re.compile(r"[A-Za-z]{2,}(?:[\s,;:.]+[A-Za-z]{2,})+")


def english_in(page: OpenedPage, root: str = "body") -> set[str]:
    """Runs of two and more English words that a reader meets now, of the page or of a part of it."""
    texts = page.run(WORDS_SEEN, root)
    assert len(texts) > 5
    return {match[0] for text in texts for match in ENGLISH.finditer(text)}


@pytest.mark.parametrize(
    "kind",
    ["llama4_text", "openai-gpt", "qwen3_next", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)],
)
def test_the_chinese_page_has_no_english_sentence(open_page, record, kind):
    page = open_page(render(record(kind).trace, form_action="/run"), locale="zh-CN")
    page.run("for (const node of document.querySelectorAll('details')) node.open = true")
    found = set()
    for layer in range(3):
        page.change(layer=layer, step=layer, token=3 + layer)
        parts = page.run(
            "[...document.querySelectorAll('.part')].map((node) => node.className.match(/part-(\\w+)/)[1])"
        )
        assert len(parts) > 5
        for part in parts:
            panel(page, part)
            found |= english_in(page, "#block")
        found |= english_in(page)
    page.page.hover(".large-head") if kind == "llama4_text" else None
    assert found | english_in(page) == set()
    assert page.run("[...explorer.missing]") == []
    page.close()


def test_an_english_sentence_would_be_found(open_page, record):
    page = open_page(render(record("llama").trace))
    assert len(english_in(page)) > 100
    page.close()


def test_every_reason_is_told_in_the_language_of_the_page(open_page, record):
    trace = record("llama").trace
    values = {}
    for key in sorted(key for key in strings("page", "en") if key.startswith("reason.")):
        values[key] = dict.fromkeys(re.findall(r"\{(\w+)\}", strings("page", "en")[key]), "7")
    assert len(values) > 15
    left_out = tuple(LeftOut("logits", key.partition(".")[2], put) for key, put in values.items())
    page = open_page(render(dataclasses.replace(trace, left_out=left_out)), locale="zh-CN")
    for language in ("zh", "en"):
        for key, put in values.items():
            told = strings("page", language)[key].format_map(put)
            assert told in page.text("#sampling .absent") and told in page.text("#about")
        if language == "zh":
            assert english_in(page) == set()
            page.page.click("#language")
            page.run("explorer.drawAll()")
    page.close()


@pytest.mark.parametrize("kind", ["page", "problems"])
def test_both_languages_have_every_string_and_put_the_same_values_in(kind):
    english, chinese = (strings(kind, language) for language in LANGUAGES)
    assert english.keys() == chinese.keys()
    slots = re.compile(r"\{(\w+)\}")
    assert {key for key in english if set(slots.findall(english[key])) != set(slots.findall(chinese[key]))} == set()
    # What is equal in both is a symbol or a name, not a sentence that nobody translated.
    sentence = re.compile(r"[a-z]+ [a-z]+ [a-z]+")
    assert [key for key in english if english[key] == chinese[key] and sentence.search(english[key])] == []
