"""The loss of transformers' own function, whether logits are made or skipped."""

import pytest
import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForCausalLMLoss


@pytest.fixture
def labels(make_ids):
    labels = make_ids(2, 11)
    labels[0, :4] = -100
    return labels


@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7)], ids=["mean", "int", "tensor"])
def test_loss_is_that_of_transformers(model, make_ids, labels, skip_logits, num_items):
    ids = make_ids(2, 11)
    expected = ForCausalLMLoss(model(ids).logits, labels, model.config.vocab_size, num_items_in_batch=num_items)
    loss = model(ids, labels=labels, num_items_in_batch=num_items, skip_logits=skip_logits).loss
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("skip_logits", [False, True])
def test_aligned_labels(modern_model, make_ids, labels, skip_logits):
    ids = make_ids(2, 11)
    aligned = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    expected = modern_model(ids, labels=labels).loss
    torch.testing.assert_close(modern_model(ids, shift_labels=aligned, skip_logits=skip_logits).loss, expected)


def test_skipping_logits_gives_the_same_gradients(model, make_ids, labels):
    ids = make_ids(2, 11)
    gradients = []
    for skip_logits in (False, True):
        model.zero_grad()
        model(ids, labels=labels, skip_logits=skip_logits).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-6)


def test_logits_come_back_unless_skipped(modern_model, make_ids, labels):
    ids = make_ids(2, 11)
    assert modern_model(ids, labels=labels).logits.shape == (2, 11, modern_model.config.vocab_size)
    assert modern_model(ids, labels=labels, skip_logits=True).logits is None


def test_skipping_logits_never_holds_them_whole(modern_model, make_ids, labels, monkeypatch):
    """No tensor of a forward and backward pass is as large as the logits, where those are larger than a chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from tercet.modeling import loss_tercet

    monkeypatch.setattr(loss_tercet, "_CHUNK_LOGITS", 1 << 12)
    monkeypatch.setattr(loss_tercet, "_MIN_POSITIONS", 16)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            output = func(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, tuple | list) else [output]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return output

    ids = make_ids(8, 96)
    with Watch():
        modern_model(ids, labels=ids, skip_logits=True).loss.backward()
    assert largest < ids.numel() * modern_model.config.vocab_size / 2


def test_nothing_to_predict_without_labels(modern_model, make_ids):
    with pytest.raises(ValueError, match="skip_logits=True needs labels"):
        modern_model(make_ids(1, 4), skip_logits=True)


def test_padding_is_no_label_and_end_of_text_is(modern_model, make_ids):
    """pad != eos: a collator that masks padding must not mask the token that ends a text."""
    config = modern_model.config
    assert config.pad_token_id != config.eos_token_id
    ids = torch.tensor([[5, 6, config.eos_token_id, config.pad_token_id, config.pad_token_id]])
    labels = ids.masked_fill(ids == config.pad_token_id, -100)
    loss = modern_model(ids, labels=labels).loss
    logits = modern_model(ids).logits[0]
    expected = F.cross_entropy(logits[:2], torch.tensor([6, config.eos_token_id]))
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("positions", [1, 5, 300])
def test_chunks_add_up(modern_model, make_ids, labels, positions, monkeypatch):
    """Loss, z-loss and gradients do not depend on how many positions are held at a time."""
    from tercet.modeling import loss_tercet

    torch.manual_seed(0)
    hidden = torch.randn(2, 11, 16, requires_grad=True)
    weight = torch.randn(31, 16, requires_grad=True)
    labels = labels % 31
    labels[1, 5] = -100
    monkeypatch.setattr(loss_tercet, "_MIN_POSITIONS", positions)
    monkeypatch.setattr(loss_tercet, "_CHUNK_LOGITS", 1)
    loss = loss_tercet.chunked_causal_lm_loss(hidden, weight, None, shift_labels=labels, z_loss=0.05)
    logits = F.linear(hidden, weight)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected)
    is_label = labels != -100
    penalty = 0.05 * (torch.logsumexp(logits, -1).square() * is_label).sum() / is_label.sum()
    # The penalty moves gradients; the number told is the cross entropy.
    wanted = torch.autograd.grad(3 * (expected + penalty), (hidden, weight))
    for gradient, other in zip(torch.autograd.grad(3 * loss, (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)


def test_autocast_sums_in_float32(modern_model, make_ids, labels):
    ids = make_ids(2, 11)
    with torch.autocast("cpu", torch.bfloat16):
        chunked = modern_model(ids, labels=labels, skip_logits=True).loss
        whole = modern_model(ids, labels=labels).loss
    assert chunked.dtype == torch.float32
    torch.testing.assert_close(chunked, whole, rtol=1e-2, atol=1e-2)
