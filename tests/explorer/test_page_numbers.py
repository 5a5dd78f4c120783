"""The numbers of the page, read from the page in a browser, against the model and against each other."""

import itertools

import numpy as np
import pytest
import torch
from traced_models import WINDOW
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

KINDS = ["gpt2", "llama", "tercet-mixed"]


@pytest.mark.parametrize("kind", KINDS)
def test_attention_rows_sum_to_one_and_none_looks_ahead(shown, kind):
    weights = shown(kind).array("attentions")
    assert weights.shape[-1] > 10
    assert np.abs(weights.sum(-1) - 1).max() < 1e-3
    assert np.triu(weights, 1).max() == 0
    assert weights.std() > 0.01  # not just a uniform row


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_the_models_and_the_softmax_of_the_scores_beside_it(record, shown, kind):
    page, activations = shown(kind), record(kind).trace.activations
    weights = page.array("attentions")
    np.testing.assert_allclose(weights, activations.attentions.numpy(), atol=3e-5)
    layer, head, token = 1, 3, weights.shape[-1] - 2
    scores = np.array(page.run("async ([l, h, t]) => [...await explorer.scoresOf(l, h, t)]", [layer, head, token]))
    window = record(kind).trace.model.layers[layer].window or 10**9
    seen = np.array([j <= token and token - j < window for j in range(len(scores))])
    shares = np.where(seen, np.exp(scores - scores[seen].max()), 0)
    np.testing.assert_allclose(shares / shares.sum(), weights[layer, head, token], atol=1e-3)
    assert np.isfinite(scores).all()  # also of the tokens that the mask hides


@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_are_what_generate_writes(record, shown, kind):
    page, traced = shown(kind), record(kind)
    new_tokens = len(traced.trace.tokens) - traced.trace.num_prompt_tokens
    ids = traced.model.generate(traced.prompt_ids, max_new_tokens=new_tokens, do_sample=False)[0].tolist()
    assert page.run("explorer.facts.tokens.map((token) => token.id)") == ids
    assert page.run("explorer.facts.candidates.map((row) => row[0])") == ids[traced.trace.num_prompt_tokens :]
    for step in range(new_tokens):
        page.change(step=step)
        assert "◂" in page.text("#sampling .bars li:first-child")  # the chosen one leads the list


@pytest.mark.parametrize("kind", KINDS)
def test_last_row_of_the_lens_is_the_output(record, shown, kind):
    page, traced = shown(kind), record(kind)
    lens = page.run("explorer.facts.lens")
    with torch.no_grad():
        logits = traced.model(traced.ids).logits[0].double()
    top = logits.softmax(-1).topk(5)
    np.testing.assert_allclose(lens["probabilities"][-1], top.values.numpy(), atol=1e-5)
    assert (np.array(lens["ids"][-1]) == top.indices.numpy()).mean() > 0.98  # equal but for ties
    for step in range(3):  # and the page's own logits say the same
        ours = page.run("async (step) => [...await explorer.sortedLogits(step)]", step)
        position = traced.trace.num_prompt_tokens - 1 + step
        np.testing.assert_allclose(
            torch.tensor(ours).double().softmax(-1)[:5].numpy(), lens["probabilities"][-1][position], atol=1e-5
        )


