"""What the page must bear: sizes, absences, hostile text; and what it must not do."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from synthetic_trace import synthetic_trace
from traced_models import PROMPT

from tercet.explorer import render
from tercet.explorer.packing import pack_descending, pack_fractions, pack_scaled, pack_unsigned
from tercet.explorer.record import LeftOut
from tercet.training.errors import UserError

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=2'> @@FACTS@@ <!-- {name} *x* `y`"


@pytest.fixture(scope="module")
def gpt2_sized():
    """12 layers, 12 heads, 64 tokens, 50,257 tokens in the vocabulary."""
    return synthetic_trace()


@pytest.fixture(scope="module")
def large_page(gpt2_sized):
    return render(gpt2_sized)


def test_a_page_of_gpt2_small_is_under_5_mb(large_page):
    assert 2_000_000 < len(large_page.encode()) < 5_000_000


def test_large_page_is_right_to_the_last_row(open_page, large_page, gpt2_sized):
    page = open_page(large_page)
    sums = page.run(
        """async () => {
          const all = await explorer.load('attentions');
          let worst = 0, ahead = 0;
          for (let l = 0; l < 12; l++) for (let h = 0; h < 12; h++) for (let q = 0; q < 64; q++) {
            const row = all.row(l, h, q);
            worst = Math.max(worst, Math.abs(row.reduce((a, b) => a + b, 0) - 1));
            for (let k = q + 1; k < 64; k++) ahead = Math.max(ahead, row[k]);
          }
          return [worst, ahead];
        }"""
    )
    assert sums[0] < 1e-3 and sums[1] == 0
    # The whole vocabulary, most of it rounded: several temperatures, and a nucleus that reaches far into the tail.
    logits = gpt2_sized.activations.logits[gpt2_sized.num_prompt_tokens - 1 + 3].double()
    for temperature, top_p in ((0.5, 1.0), (1.0, 0.95), (1.8, 1.0)):
        expected = (logits / temperature).softmax(-1).sort(descending=True).values
        kept = int(((expected.cumsum(0) - expected) < top_p).sum())
        expected = expected / expected[:kept].sum()
        top, shown_kept = page.run(
            """async ([temperature, topP]) => {
              const made = explorer.distribution(await explorer.sortedLogits(3), { temperature, topP, topK: 50257 });
              return [[...made.probabilities.slice(0, 512)], made.kept];
            }""",
            [temperature, top_p],
        )
        np.testing.assert_allclose(top, expected[:512].numpy(), rtol=1e-4)
        assert shown_kept == pytest.approx(kept, rel=2e-3)
    assert "the first 64 of 768 are drawn" in page.text("#embeddings")
    assert "q, k and v 8 bits" in page.text("#about")
    assert page.complaints == []
    page.close()


def test_before_the_activation_only_what_is_shown_is_kept(gpt2_sized, large_page):
    """Of 3,072 neurons the twelve that are listed, as they are: most of a page's bytes are for attention."""
    arrays = json.loads(re.search(r'id="facts">(.*?)</script>', large_page, re.DOTALL)[1])["arrays"]
    assert arrays["neuron_ups"] == {"kind": "float32", "shape": [12, 64, 12], "bits": 32}
    assert "neuron_gates" not in arrays
    gated = dataclasses.replace(gpt2_sized.activations, mlp_gates=gpt2_sized.activations.mlp_ups)
    page = render(dataclasses.replace(gpt2_sized, activations=gated))
    assert '"neuron_gates"' in page and '"attentions"' in page
    assert len(page.encode()) < 5_000_000


