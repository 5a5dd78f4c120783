"""One step over a global batch is one step, however it is cut."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.ema import WeightAverage
from tercet.training.optimizers import Muon, make_optimizers
from tercet.training.step import gradients_stay_here, set_learning_rates, training_step

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


def run(model, batches, accelerator, clip_norm=1e9, **settings):
    model = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0, fused=True)]
    result = training_step(model, optimizers, batches, accelerator, clip_norm=clip_norm, **settings)
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
    assert [group["lr"] for o in optimizers for group in o.param_groups] == pytest.approx([0.05, 0.025, 0.025])


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(model, rows, accelerator, name, value):
    """Not a weight, not a moment, not a count of steps; and the steps after it are those of a run without it."""
    settings = {"learning_rate": 0.01, "matrix_learning_rate": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    reference = copy.deepcopy(model)
    broken = False

    def spoil_gradient(gradient):
        return gradient * value if broken else gradient

    model.model.layers[0].mlp.up_proj.weight.register_hook(spoil_gradient)
    runs = [(model, make_optimizers(model, name=name, **settings)),
            (reference, make_optimizers(reference, name=name, **settings))]  # fmt: skip
    batches = cut(rows, 4)
    for one, optimizers in runs:
        assert training_step(one, optimizers, batches, accelerator, clip_norm=1.0).is_finite
    broken = True
    result = training_step(model, runs[0][1], batches, accelerator, clip_norm=1.0)
    assert not result.is_finite
    assert torch.isfinite(result.loss_nats)
    broken = False
    for one, optimizers in runs:
        training_step(one, optimizers, batches, accelerator, clip_norm=1.0)
    for tensor, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(tensor, other)
    for ours, theirs in zip(runs[0][1], runs[1][1], strict=True):
        for state, other in zip(ours.state.values(), theirs.state.values(), strict=True):
            assert all(torch.equal(state[key], other[key]) for key in other)


def test_a_loss_that_is_not_finite_is_told(model, rows, accelerator):
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    _, result = run(model, cut(rows, 8), accelerator)
    assert not result.is_finite
    assert not torch.isfinite(result.loss_nats)
    trained, _ = run(model, cut(rows, 8), accelerator)
    for parameter, old in zip(trained.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old, equal_nan=True, rtol=0, atol=0)


def test_other_optimizers_are_refused(model, rows, accelerator):
    with pytest.raises(ValueError, match=r"Adagrad.*fused"):
        training_step(model, [torch.optim.Adagrad(model.parameters())], cut(rows, 8), accelerator, clip_norm=1.0)


def test_z_loss_moves_gradients_and_not_the_loss(model, rows, accelerator):
    plain, expected = run(model, cut(rows, 4), accelerator)
    moved, result = run(model, cut(rows, 4), accelerator, z_loss=0.1)
    torch.testing.assert_close(result.loss_nats, expected.loss_nats)
    logits = model(rows["input_ids"]).logits
    is_label = rows["shift_labels"] != -100
    penalty = 0.1 * (torch.logsumexp(logits, -1).square() * is_label).sum() / is_label.sum()
    gradients = torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)
    for one, other, gradient in zip(plain.parameters(), moved.parameters(), gradients, strict=True):
        # SGD with learning rate 1: what one has moved further than the other is the penalty's gradient.
        torch.testing.assert_close(one - other, gradient, rtol=1e-3, atol=1e-6)


def test_sharded_models_reduce_gradients_once_a_step(model, rows, accelerator):
    """`fully_shard` gives a model this method; all but the last micro-batch keep their gradients."""
    said = []
    sharded = copy.deepcopy(model)
    sharded.set_requires_gradient_sync = said.append
    for index in range(3):
        with gradients_stay_here(sharded, accelerator, index < 2):
            said.append("backward")
    assert said == [False, "backward", True, False, "backward", True, "backward"]


class CopiesToDevice(TorchDispatchMode):
    """Notes of each copy from the CPU to the meta device whether the host may go on before it is done."""

    def __init__(self):
        super().__init__()
        self.non_blocking = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        given = {tensor.device.type for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        if given == {"cpu"} and isinstance(result, torch.Tensor) and result.device.type == "meta":
            self.non_blocking.append((kwargs or {}).get("non_blocking", False))
        return result


class OnMeta(Accelerator):
    """The meta device stands for an accelerator: it has no values, and refuses where the host would wait for them."""

    device = torch.device("meta")


class OneMatrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6, device="meta"))

    def forward(self, input_ids, num_items_in_batch, **others):
        return SimpleNamespace(loss=self.weight.sum() * input_ids.float().sum() / num_items_in_batch)


def test_the_host_never_waits_for_the_device(rows):
    """Neither for a value nor for a copy: the next step's work is queued while this one runs."""
    model, accelerator = OneMatrix(), OnMeta(cpu=True)
    optimizers, average = [Muon(model.parameters(), weight_decay=0.1)], WeightAverage(model, 0.9)
    with CopiesToDevice() as copies:
        for step in (1, 2):
            result = training_step(model, optimizers, cut(rows, 4), accelerator, clip_norm=1.0)
            average.update(step, result.is_finite)
    assert len(copies.non_blocking) == 2 * (2 * 3 + 1)  # micro-batches' tensors, and the number of labels
    assert all(copies.non_blocking)
    with pytest.raises(RuntimeError, match="meta"):
        result.loss_nats.item()
