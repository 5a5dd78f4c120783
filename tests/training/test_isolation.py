"""Documents of a row never see each other, whatever computes attention: rows as training makes them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.packing import IGNORE_INDEX, PackedDataset, concatenate, document_bounds, pack

EOS, PAD, T, VOCAB_SIZE = 0, 1, 24, 89


class RandomTokens:
    """Documents of random tokens."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.document_lengths = lengths
        rng = np.random.default_rng(1)
        self.documents = [np.append(rng.integers(2, VOCAB_SIZE, n - 1), EOS) for n in lengths.tolist()]

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.documents[document][start:stop]

    def label_mask(self, document: int, start: int, stop: int) -> None:
        return None


@pytest.fixture(params=[pack, concatenate], ids=["best_fit", "concatenate"])
def batch(request) -> dict[str, torch.Tensor]:
    """Rows of two and more pieces, short documents and parts of long ones, some with padding."""
    tokens = RandomTokens(np.append(np.random.default_rng(0).integers(2, 40, size=30), 5))
    assert tokens.document_lengths.sum() % T
    packing = request.param(tokens.document_lengths, T)
    dataset = PackedDataset(tokens, packing, eos_token_id=EOS, pad_token_id=PAD)
    chosen = np.flatnonzero(np.diff(packing.row_offsets) > 1)
    assert len(chosen) > 5
    return dataset.rows(np.append(chosen, packing.num_rows - 1))


@pytest.fixture(params=["full", "sliding"])
def model(request) -> TercetForCausalLM:
    windows = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(0)
    config = TercetConfig.modern(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=T, eos_token_id=EOS, pad_token_id=PAD, initializer_range=0.2,
        **(windows if request.param == "sliding" else {}),
    )  # fmt: skip
    return TercetForCausalLM(config).eval()


def pieces(position_ids: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise([*torch.nonzero(position_ids == 0).flatten().tolist(), len(position_ids)]))


@pytest.mark.parametrize(
    "implementation", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)]  # compiled: a minute
)  # fmt: skip
@torch.no_grad()
def test_a_token_moves_nothing_outside_of_its_document(model, batch, implementation):
    model.set_attn_implementation(implementation)

    def logits(ids):
        return model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits

    before = logits(batch["input_ids"])
    num_changed = 0
    for ordinal in range(max(len(pieces(row)) for row in batch["position_ids"])):
        # In every row, the first token of one piece at once.
        ids, expected_to_move = batch["input_ids"].clone(), torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
        for row, positions in enumerate(batch["position_ids"]):
            if ordinal < len(found := pieces(positions)):
                start, stop = found[ordinal]
                ids[row, start] = (ids[row, start] + 7) % VOCAB_SIZE
                expected_to_move[row, start:stop] = True
        moved = (logits(ids) != before).any(-1)
        assert not (moved & ~expected_to_move).any()
        starts = expected_to_move & (batch["position_ids"] == 0)
        assert moved[starts].all()
        num_changed += int(moved.sum())
    assert num_changed > batch["input_ids"].numel() // 2  # what follows in the same document did move


def attend_within_bounds(module, query, key, value, attention_mask, scaling, cu_seq_lens_q, max_length_q, **kwargs):
    """Causal attention, piece by piece between bounds: what a varlen kernel computes, and nothing else to go by."""
    assert attention_mask is None
    groups = query.shape[1] // key.shape[1]
    rows = [states.transpose(0, 1).flatten(1, 2) for states in (query, key, value)]  # (heads, B T, D)
    q, k, v = rows[0], *(states.repeat_interleave(groups, dim=0) for states in rows[1:])
    output = torch.empty_like(q)
    for start, stop in pairwise(cu_seq_lens_q.tolist()):
        assert stop - start <= max_length_q
        parts = (states[:, start:stop] for states in (q, k, v))
        output[:, start:stop] = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling)
    return output.view(q.shape[0], query.shape[0], -1, q.shape[-1]).permute(1, 2, 0, 3), None


@pytest.mark.parametrize("model", ["full"], indirect=True)
def test_the_bounds_alone_give_the_same_loss_and_gradients(model, batch):
    """They pass through the model to the attention function under transformers' names, and say all that it needs."""
    AttentionInterface.register("within_bounds", attend_within_bounds)
    assert (batch["shift_labels"] == IGNORE_INDEX).any()
    outcomes = []
    for implementation, more in (("sdpa", {}), ("within_bounds", document_bounds(batch["position_ids"]))):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        loss = model(**batch, **more, use_cache=False, skip_logits=True).loss
        loss.backward()
        outcomes.append((loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    (loss, gradients), (bounded_loss, bounded_gradients) = outcomes
    torch.testing.assert_close(bounded_loss, loss, rtol=1e-5, atol=0)
    for one, other in zip(bounded_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
