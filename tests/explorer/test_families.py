"""What is said of a family is what its modules do: held against the modules themselves, or against torch's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from traced_models import WINDOW, make_model
from transformers.activations import ACT2FN

from tercet.explorer.attention_probe import PROBE, attention_set_to, noted_calls

# Where a family keeps its blocks, and how it calls the norms before attention and MLP.
BLOCKS = {
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gpt_neox": "gpt_neox.layers",
    "bloom": "transformer.h",
}
NORMED = [
    "llama", "gpt2", "gemma2", "gemma3_text", "olmo", "nanochat", "cohere", "phi", "opt", "gpt_neox", "bloom",
    "qwen3_next", "tercet-modern", "tercet-classic",
]  # fmt: skip


def block_of(traced, index):
    return traced.model.get_submodule(BLOCKS.get(traced.kind, "model.layers"))[index]


def facts_of(traced, name):
    return [getattr(layer, name) for layer in traced.trace.model.layers]


def computed(norm, facts, states):
    """What `facts` say of a norm, by torch's own functions and the module's own parameters."""
    weight = None if facts.scale == "none" else norm.weight + (facts.scale == "one_plus_weight")
    eps = (
        next(getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name))
        if weight is not None
        else 1e-5
    )
    if facts.label == "RMSNorm":
        return F.rms_norm(states, states.shape[-1:], weight, eps)
    return F.layer_norm(states, states.shape[-1:], weight, norm.bias if facts.shift else None, eps)


@pytest.mark.parametrize("kind", NORMED)
@torch.no_grad()
def test_norms_do_what_is_said_of_them(record, kind):
    traced = record(kind)
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)) + 0.3
    checked = 0
    for index, layer in enumerate(traced.trace.model.layers):
        for facts in (
            layer.norm_before_attention,
            layer.norm_before_mlp,
            layer.norm_after_attention,
            layer.norm_after_mlp,
        ):
            if facts is not None:
                norm = block_of(traced, index).get_submodule(facts.module)
                assert (facts.scale == "none") == (not list(norm.parameters()))
                assert torch.allclose(computed(norm, facts, states), norm(states), rtol=1e-3, atol=1e-4)
                checked += 1
    assert checked >= 2


def test_kinds_of_norms(record):
    def told(kind):
        norm = record(kind).trace.model.layers[-1].norm_before_attention
        return norm.label, norm.scale, norm.shift

    assert told("olmo") == ("LayerNorm", "none", False)
    assert told("nanochat") == ("RMSNorm", "none", False)
    assert told("gemma2") == told("qwen3_next") == ("RMSNorm", "one_plus_weight", False)
    assert told("cohere") == ("LayerNorm", "weight", False)
    assert told("gpt2") == ("LayerNorm", "weight", True)


@pytest.mark.parametrize("kind", ["llama", "smollm3", "cohere2", "gemma3_text", "gpt_neox", "phi", "tercet-mixed"])
def test_layers_that_rotate_are_those_whose_queries_change_with_the_position(record, kind):
    """All positions moved by as much leave a rotary model's stream as it is, and turn its queries."""
    traced = record(kind)
    model = copy.deepcopy(traced.model)
    positions = torch.arange(traced.ids.shape[1])[None]
    with torch.no_grad(), attention_set_to(model, PROBE), noted_calls() as calls:
        model(traced.ids, position_ids=positions, use_cache=False)
        model(traced.ids, position_ids=positions + 7, use_cache=False)
    here, moved = calls[:3], calls[3:]
    turned = [not torch.allclose(a.query, b.query, rtol=1e-3, atol=1e-3) for a, b in zip(here, moved, strict=True)]
    assert facts_of(traced, "rotates") == turned
    assert any(turned)


def test_some_layers_do_not_rotate(record):
    assert facts_of(record("cohere2"), "rotates") == [True, False, True]
    assert facts_of(record("smollm3"), "rotates") == [True, True, False]
    assert facts_of(record("llama4_text"), "rotates") == [True, False, True]
    assert facts_of(record("qwen3_next"), "rotates") == [False, False, True]
    for kind in ("gpt2", "bloom", "opt"):
        assert facts_of(record(kind), "rotates") == [False] * 3


