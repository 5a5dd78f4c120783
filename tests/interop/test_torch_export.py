"""The exported decode step is the model: at other batch sizes and lengths than the example's, and without its code."""

import io
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tercet.interop.exported import DecodeStep, empty_cache, export_decode_step
from tercet.modeling import TercetCache, TercetConfig, TercetForCausalLM
from tercet.training.errors import UserError

_SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
_MIXED: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_MODELS = {
    "modern": lambda: TercetForCausalLM(TercetConfig.modern(**_SMALL, num_key_value_heads=2)),
    "classic": lambda: TercetForCausalLM(TercetConfig.classic(**_SMALL)),
    "sliding": lambda: TercetForCausalLM(TercetConfig.modern(**_SMALL, **_MIXED)),
    "no_rope": lambda: TercetForCausalLM(TercetConfig.modern(**_SMALL, no_rope_layers=[1, 0])),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SMALL, num_key_value_heads=2, intermediate_size=48)),
}


@pytest.fixture(scope="module", params=sorted(_MODELS))
def model(request) -> PreTrainedModel:
    torch.manual_seed(0)
    return _MODELS[request.param]().eval()


@pytest.fixture(scope="module")
def program(model) -> torch.export.ExportedProgram:
    return export_decode_step(model)


@pytest.fixture(scope="module")
def step(program) -> torch.nn.Module:
    """Saved and loaded: what runs is the program alone, with its own weights."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize(("batch_size", "past_length"), [(1, 1), (1, 2), (1, 30), (2, 5), (3, 9), (7, 1)])
@torch.no_grad()
def test_equals_eager_at_every_size(model, step, batch_size, past_length):
    generator = torch.Generator().manual_seed(0)
    cache = [
        tuple(torch.randn(batch_size, *states.shape[1:2], past_length, states.shape[3], generator=generator)
              for states in pair)
        for pair in empty_cache(model)
    ]  # fmt: skip
    inputs = (
        torch.randint(97, (batch_size, 1), generator=generator),
        torch.ones((batch_size, past_length + 1), dtype=torch.long),
        torch.full((batch_size, 1), past_length),
        cache,
    )
    logits, presents = step(*inputs)
    expected_logits, expected_presents = DecodeStep(model)(*inputs)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
    for pair, expected in zip(presents, expected_presents, strict=True):
        torch.testing.assert_close(pair, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_decodes_like_the_model_with_its_own_cache(model, step):
    """Left-padded rows, 12 tokens in a row: past the window, the model's own sliding layers forget, the step's mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(97, (3, 6), generator=generator)
    mask = (torch.arange(6) >= torch.tensor([[0], [2], [4]])).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, cache = DecodeStep(model)(ids, mask, positions, empty_cache(model, 3))
    own_cache = TercetCache(model.config) if isinstance(model, TercetForCausalLM) else None
    outputs: Any = model(ids, attention_mask=mask, position_ids=positions, cache=own_cache, use_cache=True)
    for _ in range(12):
        token, mask = outputs.logits[:, -1:].argmax(-1), torch.cat([mask, mask.new_ones(3, 1)], dim=-1)
        positions = mask.sum(-1, keepdim=True) - 1
        logits, cache = step(token, mask, positions, cache)
        outputs = model(token, attention_mask=mask, position_ids=positions, cache=outputs.cache, use_cache=True)
        torch.testing.assert_close(logits, outputs.logits, rtol=0, atol=1e-5)


def test_shares_the_weights_of_the_model(model, program):
    own = {weight.data_ptr() for weight in model.parameters()}
    assert own == {weight.data_ptr() for weight in program.parameters()}
    assert all(weight.requires_grad for weight in model.parameters())


def test_refuses_training_mode():
    with pytest.raises(UserError, match=r"training mode.*model\.eval\(\)"):
        export_decode_step(_MODELS["modern"]().train())


def test_refuses_attention_that_reads_values():
    model = _MODELS["modern"]().eval()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UserError, match=r"flex_attention.*set_attn_implementation"):
        export_decode_step(model)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_refuses_rope_that_changes_with_the_length(rope_type):
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    model = TercetForCausalLM(TercetConfig.modern(**_SMALL, rope_parameters=rope)).eval()
    with pytest.raises(UserError, match=f"rope_type '{rope_type}' changes"):
        export_decode_step(model)


def test_a_failure_of_the_exporter_is_one_line(monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("\n  Could not guard on size s0\n\nmany more lines")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(UserError) as raised:
        export_decode_step(_MODELS["modern"]().eval())
    assert str(raised.value) == "TercetForCausalLM cannot be exported: Could not guard on size s0"