def test_what_does_not_fit_is_left_out_with_a_word_in_its_place(open_page):
    trace = synthetic_trace(num_layers=4, num_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=300)
    whole = render(trace)
    assert '"queries":{"kind"' in whole
    small = render(trace, max_bytes=len(whole.encode()) // 4)
    assert len(small.encode()) < len(whole.encode()) / 2
    page = open_page(small)
    page.page.click(".part-q")
    page.page.wait_for_selector(".panel .absent")
    assert "to keep this file small" in page.text(".panel .absent")
    assert "to keep this file small" in page.text("#attention .absent")
    assert page.complaints == []
    page.close()


def test_what_the_model_does_not_show_is_said_where_it_would_be(open_page, record):
    trace = record("llama").trace
    reason = "SDPA alone can run"
    lacking = dataclasses.replace(
        trace,
        activations=dataclasses.replace(
            trace.activations, queries=None, attentions=None, mlp_activations=None, rotary_angles=None, mlp_outputs=None
        ),
        decode=(),
        prefill=dataclasses.replace(trace.prefill, cache_bytes=0, cache_bytes_per_layer=(0,) * 3),
        left_out=tuple(
            LeftOut(part, "no_attention", {"model": f"{reason} {part}"})
            for part in ("queries", "attentions", "mlp_activations", "rotary_angles", "mlp_outputs", "cache")
        ),
    )
    page = open_page(render(lacking))
    for section, part in (
        ("attention", "attentions"),
        ("ffn", "mlp_activations"),
        ("embeddings", "rotary_angles"),
        ("inference", "cache"),
        ("about", "mlp_outputs"),
    ):
        assert f"{reason} {part}" in page.text(f"#{section}")
    for button, part in ((".part-q", "queries"), (".part-softmax", "attentions"), (".part-contract", "mlp_outputs")):
        page.page.click(button)
        page.until(f"document.querySelector('.panel').textContent.includes('{reason} {part}')")
        assert f"{reason} {part}" in page.text(".panel .absent")
    assert page.complaints == []
    page.close()


@pytest.fixture(scope="module")
def hostile_page(open_page, record):
    trace = record("llama").trace
    token = dataclasses.replace(trace.tokens[1], text=HOSTILE, bytes=HOSTILE.encode().hex())
    hostile = dataclasses.replace(
        trace,
        prompt=HOSTILE,
        tokens=(trace.tokens[0], token, *trace.tokens[2:]),
        vocabulary=dict.fromkeys(trace.vocabulary, HOSTILE),
        model=dataclasses.replace(trace.model, name=HOSTILE, hyperparameters={HOSTILE: HOSTILE}),
    )
    return open_page(render(hostile))


def test_hostile_text_stays_text_everywhere(hostile_page):
    page = hostile_page
    assert page.run("typeof window.pwned") == "undefined"
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.title").startswith(HOSTILE)
    for place in ("#title", "#generated", "#bar-name", "#hyperparameters table"):
        assert HOSTILE in page.run(f"document.querySelector('{place}').textContent"), place
    assert page.run("explorer.facts.prompt") == HOSTILE
    page.page.click("#language")
    page.run("explorer.drawAll()")
    assert page.run("typeof window.pwned") == "undefined"
    assert page.complaints == []


def test_nothing_leaves_the_page_even_if_it_tried(hostile_page):
    page = hostile_page
    assert [address for address in page.requests if not address.startswith(("file:", "data:"))] == []
    assert len([address for address in page.requests if address.startswith("file:")]) == 1
    blocked = page.run("fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.name)")
    assert blocked == "TypeError"
    ran = page.run(
        """() => {
          const node = document.createElement('script');
          node.textContent = 'window.pwned = 3';
          document.body.append(node);
          return typeof window.pwned;
        }"""
    )
    assert ran == "undefined"
    assert any("Content Security Policy" in said for said in page.complaints)


def test_no_text_of_the_model_can_end_a_script_element(record):
    trace = record("llama").trace
    text = render(dataclasses.replace(trace, prompt="\ud800 </script> <!-- <script>"))
    text.encode()  # a lone surrogate would not go into a file
    facts = re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1]
    assert "<" not in facts
    assert json.loads(facts)["prompt"] == "\ud800 </script> <!-- <script>"


def test_unprintable_bytes_are_shown_by_their_bytes(open_page, record):
    page = open_page(render(record("gpt2").trace))
    tokens = page.run("explorer.facts.tokens")
    assert any(re.fullmatch("<[0-9A-F]{2}>", token["text"]) for token in tokens), (
        "the prompt's Chinese falls into bytes in this vocabulary"
    )
    page.run("document.querySelector('#tokens details').open = true")
    listed = page.text("#tokens table")
    for token in tokens:
        assert re.sub("(..)", r"\1 ", token["bytes"]).strip() in listed
    page.close()


