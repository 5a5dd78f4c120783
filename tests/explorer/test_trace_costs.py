"""Passes of inference: FLOPs and bytes against torch's counter, formulas and the caches themselves."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from traced_models import TERCET, WINDOW

from tercet.training.accounting import decode_flops_per_token

KINDS = [*TERCET, "gpt2", "llama", "mistral", "qwen3"]


@pytest.fixture(params=KINDS)
def traced(request, record):
    return record(request.param)


def test_passes(traced):
    run = traced.trace
    prompt, total = run.num_prompt_tokens, len(run.tokens)
    assert (run.prefill.num_queries, run.prefill.token) == (prompt, prompt)
    assert [(step.num_queries, step.token) for step in run.decode] == [(1, at) for at in range(prompt + 1, total)]
    assert [(step.num_queries, step.token) for step in run.uncached] == [(at, at) for at in range(prompt, total)]
    reach = max(total if layer.window is None else layer.window for layer in run.model.layers)
    assert [step.num_keys for step in run.decode] == [min(at, reach) for at in range(prompt + 1, total)]
    assert all(step.duration_s > 0 for step in (run.prefill, *run.decode, *run.uncached))


@pytest.mark.parametrize("kind", KINDS)
def test_decode_flops_are_those_of_info(record, kind):
    traced = record(kind)
    expected = [decode_flops_per_token(traced.model.config, step.token) for step in traced.trace.decode]
    assert [step.flops for step in traced.trace.decode] == expected


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen3", "gemma2", "phi3", "mixtral"])
def test_prefill_flops_are_those_that_torch_counts_with_eager_attention(record, kind):
    traced = record(kind)
    model = copy.deepcopy(traced.model)
    model.set_attn_implementation("eager")
    if kind == "mixtral":
        model.set_experts_implementation("eager")

    def count(ids):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(ids, use_cache=False, logits_to_keep=1)
        return counter.get_total_flops()

    assert traced.trace.prefill.flops == count(traced.prompt_ids)
    assert [step.flops for step in traced.trace.uncached] == [
        count(traced.ids[:, : step.num_queries]) for step in traced.trace.uncached
    ]


def test_prefill_flops_of_tercet_leave_out_what_nobody_asks_for(record):
    """Its last block has a query, and an MLP, for the last token alone."""
    traced = record("tercet-modern")
    config, num_tokens = traced.model.config, traced.trace.num_prompt_tokens
    E, Q, K, I, V = config.hidden_size, 32, 16, config.intermediate_size, config.vocab_size  # noqa: E741
    per_token = 2 * (2 * E * Q + 2 * E * K + 3 * E * I)
    whole_blocks = 2 * (num_tokens * per_token + 4 * Q * num_tokens**2)
    last_block = per_token + 2 * 2 * E * K * (num_tokens - 1) + 4 * Q * num_tokens
    assert traced.trace.prefill.flops == whole_blocks + last_block + 2 * E * V


def test_cache_bytes_are_those_of_the_cache(traced):
    cache = None
    model, ids = traced.model, traced.ids
    for step in (traced.trace.prefill, *traced.trace.decode):
        with torch.no_grad():
            given = ids[:, step.token - step.num_queries : step.token]
            cache = model(given, use_cache=True, **({} if cache is None else {"cache": cache})).cache
        held = tuple(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert step.cache_bytes_per_layer == held
        assert step.cache_bytes == sum(held)
        if traced.kind in TERCET:
            assert step.cache_bytes_allocated == cache.nbytes
        else:
            assert step.cache_bytes_allocated >= sum(held)


def test_cache_grows_by_a_column_and_is_read_whole(record):
    run = record("tercet-modern").trace
    column = 3 * 2 * 2 * 8 * 4  # L, keys and values, K, D, bytes of float32
    assert run.prefill.cache_bytes_read == 0
    assert [step.cache_bytes for step in (run.prefill, *run.decode)] == [
        column * tokens for tokens in range(run.num_prompt_tokens, len(run.tokens))
    ]
    assert [step.cache_bytes_read for step in run.decode] == [column * (step.num_keys - 1) for step in run.decode]
    assert {(step.cache_bytes, step.cache_bytes_read) for step in run.uncached} == {(0, 0)}


@pytest.mark.parametrize(("kind", "column"), [("tercet-mixed", 128), ("mistral", 128), ("gpt2", 256), ("qwen3", 256)])
def test_what_one_token_takes_in_each_layer(record, kind, column):
    assert record(kind).trace.cache_bytes_per_token == (column,) * 3  # K, D, key and value, bytes of float32
    assert record("openai-gpt").trace.cache_bytes_per_token == (0,) * 3


@pytest.mark.parametrize(("kind", "num_full"), [("tercet-mixed", 1), ("mistral", 0)])
def test_a_window_bounds_what_is_read(record, kind, num_full):
    run = record(kind).trace
    row = 2 * 2 * 8 * 4
    assert [step.cache_bytes_read for step in run.decode] == [
        row * (num_full * (step.token - 1) + (3 - num_full) * (WINDOW - 1)) for step in run.decode
    ]


def test_weights_are_read_once_and_tables_by_row(record):
    untied, tied = record("llama"), record("gpt2")
    for traced, rows in ((untied, 32), (tied, 2 * 32)):
        everything = sum(weight.nbytes for weight in traced.model.parameters())
        unread = {"llama": traced.model.get_input_embeddings().weight.nbytes}.get(traced.kind)
        if unread is None:  # GPT-2's head is its token table: only positions are looked up alone
            unread = traced.model.transformer.wpe.weight.nbytes
        run = traced.trace
        assert run.decode[0].weight_bytes_read == everything - unread + rows * 4
        assert run.prefill.weight_bytes_read == everything - unread + rows * 4 * run.num_prompt_tokens
