"""A prompt whose last logits alone are wanted: the last block leaves out the rest, and nobody can tell."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

from tercet.modeling import TercetCache


@pytest.fixture
def num_queries(model) -> list[int]:
    """Positions that the last block's feed-forward computed, a number for each call."""
    # Wrapped, not hooked: a hook is what the block must notice.
    seen, mlp = [], model.model.layers[-1].mlp
    forward = mlp.forward

    def count(hidden_states: torch.Tensor) -> torch.Tensor:
        seen.append(hidden_states.shape[1])
        return forward(hidden_states)

    mlp.forward = count
    return seen


def left_padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, :1] = 0, 0
    return mask


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "left_padded"])
@pytest.mark.parametrize("make_cache", [TercetCache, lambda config: DynamicCache(config=config), None])
@torch.no_grad()
def test_the_last_logits_and_the_cache_are_those_of_a_full_forward(
    model, make_ids, num_queries, make_cache, is_padded
):  # fmt: skip
    ids = make_ids(3, 13)
    mask = left_padded(ids) if is_padded else None
    caches = [make_cache(model.config) if make_cache else None for _ in range(2)]
    for start, end in ((0, 8), (8, 13)):  # the second part sees a cache, and the first one's window has moved on
        if make_cache is None:
            start = 0
        part = {"attention_mask": None if mask is None else mask[:, :end]}
        full = model(ids[:, start:end], cache=caches[0], **part)
        last = model(ids[:, start:end], cache=caches[1], logits_to_keep=1, **part)
        assert num_queries[-2:] == [end - start, 1]
        assert last.logits.shape == (3, 1, model.config.vocab_size)
        torch.testing.assert_close(last.logits, full.logits[:, -1:], rtol=1e-4, atol=1e-5)
    if make_cache:
        for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["ours", "static"])
def test_generate_gives_the_tokens_of_full_prefills(model, make_ids, num_queries, cache):
    ids = make_ids(2, 11)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "attention_mask": left_padded(ids)}
    if cache == "static":
        settings["cache"] = StaticCache(config=model.config, max_cache_len=32)
    got = model.generate(ids, **settings)
    assert num_queries == [1] * 8
    model.set_attn_implementation("eager")  # knows no short way
    expected = model.generate(ids, **{key: value for key, value in settings.items() if key != "cache"})
    assert num_queries[8] == 11
    assert torch.equal(got, expected)


@torch.no_grad()
def test_whoever_looks_inside_sees_all_positions(model, make_ids, num_queries):
    ids = make_ids(2, 9)

    def run(**kwargs):
        return model(ids, logits_to_keep=1, **kwargs)

    assert run(output_hidden_states=True).hidden_states[-1].shape[1] == 9
    run()
    assert num_queries == [9, 1]  # what transformers leaves behind after that is no observer
    shapes = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, args, output: shapes.append(output.shape[1]))
    run()
    hook.remove()
    run()
    assert (shapes, num_queries) == ([9], [9, 1, 9, 1])
    with torch.enable_grad():
        run()
    model.train()
    run()
    assert num_queries[4:] == [9, 9]


@torch.no_grad()
def test_an_adapter_on_the_last_block_is_applied(modern_model, make_ids):
    """As PEFT does it: another module in the place of a projection."""

    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner, self.extra = inner, nn.Linear(inner.in_features, inner.out_features)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.inner(states) + self.extra(states)

    attention = modern_model.model.layers[-1].self_attn
    plain = modern_model(make_ids(1, 9), logits_to_keep=1).logits
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, Adapted(getattr(attention, name)))
    got = modern_model(make_ids(1, 9), logits_to_keep=1).logits
    assert not torch.allclose(got, plain, atol=1e-3)
    torch.testing.assert_close(got, modern_model(make_ids(1, 9)).logits[:, -1:], rtol=1e-4, atol=1e-5)