def test_a_text_whose_characters_are_several_tokens_is_written_whole(open_page, record):
    trace = record("gpt2").trace
    page = open_page(render(trace))
    assert PROMPT in page.run("document.querySelector('#generated').textContent")
    page.change(step=0)
    assert "中文 é" in page.text("#sampling")
    page.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" a\n", "·a⏎"),
        ("\x00\x1b\x7f\x85", "<00><1B><7F><U+0085>"),
        ("x\u202ey\u200b", "x<U+202E>y<U+200B>"),
        ("\u200d", "<U+200D>"),
        ("👩\u200d👧", "👩\u200d👧"),
        ("كتب", "\u2068كتب\u2069"),  # isolated, so that "5 كتب → 2" keeps its order
        ("", "∅"),
    ],
)
def test_what_is_invisible_in_a_token_is_shown_as_a_sign(open_page, record, text, shown):
    trace = record("llama").trace
    tokens = (dataclasses.replace(trace.tokens[0], text=text), *trace.tokens[1:])
    page = open_page(render(dataclasses.replace(trace, tokens=tokens)))
    assert page.run("document.querySelector('#tokens .token').textContent") == shown
    page.close()


def test_a_box_for_another_prompt_only_where_a_server_stands_behind(open_page, record):
    trace = record("llama").trace
    assert open_page(render(trace)).run("document.querySelectorAll('form').length") == 0
    served = render(trace, form_action="/run")
    page = open_page(served)
    form = page.run(
        """() => {
          const { method, action, elements } = document.forms[0];
          return [method, new URL(action).pathname, elements.prompt.value, elements.new_tokens.value];
        }"""
    )
    assert form == ["post", "/run", trace.prompt, "6"]
    page.run("document.forms[0].elements.new_tokens.value = '300'")
    assert page.run("document.forms[0].checkValidity()")  # how many there may be, the server knows
    assert "form-action 'self'" in served and "form-action 'none'" in render(trace)


def test_prompt_of_one_token_and_one_new(open_page):
    trace = synthetic_trace(
        num_layers=1, num_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=16, vocab_size=250,
        num_prompt_tokens=1, num_tokens=2,
    )  # fmt: skip
    page = open_page(render(dataclasses.replace(trace, bits_per_byte=None)))
    assert "a prompt of one token has none" in page.text("#loss")
    assert "NaN" not in page.text("main")
    page.page.click("[data-focus=play]")
    page.until("!explorer.player.playing")
    assert page.complaints == []
    page.close()


def test_a_diverged_model_is_refused_in_one_line_and_infinite_settings_are_shown(open_page, record):
    trace = record("llama").trace
    with pytest.raises(UserError, match=r"loss of token 3 is nan.*earlier checkpoint"):
        render(dataclasses.replace(trace, losses=(1.0, 2.0, float("nan"), *trace.losses[3:])))
    facts = dataclasses.replace(trace.model, hyperparameters={"time_limit": [0.0, float("inf")]})
    assert '"Infinity"' in open_page(render(dataclasses.replace(trace, model=facts))).text("#hyperparameters table")


def test_rows_keep_their_sums_in_few_bits():
    rows = torch.rand(50, 200, generator=torch.Generator().manual_seed(0)).pow(8)
    rows = (rows / rows.sum(-1, keepdim=True)).numpy()
    for bits in (8, 16):
        stored = _unpack(pack_fractions(rows, bits), bits) / (2**bits - 1)
        assert np.abs(stored.reshape(rows.shape).sum(-1) - 1).max() < 1e-9
        assert np.abs(stored.reshape(rows.shape) - rows).max() <= 1 / (2**bits - 1)


def test_packed_values_are_as_near_as_they_say():
    values = np.random.default_rng(0).normal(size=(7, 33))
    values[3] = 0
    packed = pack_scaled(values, 8)
    assert packed.shape == (7, 33)
    with pytest.raises(ValueError, match="65535"):
        pack_unsigned(np.array([1, 65536]))
    steps = np.frombuffer(_inflate(pack_descending(np.array([[5.0, 4.5, -np.inf]]))), "u1")
    assert steps[:4].view("<f4")[0] == 5.0
    low, high = steps[4:7].astype(int), steps[7:10].astype(int)
    assert (low + 256 * high).tolist() == [0, 512, 65535]


def _inflate(packed) -> bytes:
    import base64
    import zlib

    return zlib.decompress(base64.b64decode(packed.data))


def _unpack(packed, bits: int) -> np.ndarray:
    raw = np.frombuffer(_inflate(packed), "u1").astype(np.int64)
    return raw if bits == 8 else raw[: raw.size // 2] + 256 * raw[raw.size // 2 :]
