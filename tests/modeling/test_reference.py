"""Equal logits with transformers' own classes that hold the same weights."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tercet.modeling import TercetConfig, TercetForCausalLM

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize("rope", [None, _LLAMA3_ROPE], ids=["default_rope", "llama3_rope"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_llama(bias, rope, make_ids):
    native = LlamaForCausalLM(
        LlamaConfig(**_SHAPE, attention_bias=bias, mlp_bias=bias, rms_norm_eps=1e-6, rope_parameters=rope)
    )
    ours = TercetConfig(
        **_SHAPE, qk_norm=False, attention_bias=bias, attention_output_bias=bias, mlp_bias=bias, rope_parameters=rope
    )
    assert_equal_logits(native, ours, make_ids(2, 17))


def test_qwen3(make_ids):
    native = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, rms_norm_eps=1e-6))
    assert_equal_logits(native, TercetConfig(**_SHAPE), make_ids(2, 17))


def assert_equal_logits(native: torch.nn.Module, config: TercetConfig, ids: torch.Tensor) -> None:
    ours = TercetForCausalLM(config)
    ours.load_state_dict(native.state_dict(), strict=True)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        expected = native.eval()(ids, attention_mask=mask).logits
        got = ours.eval()(ids, attention_mask=mask).logits
    is_real = mask.bool()
    torch.testing.assert_close(got[is_real], expected[is_real], rtol=0, atol=1e-5)
