"""Documents packed into one row never see each other: not by default, not with a mask, not silently with a cache."""

import pytest
import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from tercet.modeling import TercetCache, TercetConfig
from tercet.modeling.packing_tercet import packed_mask

ATOL = 2e-5


def pack(*documents):
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    return ids, positions


@pytest.fixture
def documents(make_ids):
    return make_ids(1, 6, seed=1)[0], make_ids(1, 9, seed=2)[0], make_ids(1, 3, seed=3)[0]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "arguments",
    [{"use_cache": False}, {}, {"attention_mask": "ones"}, {"attention_mask": "ones", "use_cache": False}],
    ids=["no_cache", "defaults", "mask", "mask_no_cache"],
)
@torch.no_grad()
def test_packed_equals_separate(model, documents, arguments, implementation):
    model.set_attn_implementation(implementation)
    ids, positions = pack(*documents)
    if arguments.get("attention_mask") == "ones":
        arguments = {**arguments, "attention_mask": torch.ones_like(ids)}
    packed = model(ids, position_ids=positions, **arguments).logits[0]
    separate = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
    torch.testing.assert_close(packed, separate, rtol=0, atol=ATOL)


@torch.no_grad()
def test_changing_one_document_moves_no_logit_of_another(model, documents, make_ids):
    first, second, third = documents
    before = model(*pack(first, second, third)[:1], position_ids=pack(first, second, third)[1]).logits[0, len(first) :]
    other = make_ids(1, len(first), seed=9)[0]
    ids, positions = pack(other, second, third)
    after = model(ids, position_ids=positions).logits[0, len(first) :]
    assert torch.equal(before, after)


@torch.no_grad()
def test_packed_rows_with_padding_and_a_mask(model, documents):
    ids, positions = pack(*documents)
    num_padding = 4
    padded = torch.cat([torch.full((1, num_padding), 1), ids], dim=1)
    mask = torch.cat([torch.zeros(1, num_padding), torch.ones_like(ids)], dim=1)
    padded_positions = torch.cat([torch.zeros(1, num_padding, dtype=torch.long), positions], dim=1)
    logits = model(padded, position_ids=padded_positions, attention_mask=mask).logits[0, num_padding:]
    torch.testing.assert_close(logits, model(ids, position_ids=positions).logits[0], rtol=0, atol=ATOL)


@torch.no_grad()
def test_padding_between_documents(model, documents, make_ids):
    """[A A A pad pad B B B]: what A says moves nothing in B, with a mask and any use of a cache."""
    first, second, _ = documents
    mask = torch.cat([torch.ones(len(first)), torch.zeros(2), torch.ones(len(second))])[None]
    positions = torch.cat([torch.arange(len(first)), torch.zeros(2, dtype=torch.long), torch.arange(len(second))])[None]
    logits = []
    for content in (first, make_ids(1, len(first), seed=9)[0]):
        ids = torch.cat([content, torch.tensor([1, 1]), second])[None]
        logits.append(model(ids, position_ids=positions, attention_mask=mask).logits[0, len(first) + 2 :])
    assert torch.equal(*logits)
    alone = model(second[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits[0], alone, rtol=0, atol=ATOL)


@pytest.mark.parametrize("arguments", [{}, {"attention_mask": "ones"}], ids=["defaults", "mask"])
@torch.no_grad()
def test_packed_rows_stay_apart_under_compilation(modern_model, documents, arguments):
    """A trace cannot look at positions; the compiled graph must isolate documents all the same."""
    ids, positions = pack(*documents)
    if arguments:
        arguments = {"attention_mask": torch.ones_like(ids)}
    expected = modern_model(ids, position_ids=positions, use_cache=False).logits
    torch.compiler.reset()
    compiled = torch.compile(modern_model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, position_ids=positions, **arguments).logits, expected, rtol=0, atol=ATOL)


def test_packed_rows_and_a_cache_are_refused(modern_model, documents):
    ids, positions = pack(*documents)
    with pytest.raises(ValueError, match="position_ids restart"):
        modern_model(ids, position_ids=positions, cache=TercetCache(modern_model.config))


def test_a_packed_row_leaves_no_cache_behind(modern_model, documents):
    ids, positions = pack(*documents)
    assert modern_model(ids, position_ids=positions, use_cache=True).cache is None


def test_packed_rows_train_each_document_alone(model, documents):
    """Gradients, too: the sum over separate documents."""
    model.train()
    ids, positions = pack(*documents)
    labels = torch.cat([torch.cat([document[1:], torch.tensor([-100])]) for document in documents])[None]
    model(ids, position_ids=positions, shift_labels=labels, num_items_in_batch=1, skip_logits=True).loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for document in documents:
        model(document[None], labels=document[None], num_items_in_batch=1).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("window", [None, 2, 4])
def test_the_mask_of_accelerators_is_that_of_transformers(window):
    """With padding between documents, positions that begin in the middle of one, and a row of one document."""
    positions = torch.stack([torch.arange(24), torch.tensor([5, 6, *range(9), -2, -2, *range(10), 0])])
    config = TercetConfig(hidden_size=16, num_attention_heads=2, sliding_window=window, attn_implementation="sdpa")
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    expected = make(
        config=config, inputs_embeds=torch.zeros(2, 24, 16), attention_mask=None, cache=None, position_ids=positions
    )
    assert torch.equal(packed_mask(positions, window), expected)
    assert expected.sum() < (24 * 25 if window is None else 48 * window)  # something is hidden


@pytest.mark.parametrize("positions", ["given", "default"])
def test_training_reads_nothing_from_an_accelerator(model, positions):
    """The meta device stands for one: it has no values, and refuses where the host would wait for them."""
    decoder = model.model.to("meta").train()
    ids = torch.zeros(2, 12, dtype=torch.long, device="meta")
    position_ids = ids if positions == "given" else None
    states = decoder(ids, position_ids=position_ids, use_cache=False).last_hidden_state
    states.sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    with pytest.raises(RuntimeError, match="meta"), torch.no_grad():  # where nothing is trained, values are looked at
        decoder(ids, position_ids=ids, use_cache=False)