def test_each_layer_has_the_angles_that_turn_it(record):
    traced = record("gemma3_text")
    angles = traced.trace.activations.rotary_angles
    assert angles.shape[0] == 2
    for layer, kind in enumerate(traced.model.config.layer_types):
        theta = traced.model.config.rope_parameters[kind]["rope_theta"]
        turned = torch.arange(angles.shape[2])[:, None] * theta ** (-torch.arange(0, 8, 2) / 8)
        cosines, sines = angles[traced.trace.model.layers[layer].angle_set]
        assert torch.allclose(cosines[:, :4], turned.cos(), atol=1e-3)
        assert torch.allclose(sines[:, :4], turned.sin(), atol=1e-3)


def test_a_chunk_is_no_window(record):
    traced = record("llama4_text")
    assert facts_of(traced, "chunk") == [WINDOW, None, WINDOW]
    assert facts_of(traced, "window") == [None] * 3
    weights = traced.trace.activations.attentions
    piece = torch.arange(weights.shape[-1]) // WINDOW
    assert torch.equal(weights[0, 0] > 0, (piece[:, None] == piece).tril())
    assert (weights[1, 0].tril() > 0).sum() == weights.shape[-1] * (weights.shape[-1] + 1) // 2
    # The layer that sees most has no chunks: all tokens so far.
    assert [step.num_keys for step in traced.trace.decode] == [step.token for step in traced.trace.decode]


def test_of_chunks_alone_the_last_query_sees_its_own(small_tokenizer):
    from tercet.explorer import trace

    model = make_model("llama4_text", no_rope_layers=[1, 1, 1], layer_types=["chunked_attention"] * 3)
    run = trace(model, small_tokenizer, "The string methods of a", new_tokens=8, timing_s=0.0)
    assert [step.num_keys for step in run.decode] == [(step.token - 1) % WINDOW + 1 for step in run.decode]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere", "phi", "gpt_neox", "olmo2"])
@torch.no_grad()
def test_the_mlp_reads_what_is_said(record, kind):
    traced = record(kind)
    parts = traced.trace.activations
    for index, layer in enumerate(traced.trace.model.layers):
        assert layer.order == ("parallel" if kind in ("cohere", "phi", "gpt_neox") else "sequential")
        states = parts.hidden[index] + (0 if layer.order == "parallel" else parts.attention_outputs[index])
        block = block_of(traced, index)
        if layer.norm_before_mlp is not None:
            states = block.get_submodule(layer.norm_before_mlp.module)(states)
        made = block.mlp(states)
        if layer.norm_after_mlp is not None:
            made = block.get_submodule(layer.norm_after_mlp.module)(made)
        assert torch.allclose(made, parts.mlp_outputs[index], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["cohere", "phi"])
def test_norms_of_queries_and_keys_make_no_parallel_block_sequential(record, kind):
    traced = record(kind)
    assert facts_of(traced, "order") == ["parallel"] * 3
    for layer in traced.trace.model.layers:
        assert len(layer.inner_norms) == 2
        assert layer.norm_before_attention.module == layer.norm_before_mlp.module == "input_layernorm"


def test_norms_behind_the_parts(record):
    assert {norm.module for norm in facts_of(record("gemma2"), "norm_after_attention")} == {"post_attention_layernorm"}
    assert {norm.module for norm in facts_of(record("olmo2"), "norm_after_mlp")} == {"post_feedforward_layernorm"}
    for kind in ("llama", "bloom", "cohere", "granite"):  # Bloom's attention returns the sum, which the next norm takes
        assert facts_of(record(kind), "norm_after_attention") == facts_of(record(kind), "norm_after_mlp") == [None] * 3


def test_blocks_of_a_hybrid(record):
    traced = record("qwen3_next")
    assert facts_of(traced, "attends") == [False, False, True]
    assert facts_of(traced, "mixer")[0] == type(traced.model.model.layers[0].linear_attn).__name__
    assert facts_of(traced, "mlp") == ["experts"] * 3
    assert {norm.module for norm in facts_of(traced, "norm_before_attention")} == {"input_layernorm"}
    assert {norm.module for norm in facts_of(traced, "norm_before_mlp")} == {"post_attention_layernorm"}


