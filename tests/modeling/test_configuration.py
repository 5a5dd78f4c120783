"""Combinations without meaning are refused when the config is made, and what is made comes back from disk."""

import pytest
from huggingface_hub.errors import StrictDataclassError

from tercet.modeling import TercetConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, ["hidden_size", "30", "num_attention_heads", "head_dim"]),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"head_dim": 7}, ["head_dim", "7", "even"]),
        ({"hidden_size": 0, "head_dim": 8}, ["hidden_size", "at least 1"]),
        (
            {"position_embedding_type": "learned", "rope_parameters": {"rope_theta": 1e4}},
            ["rope_parameters", "learned"],
        ),
        ({"position_embedding_type": "learned", "no_rope_layers": [1] * 12}, ["no_rope_layers", "learned"]),
        ({"no_rope_layers": [1, 0]}, ["no_rope_layers", "num_hidden_layers"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers"]),
        ({"layer_types": ["sliding_attention"] * 12}, ["sliding_window", "None"]),
        ({"layer_types": ["linear_attention"] * 12}, ["layer_types", "linear_attention"]),
        ({"hidden_dropout": 1.0}, ["hidden_dropout", "1.0"]),
        ({"mlp_type": "moe"}, ["mlp_type", "moe"]),
        ({"norm_type": "batch_norm"}, ["norm_type"]),
    ],
)
def test_meaningless_fields_are_refused_by_name(fields, words):
    # The library's own checks of a field's type raise its own error.
    with pytest.raises((ValueError, StrictDataclassError)) as caught:
        TercetConfig(**fields)
    message = str(caught.value)
    assert all(word in message for word in words), message


def test_config_survives_disk(config, tmp_path):
    config.save_pretrained(tmp_path)
    assert TercetConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_classic_is_gpt2_and_modern_is_not():
    classic, modern = TercetConfig.classic(), TercetConfig.modern()
    assert (classic.norm_type, classic.position_embedding_type, classic.mlp_type) == ("layer_norm", "learned", "plain")
    assert classic.intermediate_size == 4 * classic.hidden_size
    assert classic.rope_parameters is None
    assert (modern.norm_type, modern.position_embedding_type, modern.mlp_type) == ("rms_norm", "rope", "gated")
    assert modern.qk_norm
    assert modern.rope_parameters is not None


def test_both_feed_forward_kinds_have_about_as_many_parameters():
    gated, plain = TercetConfig(hidden_size=768), TercetConfig(hidden_size=768, mlp_type="plain")
    assert gated.intermediate_size is not None
    assert plain.intermediate_size is not None
    assert 3 * gated.intermediate_size == pytest.approx(2 * plain.intermediate_size, rel=0.05)
