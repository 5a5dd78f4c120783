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
    for name, decay in (("muon", 0.0), ("adamw", 0.0), ("muon", 0.3), ("adamw", 0.3)):
        optimizers = make_optimizers(model, name=name, **SETTINGS, embedding_weight_decay=decay)
        trained = [parameter for o in optimizers for group in o.param_groups for parameter in group["params"]]
        assert sorted(map(id, trained)) == sorted(map(id, model.parameters()))
        decays = {
            id(parameter): group["weight_decay"]
            for o in optimizers
            for group in o.param_groups
            for parameter in group["params"]
        }
        for kind, wanted in ((matrices, 0.1), (tables, decay), (vectors, 0.0)):
            assert {decays[id(parameter)] for parameter in kind} <= {wanted}
    assert len(vectors) == sum(1 for parameter in model.parameters() if parameter.ndim == 1)


def test_gradients_are_unscaled_and_unusable_ones_change_nothing():
    """As fused optimizers take `grad_scale` and `found_inf`; a gradient that is not a number reaches no state."""
    torch.manual_seed(0)
    scaled = torch.nn.Parameter(torch.randn(8, 12))
    plain = torch.nn.Parameter(scaled.detach().clone())
    mine, other = Muon([scaled], weight_decay=0.1), Muon([plain], weight_decay=0.1)
    for step in range(3):
        plain.grad = torch.randn(8, 12)
        scaled.grad = plain.grad * 4
        mine.grad_scale, mine.found_inf = torch.tensor(4.0), torch.tensor(0.0)
        mine.step()
        other.step()
        before = scaled.detach().clone(), mine.state[scaled]["momentum_buffer"].clone()
        scaled.grad = torch.full((8, 12), float("nan" if step % 2 else "inf"))
        mine.found_inf = torch.tensor(1.0)
        mine.step()
        assert torch.equal(scaled, before[0])
        assert torch.equal(mine.state[scaled]["momentum_buffer"], before[1])
    torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("condition", [1.0, 1e4])
def test_wide_and_tall_matrices_take_the_steps_of_the_iteration(condition):
    """They are orthogonalised through x xT; the iteration in double precision is what is meant."""
    torch.manual_seed(0)
    wide = torch.randn(2, 24, 64) * torch.logspace(0, -torch.tensor(condition).log10().item(), 64)
    expected = wide.double() / wide.double().norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = expected @ expected.mT
        expected = 3.4445 * expected + (-4.7750 * gram + 2.0315 * gram @ gram) @ expected
    torch.testing.assert_close(orthogonalize(wide), expected.float(), rtol=0, atol=1e-3)
    torch.testing.assert_close(orthogonalize(wide.mT), expected.float().mT, rtol=0, atol=1e-3)
