"""Weights of native families in and out: equal logits, equal generation, nothing lost, nothing approximated."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model, LlamaConfig, MistralConfig, Qwen2Config

from tercet.interop import from_native, to_native
from tercet.interop.configs import FAMILIES, from_native_config, narrowest_family
from tercet.interop.families import has_tied_head
from tercet.interop.table import VARIANTS, ask, largest_delta, measure, native_model
from tercet.modeling import TercetConfig, TercetForCausalLM

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_PLAIN = {**_SMALL, "qk_norm": False}


def variant(family: str, name: str) -> dict:
    return next(fields for kind, label, fields in VARIANTS if (kind, label) == (family, name))


@pytest.mark.parametrize(
    ("family", "fields"), [pytest.param(kind, fields, id=f"{kind}, {name}") for kind, name, fields in VARIANTS]
)
def test_equal_logits_generation_and_tensors_both_ways(family, fields):
    row = measure(family, fields)
    assert row.import_delta <= 1e-5
    assert row.export_delta <= 1e-5
    assert row.is_same_generation
    assert row.is_bit_equal


def test_the_variants_cover_every_family():
    assert {family for family, _, _ in VARIANTS} == FAMILIES.keys()


@pytest.mark.parametrize("changed", [{"sliding_window": 4}, {"num_key_value_heads": 4}])
def test_the_measure_sees_a_wrong_config(changed):
    """With equal weights, as far as shapes allow: what is compared would not be equal by itself."""
    fields = variant("mistral", "sliding window 5")
    native, other = native_model("mistral", fields), native_model("mistral", {**fields, **changed})
    assert largest_delta(ask(from_native(native)), ask(other)) > 1e-2


def test_native_positions_and_rope_are_not_alike_by_chance():
    """Frequencies of the RoPE types differ, so equal logits show that the type was carried."""
    models = [native_model(family, fields) for family, name, fields in VARIANTS if "RoPE" in name and family == "llama"]
    ids = torch.arange(3, 33).unsqueeze(0)
    with torch.no_grad():
        logits = [model(ids).logits for model in models]
    assert all((one - other).abs().max() > 1e-2 for i, one in enumerate(logits) for other in logits[:i])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_dtype_generation_settings_mode_and_attention_are_kept(family):
    fields = next(fields for kind, _, fields in VARIANTS if kind == family)
    native = native_model(family, fields).to(torch.bfloat16).train()
    native.generation_config.update(temperature=0.3, top_k=7, do_sample=True, eos_token_id=[2, 5])
    native.set_attn_implementation("eager")
    for model in (ours := from_native(native), to_native(ours, family)):
        assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
        assert model.config.dtype == torch.bfloat16
        assert model.generation_config.to_dict() == native.generation_config.to_dict()
        assert model.training
        assert model.config._attn_implementation == "eager"


def test_single_tensors_keep_a_dtype_of_their_own():
    native = native_model("llama", variant("llama", "no GQA")).to(torch.bfloat16)
    native.model.norm.float()
    back = to_native(from_native(native))
    assert back.model.norm.weight.dtype == torch.float32
    assert back.lm_head.weight.dtype == torch.bfloat16


def test_no_memory_is_shared():
    native = native_model("gpt2", variant("gpt2", "tied head"))
    ours = from_native(native)
    back = to_native(ours)
    expected = ask(native).tokens
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert torch.equal(ask(native).tokens, expected)
    assert torch.equal(ask(back).tokens, expected)


def test_tied_heads_stay_tied_and_others_do_not_become_so():
    for family, name in (("gpt2", "tied head"), ("llama", "GQA, tied head")):
        ours = from_native(native_model(family, variant(family, name)))
        back = to_native(ours, family)
        for model in (ours, back):
            assert has_tied_head(model) and model.config.tie_word_embeddings
    ours = from_native(native_model("llama", variant("llama", "no GQA")))
    assert not has_tied_head(ours) and not ours.config.tie_word_embeddings


def test_a_head_of_its_own_is_kept_although_the_config_ties_it():
    native = native_model("llama", variant("llama", "GQA, tied head"))
    native.lm_head.weight = nn.Parameter(torch.randn_like(native.lm_head.weight))
    ours = from_native(native)
    assert not ours.config.tie_word_embeddings
    assert largest_delta(ask(native), ask(ours)) <= 1e-5
    assert largest_delta(ask(ours), ask(to_native(ours))) <= 1e-5


# --- configs


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, name, _ in VARIANTS])
def test_configs_come_back_as_they_were(family, name):
    native = native_model(family, variant(family, name)).config
    back = to_native(from_native(native_model(family, variant(family, name))), family).config
    before, after = native.to_dict(), back.to_dict()
    # None before it is known; 4 E written out; where sliding layers begin is in layer_types already.
    free = {"dtype", "n_inner", "max_window_layers", "no_rope_layer_interval"}
    different = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert different <= free


def test_gpt2_dropouts_are_carried():
    config = GPT2Config(**variant("gpt2", "tied head"), attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3)
    native = FAMILIES["gpt2"].model_class(config)
    ours = from_native(native).config
    assert (ours.attention_dropout, ours.hidden_dropout, ours.embedding_dropout) == (0.1, 0.2, 0.3)
    back = to_native(from_native(native)).config
    assert (back.attn_pdrop, back.resid_pdrop, back.embd_pdrop) == (0.1, 0.2, 0.3)


def test_token_ids_that_are_not_set_stay_so():
    """Families have defaults of their own for them."""
    native = to_native(TercetForCausalLM(TercetConfig(**_PLAIN)), "smollm3").config
    assert (native.pad_token_id, native.bos_token_id, native.eos_token_id) == (None, None, None)


_NARROWEST = {
    "gpt2": TercetConfig.classic(**_SMALL),
    "llama": TercetConfig(**_PLAIN, num_key_value_heads=2, mlp_bias=True),
    "mistral": TercetConfig(**_PLAIN, sliding_window=5),
    "qwen2": TercetConfig(**_PLAIN, attention_bias=True, sliding_window=5),
    "qwen3": TercetConfig(**_SMALL, num_key_value_heads=2),
    "smollm3": TercetConfig(**_PLAIN, no_rope_layers=[1, 0]),
}


@pytest.mark.parametrize("family", _NARROWEST)
def test_narrowest_family_is_taken_where_none_is_named(family):
    config = _NARROWEST[family]
    assert narrowest_family(config).name == family
    assert to_native(TercetForCausalLM(config)).config.model_type == family


def test_what_does_not_matter_is_no_obstacle():
    """A window that no layer uses, and a list that says what is so anyway."""
    config = TercetConfig(
        **_PLAIN, sliding_window=5, layer_types=["full_attention", "full_attention"], no_rope_layers=[1, 1]
    )
    assert narrowest_family(config).name == "llama"
    assert to_native(TercetForCausalLM(config), "mistral").config.sliding_window is None


# --- refusals


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("llama", {"position_embedding_type": "learned"}, "position_embedding_type"),
        ("llama", {"norm_type": "layer_norm"}, "norm_type"),
        ("llama", {"mlp_type": "plain"}, "mlp_type"),
        ("llama", {"qk_norm": True}, "qk_norm"),
        ("llama", {"attention_bias": True}, "attention_output_bias"),
        ("llama", {"attention_output_bias": True}, "attention_output_bias"),
        ("llama", {"sliding_window": 5}, "layer_types .*sliding_window 5"),
        ("llama", {"no_rope_layers": [0, 1]}, "no_rope_layers"),
        ("llama", {"hidden_dropout": 0.1}, "hidden_dropout"),
        ("llama", {"embedding_dropout": 0.1}, "embedding_dropout"),
        ("llama", {"num_attention_heads": 3, "head_dim": 8}, "num_attention_heads"),
        ("mistral", {"qk_norm": True}, "qk_norm"),
        ("mistral", {"attention_bias": True, "attention_output_bias": True}, "attention_bias"),
        ("mistral", {"mlp_bias": True}, "mlp_bias"),
        ("mistral", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"attention_bias": True, "attention_output_bias": True}, "attention_output_bias"),
        ("qwen2", {}, "attention_bias"),
        ("qwen2", {"attention_bias": True, "no_rope_layers": [0, 1]}, "no_rope_layers"),
        ("qwen3", {}, "qk_norm"),
        ("qwen3", {"qk_norm": True, "mlp_bias": True}, "mlp_bias"),
        ("smollm3", {"qk_norm": True}, "qk_norm"),
        ("smollm3", {"hidden_dropout": 0.1}, "hidden_dropout"),
        ("gpt2", {}, "position_embedding_type"),
    ],
)
def test_what_a_family_cannot_express_is_refused_by_name(family, fields, named):
    model = TercetForCausalLM(TercetConfig(**{**_PLAIN, **fields}))
    with pytest.raises(ValueError, match=f"{family} cannot express this model: .*{named}"):
        to_native(model, family)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"head_dim": 16}, "head_dim"),
        ({"mlp_bias": False}, "mlp_bias"),
        ({"attention_bias": False}, "attention_bias"),
        ({"norm_type": "rms_norm"}, "norm_type"),
        ({"sliding_window": 5}, "layer_types"),
    ],
)
def test_what_gpt2_cannot_express_is_refused_by_name(fields, named):
    model = TercetForCausalLM(TercetConfig.classic(**{**_SMALL, **fields}))
    with pytest.raises(ValueError, match=f"gpt2 cannot express this model: .*{named}"):
        to_native(model, "gpt2")
    with pytest.raises(ValueError, match=f"no native family .*gpt2: {named}"):
        to_native(model)


def test_unknown_families_and_other_models_are_refused():
    ours = TercetForCausalLM(TercetConfig(**_PLAIN))
    with pytest.raises(ValueError, match="'falcon' is not known: choose one of gpt2, llama"):
        to_native(ours, "falcon")
    with pytest.raises(ValueError, match="LlamaForCausalLM is no TercetForCausalLM"):
        to_native(to_native(ours))
    with pytest.raises(ValueError, match="TercetForCausalLM is of no known family"):
        from_native(ours)
    with pytest.raises(ValueError, match="GPT2Model is of no known family"):
        from_native(GPT2Model(GPT2Config(**variant("gpt2", "tied head"))))
    with pytest.raises(ValueError, match="TercetModel is no TercetForCausalLM"):
        to_native(ours.model)


@pytest.mark.parametrize(
    ("family", "config", "named"),
    [
        ("gpt2", GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        ("gpt2", GPT2Config(scale_attn_weights=False), "scale_attn_weights"),
        ("gpt2", GPT2Config(add_cross_attention=True), "add_cross_attention"),
        ("gpt2", GPT2Config(pad_token_id=50257), "pad_token_id"),
        ("llama", LlamaConfig(quantization_config={"quant_method": "bitsandbytes"}), "quantization_config"),
        ("mistral", MistralConfig(sliding_window=0), "sliding_window"),
        ("qwen2", Qwen2Config(num_key_value_heads=5), "num_key_value_heads"),
    ],
)
def test_what_tercet_has_not_is_refused_by_name(family, config, named):
    with pytest.raises(ValueError, match=named):
        from_native_config(config, FAMILIES[family], has_tied_head=False)


# --- strictness


def _damaged(how: str, model: nn.Module, name: str) -> nn.Module:
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if how == "missing":
        setattr(parent, leaf, None)
    elif how == "extra":
        parent.register_parameter("stray", nn.Parameter(torch.zeros(3)))
    else:
        setattr(parent, leaf, nn.Parameter(torch.zeros(7, 5)))
    return model


_DAMAGES = {
    "missing": r"1 missing: {name}",
    "extra": r"1 left over: {parent}\.stray",
    "shape": r"1 of another shape: {name} \[7, 5\] instead of \[32, {width}\]",
}


@pytest.mark.parametrize("how", _DAMAGES)
def test_tensors_that_do_not_fit_are_listed_on_import(how):
    name = "transformer.h.1.attn.c_attn.weight"
    native = _damaged(how, native_model("gpt2", variant("gpt2", "tied head")), name)
    with pytest.raises(ValueError, match=_DAMAGES[how].format(name=name, parent=name.rpartition(".")[0], width=96)):
        from_native(native)


@pytest.mark.parametrize("how", _DAMAGES)
def test_tensors_that_do_not_fit_are_listed_on_export(how):
    name = "model.layers.1.self_attn.k_proj.weight"
    ours = _damaged(how, TercetForCausalLM(TercetConfig.classic(**_SMALL)), name)
    with pytest.raises(ValueError, match=_DAMAGES[how].format(name=name, parent=name.rpartition(".")[0], width=32)):
        to_native(ours)


def test_a_model_that_is_not_in_memory_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**variant("llama", "no GQA")))
    with pytest.raises(ValueError, match="not in memory"):
        from_native(model)


def test_families_say_nothing_about_fields_that_are_not_there():
    """A field that is renamed in the config would make a family's table pass silently."""
    known = {field.name for field in dataclasses.fields(TercetConfig)}
    assert all(set(family.fixed) <= known for family in FAMILIES.values())
    for family in FAMILIES.values():
        assert all(hasattr(family.config_class(), name) for name in family.native_only)
