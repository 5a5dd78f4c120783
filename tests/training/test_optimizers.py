"""Muon against linear algebra, and which parameters it gets."""

import copy

import pytest
import torch

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.optimizers import Muon, make_optimizers, orthogonalize, split_parameters

SETTINGS = {
    "learning_rate": 1e-3, "matrix_learning_rate": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48)])
def test_orthogonalize_keeps_directions_and_evens_their_size(shape):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    result = orthogonalize(matrices)
    for before, after in zip(matrices, result, strict=True):
        u, s, vh = torch.linalg.svd(before, full_matrices=False)
        in_its_basis = u.T @ after @ vh.T
        large = s > 0.05 * s.max()
        assert in_its_basis.diagonal()[large].min() > 0.5
        assert in_its_basis.diagonal().max() < 1.3
        assert (in_its_basis - torch.diag(in_its_basis.diagonal())).abs().max() < 1e-3


def test_stacking_matrices_of_one_shape_changes_no_update():
    torch.manual_seed(0)
    together = [torch.nn.Parameter(torch.randn(8, 12)) for _ in range(3)]
    alone = copy.deepcopy(together)
    optimizers = [Muon(together, weight_decay=0.1), *(Muon([parameter], weight_decay=0.1) for parameter in alone)]
    for _ in range(3):
        for one, other in zip(together, alone, strict=True):
            one.grad = torch.randn(8, 12)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_muon_follows_the_librarys_own():
    """torch.optim.Muon runs the same iteration in bfloat16, with the same scaling as an option."""
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(24, 16))
    theirs = torch.nn.Parameter(ours.detach().clone())
    mine = Muon([ours], lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    before = ours.detach().clone()
    for _ in range(3):
        ours.grad = torch.randn(24, 16)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    moved_ours, moved_theirs = ours.detach() - before, theirs.detach() - before
    assert torch.nn.functional.cosine_similarity(moved_ours.flatten(), moved_theirs.flatten(), dim=0) > 0.99
    assert moved_ours.norm().item() == pytest.approx(moved_theirs.norm().item(), rel=0.05)


def test_muon_takes_matrices_only():
    with pytest.raises(ValueError, match=r"\(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_trained_once(tied):
    model = TercetForCausalLM(
        TercetConfig.classic(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                             tie_word_embeddings=tied)
    )  # fmt: skip
    matrices, tables, vectors = split_parameters(model)
    assert len(matrices) == 2 * 6
    assert len(tables) == (2 if tied else 3)
    for name in ("muon", "adamw"):
        optimizers = make_optimizers(model, name=name, **SETTINGS)
        trained = [parameter for o in optimizers for group in o.param_groups for parameter in group["params"]]
        assert sorted(map(id, trained)) == sorted(map(id, model.parameters()))
        decayed = {
            id(parameter)
            for o in optimizers
            for group in o.param_groups
            if group["weight_decay"]
            for parameter in group["params"]
        }
        assert decayed == set(map(id, matrices))
    assert len(vectors) == sum(1 for parameter in model.parameters() if parameter.ndim == 1)