def test_dense_layers_of_a_family_with_experts(record):
    assert facts_of(record("glm4_moe"), "mlp") == ["gated", "experts", "experts"]
    assert facts_of(record("glm4_moe"), "mlp_width") == [48, 24, 24]
    assert facts_of(record("llama4_text"), "mlp") == ["gated", "experts", "gated"]
    assert facts_of(record("llama4_text"), "mlp_width") == [40, 48, 40]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "nanochat", "bloom"])
def test_an_activation_that_was_seen_is_the_models(record, kind):
    traced = record(kind)
    assert traced.trace.model.activation_is_seen
    parts = traced.trace.activations
    activate = ACT2FN[traced.trace.model.activation]
    made = activate(parts.mlp_ups) if parts.mlp_gates is None else activate(parts.mlp_gates) * parts.mlp_ups
    assert torch.allclose(made, parts.mlp_activations, rtol=1e-4, atol=1e-4)


def test_an_activation_inside_experts_is_only_the_configs(record):
    for kind in ("mixtral", "gpt_oss"):
        assert not record(kind).trace.model.activation_is_seen


@pytest.mark.parametrize(
    ("kind", "row_scale", "offset", "way", "scale"),
    [
        ("llama", 1.0, None, "as_is", 1.0),
        ("gpt2", 1.0, 0, "as_is", 1.0),
        ("opt", 1.0, 2, "as_is", 1.0),
        ("gemma2", 5.657, None, "as_is", 1.0),
        ("granite", 1.0, None, "scaled", 3.0),
        ("bloom", 1.0, None, "normed", 1.0),
        ("nanochat", 1.0, None, "normed", 1.0),
    ],
)
@torch.no_grad()
def test_the_way_into_the_first_block(record, kind, row_scale, offset, way, scale):
    traced = record(kind)
    entry, parts = traced.trace.model.entry, traced.trace.activations
    assert (entry.row_scale, entry.position_offset, entry.way, entry.scale) == (row_scale, offset, way, scale)
    rows = traced.model.get_input_embeddings().weight[traced.ids[0]]
    assert torch.allclose(entry.row_scale * rows, parts.embeddings, rtol=1e-3)
    if offset is not None:
        table = traced.model.get_submodule(
            {"gpt2": "transformer.wpe", "opt": "model.decoder.embed_positions"}[kind]
        ).weight
        assert torch.equal(table[offset : offset + len(rows)], parts.position_embeddings)


def test_the_way_out(record):
    def told(kind):
        exit = record(kind).trace.model.exit
        return exit.norm and exit.norm.scale, exit.way, exit.value

    assert told("llama") == ("weight", "as_is", 1.0)
    assert told("gemma2") == ("one_plus_weight", "capped", 3.0)
    assert told("granite") == ("weight", "scaled", 0.5)
    assert told("cohere2") == ("weight", "scaled", record("cohere2").model.config.logit_scale)
    assert told("nanochat") == ("none", "capped", 15.0)
    assert told("openai-gpt") == (None, "as_is", 1.0)


def test_what_else_happens_to_scores_and_sums(record):
    assert facts_of(record("gemma2"), "softcap") == [50.0] * 3
    assert facts_of(record("llama"), "softcap") == [None] * 3
    assert facts_of(record("gpt_oss"), "has_sink") == [True] * 3
    assert facts_of(record("llama"), "has_sink") == [False] * 3
    assert facts_of(record("granite"), "added_scale") == [0.3] * 3


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "cohere", "olmo", "olmo2", "granite", "bloom", "nanochat"])
def test_in_bfloat16_the_same_is_told(record, small_tokenizer, kind):
    """Rounding is a thousand times coarser there, and no reading may depend on it."""
    from tercet.explorer import trace

    facts = record(kind).trace.model
    half = trace(make_model(kind).bfloat16(), small_tokenizer, "The string methods", new_tokens=2, timing_s=0.0).model
    for name in ("order", "norm_before_attention", "norm_after_attention", "norm_before_mlp", "norm_after_mlp", "mlp"):
        assert [getattr(layer, name) for layer in half.layers] == [getattr(layer, name) for layer in facts.layers]
    for told, wanted in ((half.entry, facts.entry), (half.exit, facts.exit)):
        assert told.way == wanted.way
    assert half.entry.scale == pytest.approx(facts.entry.scale, rel=0.01)
    assert half.exit.value == pytest.approx(facts.exit.value, rel=0.01)