def test_cache_bytes_are_those_of_the_cache(record, shown):
    page, traced = shown("tercet-modern"), record("tercet-modern")
    output = traced.model.generate(
        traced.prompt_ids,
        max_new_tokens=len(traced.trace.tokens) - traced.trace.num_prompt_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    last = page.run("explorer.facts.steps.at(-1)")
    assert last["cache_bytes_allocated"] == output.cache.nbytes
    assert last["num_keys"] == output.cache.get_seq_length()
    page.change(step=traced.trace.decode[-1].token - traced.trace.num_prompt_tokens)
    assert f"({output.cache.nbytes:,} B)" in page.text("#inference table")
    assert f"({last['cache_bytes']:,} B)" in page.text("#inference table")


def test_each_decode_step_adds_one_column_to_each_layer(shown):
    page = shown("gpt2")
    steps = page.run("explorer.facts.steps")
    column = 2 * 32 * 4  # key and value, hidden size, float32
    assert [step["num_queries"] for step in steps[1:]] == [1] * (len(steps) - 1)
    for before, after in itertools.pairwise(steps):
        assert after["cache_bytes_read"] == before["cache_bytes"]
        assert np.subtract(after["cache_bytes_per_layer"], before["cache_bytes_per_layer"]).tolist() == [column] * 3


def test_a_window_shorter_than_the_prompt_hides_no_query(record, shown):
    page, run = shown("mistral"), record("mistral").trace
    first = run.num_prompt_tokens
    page.change(step=0)
    assert page.text("#inference .status").startswith(f"Prefill: {first} tokens at once")
    asked = "[...document.querySelectorAll('#inference .token')].flatMap((t, i) => (t.matches('.asked') ? [i] : []))"
    assert page.run(asked) == list(range(first))
    assert page.text(".part-scores .shape").endswith(f"(1, 4, {first}, {first})")
    page.change(step=2)
    assert page.run(asked) == [first + 1]
    assert page.run(asked.replace(".asked", ".in-cache")) == list(range(first + 2 - WINDOW, first + 1))
    assert f"reads at most {WINDOW - 1} cached columns" in page.text("#inference .status")
    page.page.click("#block .choices button:last-child")
    page.until("document.querySelector('.part-scores .shape').textContent.includes('(1, 4, 1, ')")
    assert page.text(".part-scores .shape").endswith(f"(1, 4, 1, {WINDOW})")
    assert "Each token adds 384 bytes" in page.text("#inference")  # 2 x 3 layers x 2 heads x 8 numbers x 4 bytes
    assert "takes the place of the oldest" in page.text("#inference")
    assert page.run(_COLUMNS) == [1, first + 2 - WINDOW]


def test_shapes_are_those_of_the_chosen_layer(shown):
    page = shown("tercet-mixed")
    page.change(layer=0, step=3)
    page.page.click("#block .choices button:last-child")
    page.until("document.querySelector('.part-scores .shape').textContent.includes('(1, 4, 1, ')")
    assert page.text(".part-scores .shape").endswith(f"(1, 4, 1, {WINDOW})")
    page.change(layer=1)
    tokens = page.run("explorer.facts.steps[3].token")
    assert page.text(".part-scores .shape").endswith(f"(1, 4, 1, {tokens})")


@pytest.mark.parametrize("kind", ["openai-gpt", "olmo2"])
def test_a_norm_that_the_model_does_not_have_has_no_numbers(shown, kind):
    page = shown(kind)
    for part in (".part-norm1", ".part-norm2"):
        page.page.click(part)
        page.until(f"document.querySelector('{part}').ariaPressed === 'true'")
        # OpenAI's GPT norms the sum, so what its MLP is given is no part of the stream.
        is_told = kind == "olmo2" or part == ".part-norm1"
        assert ("no norm stands before this part" if is_told else "no norm is shown") in page.text(".panel .absent")
        assert page.run("document.querySelectorAll('.panel .vector').length") == 0
    # OpenAI's GPT norms the sums themselves, OLMo 2 what is added.
    assert ("not plainly x + attention + FFN" in page.text("#block")) == (kind == "openai-gpt")
    page.page.click(".part-output")
    page.until("document.querySelector('.part-output').getAttribute('aria-pressed') === 'true'")
    assert ("brings it to one size before it is added" in page.text(".panel")) == (kind == "olmo2")


def test_a_layer_that_does_not_rotate_says_so(shown):
    page = shown("smollm3")
    page.page.click(".part-rotate")
    for layer, rotates in ((0, True), (2, False)):
        page.change(layer=layer)
        assert ("Angles of the first pairs" in page.text(".panel")) == rotates
        assert ("does not rotate" in page.text(".panel")) != rotates


@pytest.mark.parametrize("settings", [(0.7, 40, 1.0), (1.0, 1024, 0.9), (1.6, 300, 0.5), (0.05, 5, 0.99)])
def test_sliders_make_the_distribution_of_transformers_warpers(record, shown, settings):
    temperature, top_k, top_p = settings
    traced, page, step = record("llama"), shown("llama"), 2
    logits = traced.trace.activations.logits[traced.trace.num_prompt_tokens - 1 + step][None].double()
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    expected = warped.softmax(-1)[0].sort(descending=True).values
    got = page.run(
        """async ([step, temperature, topK, topP]) => {
          const { probabilities, kept } = explorer.distribution(
            await explorer.sortedLogits(step), { temperature, topK, topP });
          return [[...probabilities], kept];
        }""",
        [step, *settings],
    )
    np.testing.assert_allclose(got[0], expected.numpy(), atol=2e-4)
    assert got[1] == int((expected > 0).sum())


def test_moving_a_slider_recomputes_what_is_shown(open_page, record):
    from tercet.explorer import render

    page = open_page(render(record("gpt2").trace))
    first = "#sampling .bars li:first-child .bar-note"
    before = page.text(first)
    page.page.focus("#slider-temperature")
    for _ in range(14):
        page.page.keyboard.press("ArrowLeft")
    after = page.text(first)
    logits = torch.tensor(page.run("async () => [...await explorer.sortedLogits(0)]")).double()
    temperature = page.run("explorer.settings.temperature")
    assert temperature == pytest.approx(0.3)
    assert float(after.split("%")[0]) == pytest.approx(100 * (logits / temperature).softmax(-1)[0].item(), abs=0.06)
    assert after != before
    page.page.focus("#slider-topK")
    page.page.keyboard.press("Home")
    assert page.text(first).startswith("100.0%")
    assert page.text("#sampling .status").startswith("1 of 1,024")


def test_weighted_values_are_what_the_head_found(record, shown):
    """The page's own sum of shares times values, through the output matrix, is what the model's attention adds."""
    traced, page = record("llama"), shown("llama")
    weights, values = page.array("attentions"), page.array("values")
    layer, token = 1, 9
    found = np.einsum("hj,hjd->hd", weights[layer, :, token], values[layer].repeat(2, axis=0)).reshape(-1)
    output = traced.model.model.layers[layer].self_attn.o_proj.weight.detach().numpy() @ found
    np.testing.assert_allclose(output, page.array("attention_outputs")[layer, token], atol=5e-3)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_expand_shows_what_the_matrices_give_before_the_activation(record, shown, kind):
    page, activations = shown(kind), record(kind).trace.activations
    strings = page.run("explorer.strings.en")
    parts = [part for part in (activations.mlp_gates, activations.mlp_ups) if part is not None]
    for layer, token in ((1, 4), (2, 7)):
        page.change(layer=layer, token=token)
        strongest = activations.mlp_activations[layer, token].abs().argsort(descending=True, stable=True)[:8]
        page.page.click(".part-expand")
        page.until("document.querySelector('.panel .before-table') !== null")
        rows = page.run(_ROWS)
        assert [int(row[0]) for row in rows] == strongest.tolist()
        for i, part in enumerate(parts):
            told = [_number(row[i + 1]) for row in rows]
            np.testing.assert_allclose(told, part[layer, token, strongest].numpy(), rtol=6e-3)
        assert {len(row) for row in rows} == {1 + len(parts)}
        page.page.click(".part-activation")
        page.until("document.querySelector('.panel .bars') !== null")
        notes = page.run("[...document.querySelectorAll('.panel .bar-note')].map((node) => node.textContent)")
        before, after = np.array([[_number(side) for side in note.split(" → ")] for note in notes]).T
        np.testing.assert_allclose(before, parts[0][layer, token, strongest].numpy(), rtol=6e-3)
        np.testing.assert_allclose(after, activations.mlp_activations[layer, token, strongest].numpy(), rtol=6e-3)
    way = "plain" if activations.mlp_gates is None else "gated"
    assert strings[f"part.activation.{way}"].split("`")[0] in page.text(".panel")


def test_expand_speaks_both_languages_and_stays_on_a_phone(open_page, record):
    from tercet.explorer import render

    for kind, way in (("llama", "gated"), ("gpt2", "plain")):
        page = open_page(render(record(kind).trace), viewport={"width": 390, "height": 844})
        strings = page.run("explorer.strings")
        page.page.click(".part-expand")
        page.until("document.querySelector('.panel .before-table') !== null")
        assert strings["en"][f"part.expand.{way}"].split("*")[0] in page.text(".panel")
        assert page.run(f"{_TABLE}.scrollWidth") <= page.run(f"{_TABLE}.clientWidth")
        page.page.click("#language")
        page.until(f"document.querySelector('.panel h3').textContent === '{strings['zh']['part.expand.name']}'")
        assert strings["zh"][f"part.expand.{way}"].split("*")[0] in page.text(".panel")
        heads = page.run("[...document.querySelectorAll('.panel thead th')].map((cell) => cell.textContent)")
        assert heads[:2] == [
            strings["zh"]["part.expand.neuron"],
            strings["zh"]["part.expand.gate" if way == "gated" else "part.expand.value"],
        ]
        assert page.run("[...explorer.missing]") == [] and page.complaints == []
        page.close()


def test_expand_says_why_it_has_no_numbers(shown):
    page = shown("mixtral")
    page.page.click(".part-expand")
    page.until("document.querySelector('.panel .absent') !== null")
    assert "experts of its own choice" in page.text(".panel .absent")
    assert page.text(".panel .numbers").startswith("32 → 48")


_COLUMNS = """() => {
  // What the picture of the cache fills of its top row: how many runs of columns, and where the first begins.
  const canvas = document.querySelector('#inference canvas'), context = canvas.getContext('2d');
  const tokens = explorer.facts.tokens.length, cell = (canvas.width - 34) / tokens;
  const colour = (i) => [...context.getImageData(34 + (i + 0.4) * cell, 8, 1, 1).data].join();
  const empty = colour(0), read = Array.from({ length: tokens }, (_, i) => colour(i) !== empty);
  return [read.filter((now, i) => now && !read[i - 1]).length, read.indexOf(true)];
}"""
_TABLE = "document.querySelector('.panel .scroll')"
_ROWS = """[...document.querySelectorAll('.panel .before-table tbody tr')].map(
  (row) => [...row.children].map((cell) => cell.textContent))"""


def _number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-"))


def test_rotary_angles_are_position_times_frequency(record, shown):
    angles = shown("llama").array("rotary")[0]
    frequencies = record("llama").model.model.rotary_emb.inv_freq.numpy()
    turned = np.outer(np.arange(len(angles)), frequencies)
    np.testing.assert_allclose(np.cos(angles), np.cos(turned), atol=1e-4)
    np.testing.assert_allclose(np.sin(angles), np.sin(turned), atol=1e-4)


def test_loss_and_counts_are_the_models(record, shown):
    traced, page = record("gpt2"), shown("gpt2")
    with torch.no_grad():
        loss = traced.model(traced.prompt_ids, labels=traced.prompt_ids).loss.item()
    assert f"{loss:.3f} nats" in page.text("#loss .facts")
    assert f"{traced.model.num_parameters():,}" in page.text("#weights .intro")
    names = page.run("[...document.querySelectorAll('#weights details tbody th')].map((cell) => cell.textContent)")
    assert set(names) >= {name for name, _ in traced.model.named_parameters()}
    listed = page.text("#hyperparameters table")
    assert [name for name in traced.trace.model.hyperparameters if name not in listed] == []
    assert {"n_embd", "n_layer", "n_head", "vocab_size"} <= set(listed.split())
