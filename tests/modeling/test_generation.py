"""With a cache or without, in one piece or many, alone or padded in a batch: the same tokens and the same logits."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tercet.modeling import TercetCache

NUM_TOKENS = 14
ATOL = 2e-5


@torch.no_grad()
def uncached_logits(model, ids):
    return model(ids, use_cache=False).logits


@torch.no_grad()
def test_cached_equals_uncached_at_every_split(model, make_ids):
    ids = make_ids(2, NUM_TOKENS)
    expected = uncached_logits(model, ids)
    for split in range(1, NUM_TOKENS):
        cache = TercetCache(model.config)
        parts = [model(part, cache=cache).logits for part in (ids[:, :split], ids[:, split:])]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=ATOL)
        assert cache.length == NUM_TOKENS


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@torch.no_grad()
def test_prefill_in_chunks_equals_prefill_at_once(model, make_ids, chunk):
    ids = make_ids(2, NUM_TOKENS)
    cache = TercetCache(model.config)
    parts = [model(part, cache=cache).logits for part in ids.split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), uncached_logits(model, ids), rtol=0, atol=ATOL)


@torch.no_grad()
def test_own_cache_equals_the_librarys(model, make_ids):
    ids = make_ids(3, NUM_TOKENS)
    ours, theirs = TercetCache(model.config), DynamicCache(config=model.config)
    for part in ids.split([6, 1, 1, 4, 1, 1], dim=1):
        torch.testing.assert_close(model(part, cache=ours).logits, model(part, cache=theirs).logits, rtol=0, atol=ATOL)


@torch.no_grad()
def test_left_padded_rows_equal_their_unbatched_runs(model, make_ids):
    rows = [make_ids(1, length, seed=length)[0] for length in (4, 9, 7)]
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.full((longest - len(row),), 1), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    together = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True,
        eos_token_id=-1,
    )  # fmt: skip
    for index, row in enumerate(rows):
        alone = model.generate(
            row[None], attention_mask=torch.ones(1, len(row)), max_new_tokens=12, do_sample=False, output_logits=True,
            return_dict_in_generate=True, eos_token_id=-1,
        )  # fmt: skip
        assert together.sequences[index, longest:].tolist() == alone.sequences[0, len(row) :].tolist()
        # The first step's logits are the prefill's, the later ones decode's.
        for batched, single in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(batched[index], single[0], rtol=0, atol=ATOL)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_with_the_cache_equals_generation_without(model, make_ids, settings):
    ids = make_ids(2, 6)
    shared = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": -1, **settings}
    assert torch.equal(model.generate(ids, **shared), model.generate(ids, use_cache=False, **shared))


def test_prompt_lookup_decoding_equals_greedy(model, make_ids):
    ids = make_ids(1, 6).repeat(1, 3)
    shared = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(model.generate(ids, **shared), model.generate(ids, prompt_lookup_num_tokens=4, **shared))


def test_generate_makes_its_own_cache(modern_model, make_ids):
    output = modern_model.generate(make_ids(1, 4), max_new_tokens=3, return_dict_in_generate=True)
    assert isinstance(output.cache, TercetCache)


def test_generate_leaves_the_callers_choice_alone(modern_model, make_ids):
    def cache_of(**settings):
        return modern_model.generate(make_ids(1, 4), max_new_tokens=3, return_dict_in_generate=True, **settings).cache

    theirs = DynamicCache(config=modern_model.config)
    assert cache_of(cache=theirs) is theirs
    assert cache_of(use_cache=False) is None
    assert isinstance(cache_of(cache_implementation="static"), StaticCache)
    assert type(cache_of(cache_implementation="dynamic")) is DynamicCache


@torch.no_grad()
def test_a_cache_goes_on_into_another_generate(modern_model, make_ids):
    ids = make_ids(1, 5)
    shared = {"do_sample": False, "eos_token_id": -1}
    whole = modern_model.generate(ids, max_new_tokens=10, **shared)
    cache = TercetCache(modern_model.config)
    first = modern_model.generate(ids, cache=cache, max_new_tokens=4, **shared)
    saved = copy.deepcopy(cache)
    for continued in (cache, saved):
        assert torch.equal(modern_model.generate(first, cache=continued, max_new_tokens=6, **shared), whole)


def test_the_old_name_of_the_cache_still_works(modern_model, make_ids):
    ids = make_ids(1, 6)
    cache = TercetCache(modern_model.config)
    modern_model(ids[:, :5], past_key_values=cache)
    assert cache.length == 5


@pytest.mark.parametrize("config", ["classic"], indirect=True)
def test_learned_positions_end_with_one_clear_line(model, make_ids):
    with pytest.raises(ValueError, match="max_position_embeddings=128"):
        model(make_ids(1, 129))
