"""One step over a global batch is one step, however it is cut."""

import copy

import pytest
import torch
from accelerate import Accelerator

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.optimizers import make_optimizers
from tercet.training.step import set_learning_rates, training_step

ROWS, LENGTH, VOCAB = 8, 12, 61


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TercetForCausalLM(
        TercetConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, pad_token_id=1)
    ).train()


@pytest.fixture
def rows():
    """Rows with 12, 11, ..., 5 labels: micro-batches of very different numbers of tokens."""
    torch.manual_seed(1)
    ids = torch.randint(2, VOCAB, (ROWS, LENGTH))
    labels = torch.randint(2, VOCAB, (ROWS, LENGTH))
    for row in range(ROWS):
        labels[row, LENGTH - row :] = -100
    return {"input_ids": ids, "shift_labels": labels, "position_ids": torch.arange(LENGTH).expand(ROWS, -1)}


def cut(rows, batch_size):
    return [
        {name: tensor[start : start + batch_size] for name, tensor in rows.items()}
        for start in range(0, ROWS, batch_size)
    ]


def run(model, batches, accelerator, clip_norm=1e9):
    model = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0)]
    result = training_step(model, optimizers, batches, accelerator, clip_norm=clip_norm)
    return model, result


def test_accumulation_changes_nothing(model, rows, accelerator):
    whole, expected = run(model, cut(rows, 8), accelerator)
    for batch_size in (4, 2, 1):
        cut_model, result = run(model, cut(rows, batch_size), accelerator)
        torch.testing.assert_close(result.loss_nats, expected.loss_nats)
        torch.testing.assert_close(result.grad_norm, expected.grad_norm)
        assert result.num_tokens == expected.num_tokens == sum(LENGTH - row for row in range(ROWS))
        for one, other in zip(whole.parameters(), cut_model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_mean_over_all_labels(model, rows, accelerator):
    logits = model(rows["input_ids"]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, rows["shift_labels"].flatten())
    _, result = run(model, cut(rows, 2), accelerator)
    torch.testing.assert_close(result.loss_nats, expected.detach())


def test_gradients_are_clipped_and_reported_unclipped(model, rows, accelerator):
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    trained, result = run(model, cut(rows, 4), accelerator, clip_norm=1e-3)
    moved = torch.cat([parameter.detach().flatten() for parameter in trained.parameters()]) - before
    assert result.grad_norm > 1e-2
    assert moved.norm() == pytest.approx(1e-3, rel=1e-2)


def test_learning_rates_are_set_from_their_peaks(model):
    optimizers = make_optimizers(
        model, name="muon", learning_rate=0.1, matrix_learning_rate=0.2, weight_decay=0.0, betas=(0.9, 0.95)
    )
    for factor in (0.5, 0.25):
        set_learning_rates(optimizers, factor)
    assert [group["lr"] for o in optimizers for group in o.param_groups] == pytest.approx([0.05, 0.025])
