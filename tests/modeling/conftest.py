"""Small decoders of every kind that the config can describe."""

from collections.abc import Callable

import pytest
import torch

from tercet.modeling import TercetConfig, TercetForCausalLM

VOCAB_SIZE = 97
_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    # New weights are so small that wrong attention would hardly show in the logits.
    "initializer_range": 0.2,
}
KINDS = {
    "classic": lambda: TercetConfig.classic(**_SMALL),
    "modern": lambda: TercetConfig.modern(**_SMALL, num_key_value_heads=2),
    "sliding": lambda: TercetConfig.modern(**_SMALL, num_key_value_heads=1, sliding_window=5),
    "mixed": lambda: TercetConfig.modern(
        **_SMALL, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "no_rope": lambda: TercetConfig.modern(**_SMALL, no_rope_layers=[1, 0, 1], tie_word_embeddings=False),
}


@pytest.fixture(params=sorted(KINDS))
def config(request) -> TercetConfig:
    """Each kind of decoder in turn."""
    return KINDS[request.param]()


@pytest.fixture
def model(config) -> TercetForCausalLM:
    """A decoder with random weights, in evaluation mode."""
    return _make_model(config)


@pytest.fixture
def modern_model() -> TercetForCausalLM:
    """The default kind, where one is enough."""
    return _make_model(KINDS["modern"]())


@pytest.fixture
def make_model() -> Callable[[TercetConfig], TercetForCausalLM]:
    """A decoder of any config, with random weights, in evaluation mode."""
    return _make_model


@pytest.fixture
def make_ids() -> Callable[..., torch.Tensor]:
    """Random ordinary tokens, (B, T)."""

    def make(batch_size: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, VOCAB_SIZE, (batch_size, num_tokens), generator=generator)

    return make


def _make_model(config: TercetConfig) -> TercetForCausalLM:
    torch.manual_seed(0)
    return TercetForCausalLM(config).eval()
