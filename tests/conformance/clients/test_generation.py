"""Clients that generate with the checkpoint itself, as remote code in a process without Tercet."""

import pytest

from conformance.clients.packages import run_program
from conformance.clients.reference import NUM_NEW_TOKENS, PROMPTS, count_equal

pytestmark = pytest.mark.slow


@pytest.mark.client("transformers pipeline", "text-generation: prompts alone, as one padded batch, as chat messages")
def test_pipeline(trained, reference, tmp_path, client_record):
    answer = run_program(
        "pipeline_text.py", tmp_path, folder=trained.folder, prompts=PROMPTS, max_new_tokens=NUM_NEW_TOKENS
    )
    assert answer["model_class"].startswith("transformers_modules.")
    expected = [reference.text(tokens) for tokens in reference.tokens]
    assert answer["alone"] == expected
    assert answer["batched"] == expected
    assert answer["chats"] == [reference.text(reference.greedy(reference.chat_ids(prompt))) for prompt in PROMPTS]
    client_record(f"{3 * len(PROMPTS)} texts equal to `generate()`'s")


@pytest.mark.client("transformers generate_batch", "continuous batching over a paged cache")
def test_generate_batch(trained, reference, tmp_path, client_record):
    answer = run_program(
        "continuous_batching.py", tmp_path, folder=trained.folder, prompts=PROMPTS, max_new_tokens=NUM_NEW_TOKENS
    )
    assert answer["tokens"] == reference.tokens
    client_record(count_equal(answer["tokens"], reference.tokens))
