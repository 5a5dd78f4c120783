"""Bits per byte against the definition, written out."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.documents import Document
from tercet.training.errors import UserError
from tercet.training.evaluation import evaluate
from tercet.training.shards import prepare

TEXTS = ["A short one.", "Grüße, 世界! " * 3, "x = [1, 2, 3]\n" * 40]


@pytest.fixture
def token_set(small_tokenizer, tmp_path):
    return prepare(
        [Document(text, "test") for text in TEXTS], small_tokenizer, tmp_path,
        validation_fraction=0.0, split_by="document", drop_duplicates=False, progress=False,
    ).train  # fmt: skip


def make_model(family, vocab_size):
    torch.manual_seed(0)
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_embd=16, n_layer=1, n_head=2, n_positions=512))
    return TercetForCausalLM(
        TercetConfig(vocab_size=vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                     initializer_range=0.3)
    )  # fmt: skip


@pytest.mark.parametrize("family", ["tercet", "gpt2"])
def test_against_the_definition(token_set, small_tokenizer, family):
    """With rows that hold every document whole, nothing is approximated."""
    model = make_model(family, len(small_tokenizer)).eval()
    eos = small_tokenizer.eos_token_id
    nats_of_text = nats_of_all = 0.0
    num_labels = 0
    for text in TEXTS:
        ids = [eos, *small_tokenizer(text)["input_ids"], eos]
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]])).logits[0]
        nats = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double()
        nats_of_text += float(nats[:-1].sum())
        nats_of_all += float(nats.sum())
        num_labels += len(nats)
    result = evaluate(
        model, token_set, sequence_length=512, eos_token_id=eos, pad_token_id=small_tokenizer.pad_token_id
    )
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert result.num_bytes == num_bytes
    assert result.num_tokens == num_labels
    assert result.bits_per_byte == pytest.approx(nats_of_text / math.log(2) / num_bytes, rel=1e-5)
    assert result.loss_nats == pytest.approx(nats_of_all / num_labels, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss_nats))


@pytest.mark.parametrize(("sequence_length", "stride"), [(16, 16), (16, 8), (16, 1), (40, 13)])
def test_a_uniform_model_scores_the_same_at_any_window(token_set, small_tokenizer, sequence_length, stride):
    model = make_model("tercet", len(small_tokenizer)).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = evaluate(
        model, token_set, sequence_length=sequence_length, stride=stride,
        eos_token_id=small_tokenizer.eos_token_id, pad_token_id=small_tokenizer.pad_token_id,
    )  # fmt: skip
    text_tokens = int(np.sum(token_set.document_lengths)) - len(TEXTS)
    assert result.loss_nats == pytest.approx(math.log(len(small_tokenizer)), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(
        text_tokens * math.log2(len(small_tokenizer)) / token_set.num_bytes, rel=1e-5
    )


def test_the_model_stays_in_its_mode(token_set, small_tokenizer):
    model = make_model("tercet", len(small_tokenizer)).train()
    evaluate(model, token_set, sequence_length=64, eos_token_id=0, pad_token_id=1)
    assert model.training


def test_a_model_that_gives_no_number_is_told(token_set, small_tokenizer):
    model = make_model("tercet", len(small_tokenizer))
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(UserError, match="the loss of the text is nan: some weight is no number"):
        evaluate(model, token_set, sequence_length=16, eos_token_id=0, pad_token_id=1)


@pytest.fixture
def two_sources(small_tokenizer, tmp_path):
    def make(documents, name):
        return prepare(
            documents, small_tokenizer, tmp_path / name,
            validation_fraction=0.0, split_by="document", drop_duplicates=False, progress=False,
        ).train  # fmt: skip

    prose, code = [Document(text, "prose") for text in TEXTS[:2]], [Document(TEXTS[2], "code")]
    mixed = [prose[0], code[0], prose[1]]
    return make(mixed, "both"), {"prose": make(prose, "prose"), "code": make(code, "code")}


@pytest.mark.parametrize("sequence_length", [512, 16])
def test_each_source_is_scored_as_if_it_were_alone(two_sources, small_tokenizer, sequence_length):
    both, alone = two_sources
    model = make_model("tercet", len(small_tokenizer)).eval()
    ids = {"eos_token_id": small_tokenizer.eos_token_id, "pad_token_id": small_tokenizer.pad_token_id}
    result = evaluate(model, both, sequence_length=sequence_length, **ids)
    assert result.by_source.keys() == alone.keys()
    for label, token_set in alone.items():
        measured, expected = result.by_source[label], evaluate(model, token_set, sequence_length=sequence_length, **ids)
        assert measured.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-5)
        assert measured.loss_nats == pytest.approx(expected.loss_nats, rel=1e-5)
        assert (measured.num_tokens, measured.num_bytes) == (expected.num_tokens, expected.num_bytes)
        assert expected.by_source == {}  # one source says no more than the whole
    parts = result.by_source.values()
    assert sum(part.num_tokens for part in parts) == result.num_tokens
    assert sum(part.bits_per_byte * part.num_bytes for part in parts) == pytest.approx(
        result.bits_per_byte * result.num_bytes
    )


def test_processes_score_by_source_what_one_does(two_sources, small_tokenizer):
    """Each in turn; their sums together, and as many forward passes in each."""
    both, _ = two_sources
    model = make_model("tercet", len(small_tokenizer)).eval()
    ids = {"eos_token_id": small_tokenizer.eos_token_id, "pad_token_id": small_tokenizer.pad_token_id}
    calls: list[int] = []
    model.register_forward_hook(lambda *arguments: calls.append(1))
    sums: list[torch.Tensor] = []

    class Rank:
        num_processes = 3

        def __init__(self, rank):
            self.process_index = rank

        def reduce(self, tensor, reduction):
            sums.append(tensor)
            return torch.stack(sums).sum(0) if len(sums) == self.num_processes else torch.ones_like(tensor)

    numbers = []
    for rank in range(3):
        before = len(calls)
        # In windows of 8 there are several batches; the last process sees the sums of all.
        result = evaluate(model, both, sequence_length=8, stride=1, accelerator=Rank(rank), **ids)
        numbers.append(len(calls) - before)
    assert len(set(numbers)) == 1
    assert result.by_source == evaluate(model, both, sequence_length=8, stride=1, **ids).by_source
