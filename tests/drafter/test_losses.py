"""Each loss against its formula and finite differences; which tokens count and with which weight."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from megatron_tlt.config.drafter import DrafterConfig, DrafterLossConfig
from megatron_tlt.drafter.losses import LOSSES, Drafted, draft_loss, reward_weight

ROWS, HIDDEN, VOCAB = 7, 6, 11


def log_probs(seed: int, rows: int = ROWS) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)).double() * 2).log_softmax(-1)


def direct(name: str, p: list[float], q: list[float]) -> float:
    """From the definition, in plain Python."""
    if name == "tv":
        return 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))
    entropy = sum(a * math.log(a) for a in p if a > 0)
    cross = -sum(a * math.log(b) for a, b in zip(p, q, strict=True) if a > 0)
    return cross if name == "eagle" else entropy + cross


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_its_formula(name: str) -> None:
    log_p, log_q = log_probs(1), log_probs(2)
    found = LOSSES[name](log_p, log_q)
    for row in range(ROWS):
        p, q = (x[row].exp().tolist() for x in (log_p, log_q))
        assert float(found[row]) == pytest.approx(direct(name, p, q), abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_finite_differences(name: str) -> None:
    log_p, logits = log_probs(1), (log_probs(2) * 1.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](log_p, x.log_softmax(-1)), (logits,))


@pytest.mark.parametrize("name", LOSSES)
def test_a_certain_target_gives_finite_losses_and_gradients(name: str) -> None:
    certain = torch.tensor([[0.0, -math.inf, -math.inf]]).expand(2, 3)
    logits = torch.tensor([[200.0, 0.0, 0.0], [-200.0, 0.0, 0.0]], requires_grad=True)
    losses = LOSSES[name](certain, logits.log_softmax(-1))
    losses.sum().backward()
    assert losses.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
    assert losses[0].item() == pytest.approx(0.0, abs=1e-6)


def drafted() -> Drafted:
    torch.manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    weights = torch.rand(ROWS)
    return Drafted(hidden, hidden * 1.1, weights, torch.randn(ROWS, HIDDEN))


def test_the_whole_loss_in_chunks_of_any_size() -> None:
    config = DrafterLossConfig(distribution_weight=0.7)
    rows = drafted()
    torch.manual_seed(4)
    head, target_head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    logits = rows.head_input_RH @ head.T
    divergence = -((rows.target_hidden_RH @ target_head.T).softmax(-1) * logits.log_softmax(-1)).sum(-1)
    error = rows.features_RH - rows.target_hidden_RH
    smooth = torch.where(error.abs() < 1, 0.5 * error**2, error.abs() - 0.5).mean(-1)
    expected = (rows.weights_R * (0.7 * divergence + 0.3 * smooth)).sum()
    gradient = torch.autograd.grad(expected, rows.head_input_RH)[0]
    for chunk in (1, 3, 100):
        again = drafted()
        loss, logged = draft_loss(config, 0.3, again, head, target_head, chunk)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, again.head_input_RH)[0], gradient)
        assert float(logged["distribution_loss"]) == pytest.approx(divergence.sum().item(), rel=1e-5)
        assert float(logged["regression_loss"]) == pytest.approx(smooth.sum().item(), rel=1e-5)


def test_logits_of_all_rows_are_never_held() -> None:
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    rows, vocab = 64, 1000
    hidden = torch.randn(rows, HIDDEN, requires_grad=True)
    batch = Drafted(hidden, hidden, torch.ones(rows), torch.randn(rows, HIDDEN))
    head = torch.randn(vocab, HIDDEN)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = draft_loss(DrafterLossConfig(), 0.5, batch, head, head, 4)
    assert max(kept) <= head.numel()  # the largest stored tensor is the head itself, not (rows, vocab)
    loss.backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_reward_weights_are_normalised_and_clipped() -> None:
    config = DrafterLossConfig(reward_weighting=True, reward_low=-1.0, reward_high=3.0, reward_floor=0.2)
    assert [reward_weight(config, r) for r in (-9.0, -1.0, 1.0, 3.0, 9.0)] == [0.2, 0.2, 0.5, 1.0, 1.0]
    assert reward_weight(DrafterLossConfig(), -9.0) == 1.0


def test_inconsistent_configs_are_refused() -> None:
    with pytest.raises(ValidationError, match="must be below reward_high"):
        DrafterLossConfig(reward_low=1.0, reward_high=1.0)
    with pytest.raises(ValidationError, match="EAGLE-3 has none"):
        DrafterConfig(kind="eagle3", loss=DrafterLossConfig(regression_weight=0.5))
    with pytest.raises(ValidationError, match=r"aux_hidden_state_layer_ids is .*; EAGLE takes none"):
        DrafterConfig(kind="eagle", aux_hidden_state_layer_ids=[1, 2, 3])
    eagle, eagle3 = DrafterConfig(kind="eagle"), DrafterConfig()
    assert (eagle.regression_weight, eagle3.regression_weight) == (0.5, 0.0)
    assert (eagle.steps, eagle3.steps) == (3, 3)
    assert (eagle.lr, eagle3.lr, DrafterConfig(kind="eagle", lr=0.3).lr) == (1e-4, 3e-4, 0.3)
    assert DrafterConfig(kind="eagle", loss=DrafterLossConfig(name="tv")).regression_weight == 0.0
