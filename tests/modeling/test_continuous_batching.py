"""Continuous batching: many requests in one flattened row over a paged cache, with the tokens of `generate()`."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

LENGTHS = (3, 17, 9, 1, 26)


def generate_alone(model, prompts, settings):
    return [
        model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=settings)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def generate_together(model, prompts, settings, **batching):
    pages = {"num_blocks": 32, "page_size": 8, **batching}
    outputs = model.generate_batch(
        prompts, generation_config=settings, progress_bar=False,
        continuous_batching_config=ContinuousBatchingConfig(**pages),
    )  # fmt: skip
    assert all(output.error is None for output in outputs.values())
    # Requests end in any order; their names end in a number that counts up as they came.
    in_order = sorted(outputs, key=lambda request_id: int(request_id.rpartition("_")[2]))
    return [outputs[request_id].generated_tokens for request_id in in_order]


@pytest.fixture
def prompts(make_ids):
    return [make_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]


@pytest.fixture
def settings():
    # Token 2 ends a text, so that some requests leave early and others come in.
    return GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=1)


# A row of 64 takes all prompts at once; of 8, it cuts the long ones into chunks and mixes prefill with decode.
@pytest.mark.slow
@pytest.mark.parametrize("max_batch_tokens", [64, 8])
def test_equals_generate(model, prompts, settings, max_batch_tokens):
    together = generate_together(model, prompts, settings, max_batch_tokens=max_batch_tokens)
    assert together == generate_alone(model, prompts, settings)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_equals_generate_with_each_attention(modern_model, prompts, settings, implementation):
    modern_model.set_attn_implementation(implementation)
    assert generate_together(modern_model, prompts, settings) == generate_alone(modern_model, prompts, settings)


def test_a_shared_beginning_is_computed_once_with_the_same_result(modern_model, make_ids, settings):
    beginning = make_ids(1, 24)[0].tolist()
    prompts = [beginning + make_ids(1, length, seed=length)[0].tolist() for length in (2, 5, 9)]
    # Two rows wide enough for one prompt: the others find its pages filled.
    together = generate_together(modern_model, prompts, settings, max_batch_tokens=40)
    assert together == generate_alone(modern_model, prompts, settings)


def test_the_model_generates_as_before_afterwards(modern_model, prompts, settings):
    """The paged attention is taken out again, and with it nothing of the model's own cache."""
    before = generate_alone(modern_model, prompts, settings)
    implementation = modern_model.config._attn_implementation
    generate_together(modern_model, prompts, settings)
    assert modern_model.config._attn_implementation == implementation
    assert generate_alone(modern_model, prompts, settings) == before
