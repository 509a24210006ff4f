"""Advantages and losses against the formulas of papers and of verl, written once more on random data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron_tlt.algorithms.losses import LossInputs
from megatron_tlt.algorithms.registry import build_algorithm, build_loss
from megatron_tlt.config.algorithm import AlgorithmConfig, KlConfig

GROUP, GROUPS = 4, 6
B, T = 5, 9
LOW, HIGH, DUAL = 0.2, 0.28, 1.5


def drawn(seed: int) -> tuple[list[float], list[int]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=GROUP * GROUPS).tolist(), rng.integers(1, 50, size=GROUP * GROUPS).tolist()


def grouped(rewards: Sequence[float]) -> list[list[float]]:
    return [list(rewards[i : i + GROUP]) for i in range(0, len(rewards), GROUP)]


def grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """DeepSeekMath 2402.03300, section 4.1.2; epsilon as in verl's compute_grpo_outcome_advantage."""
    return [(r - np.mean(rs)) / (np.std(rs) + 1e-6) for rs in grouped(rewards) for r in rs]


def dr_grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """2503.20783, section 3.2."""
    return [r - sum(rs) / GROUP for rs in grouped(rewards) for r in rs]


def rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """2402.14740, section 2.2: the mean of the others is the baseline."""
    return [r - (sum(rs) - r) / (GROUP - 1) for rs in grouped(rewards) for r in rs]


def whiten(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """verl's masked_whiten over the tokens of the batch, each of which has its response's value."""
    tokens = torch.tensor([v for v, n in zip(values, lengths, strict=True) for _ in range(n)], dtype=torch.float64)
    mean, variance = tokens.mean(), tokens.var(unbiased=True)
    return [float((v - mean) * torch.rsqrt(variance + 1e-8)) for v in values]


REFERENCES: dict[str, Callable[[Sequence[float], Sequence[int]], list[float]]] = {
    "grpo": grpo,
    "gspo": grpo,
    "cispo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": lambda rewards, lengths: list(rewards),
    "reinforce++": whiten,
    "reinforce++_baseline": lambda rewards, lengths: whiten(dr_grpo(rewards, lengths), lengths),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_advantages_are_those_of_the_formula(name: str) -> None:
    algorithm = build_algorithm(AlgorithmConfig(name=name, group_size=GROUP))
    for seed in range(5):
        rewards, lengths = drawn(seed)
        expected = REFERENCES[name](rewards, lengths)
        assert algorithm.assign_credit(rewards, lengths) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in REFERENCES if name != "reinforce"])
def test_equal_rewards_give_no_gradient(name: str) -> None:
    algorithm = build_algorithm(AlgorithmConfig(name=name, group_size=GROUP))
    assert set(algorithm.assign_credit([0.1] * GROUP * GROUPS, drawn(0)[1])) == {0.0}


def columns(seed: int) -> tuple[torch.Tensor, torch.Tensor, LossInputs]:
    """Log-probs, entropies and columns in float64; each response ends at another position, advantages are its own."""
    generator = torch.Generator().manual_seed(seed)
    random = [torch.randn(B, T, generator=generator).double() for _ in range(5)]
    mask = (torch.arange(T)[None] < torch.tensor([T, 3, 1, 6, T])[:, None]).double()
    old, reference = -1 + 0.4 * random[0], -1 + 0.4 * random[1]
    advantages = random[2][:, :1].expand(B, T)
    inputs = LossInputs(mask, advantages, old, reference, random[3].abs())
    return (-1 + 0.4 * random[4]).requires_grad_(), random[3].abs().requires_grad_(), inputs


def verl_clipped(log_prob: torch.Tensor, d: LossInputs) -> torch.Tensor:
    """verl core_algos.compute_policy_loss_vanilla, before aggregation."""
    ratio = torch.exp(log_prob - d.old_log_probs_BT)
    losses_1 = -d.advantages_BT * ratio
    losses_2 = -d.advantages_BT * torch.clamp(ratio, 1 - LOW, 1 + HIGH)
    clipped_1 = torch.maximum(losses_1, losses_2)
    clipped_2 = torch.min(-d.advantages_BT * DUAL, clipped_1)
    return torch.where(d.advantages_BT < 0, clipped_2, clipped_1)


def verl_gspo(log_prob: torch.Tensor, d: LossInputs) -> torch.Tensor:
    """verl core_algos.compute_policy_loss_gspo, before aggregation."""
    lengths = d.mask_BT.sum(dim=-1).clamp(min=1)
    sequence = ((log_prob - d.old_log_probs_BT) * d.mask_BT).sum(dim=-1) / lengths
    ratio = torch.exp(torch.clamp(log_prob - log_prob.detach() + sequence.detach().unsqueeze(-1), max=10.0))
    return torch.maximum(-d.advantages_BT * ratio, -d.advantages_BT * torch.clamp(ratio, 1 - LOW, 1 + HIGH))


def verl_cispo(log_prob: torch.Tensor, d: LossInputs) -> torch.Tensor:
    """MiniMax-M1 2506.13585, eqs. 4 and 5."""
    ratio = torch.exp(log_prob - d.old_log_probs_BT)
    return -torch.clamp(ratio, 1 - LOW, 1 + HIGH).detach() * d.advantages_BT * log_prob


def verl_kl(log_prob: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """verl core_algos.kl_penalty_forward."""
    if kind == "k1":
        return log_prob - reference
    if kind == "k2":
        return 0.5 * (log_prob - reference).square()
    if kind == "k3":
        return torch.exp(reference - log_prob) - (reference - log_prob) - 1
    kl = torch.clamp(reference - log_prob, min=-20, max=20)
    return torch.clamp(torch.exp(kl) - kl - 1, min=-10, max=10)


def aggregate(token_loss: torch.Tensor, mask: torch.Tensor, how: str, norm: int) -> torch.Tensor:
    """verl core_algos.agg_loss: token-mean, seq-mean-token-mean, seq-mean-token-sum-norm."""
    if how == "token_mean":
        return (token_loss * mask).sum() / mask.sum()
    sums = (token_loss * mask).sum(dim=-1)
    return (sums / mask.sum(dim=-1)).mean() if how == "sequence_mean" else sums.mean() / norm


SURROGATES = {"clipped": verl_clipped, "gspo": verl_gspo, "cispo": verl_cispo}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_norm"])
@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3", "low_variance"])
@pytest.mark.parametrize("name", SURROGATES)
def test_losses_and_gradients_are_those_of_the_formula(name: str, estimator: Any, aggregation: Any) -> None:
    norm = 32 if aggregation == "sequence_sum_norm" else None
    kl = KlConfig(coefficient=0.3, estimator=estimator) if estimator else KlConfig()
    config = AlgorithmConfig(
        loss=name,
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=DUAL if name == "clipped" else None,
        loss_aggregation=aggregation,
        sequence_norm_tokens=norm,
        kl=kl,
        entropy_coefficient=0.01,
    )
    loss = build_loss(config)
    for seed in range(5):
        log_probs, entropy, inputs = columns(seed)
        found = loss(log_probs, entropy, inputs)[0] / loss.denominator(inputs)
        grads = torch.autograd.grad(found, [log_probs, entropy])
        token_loss = SURROGATES[name](log_probs, inputs) * inputs.token_weights_BT - 0.01 * entropy
        if estimator:
            token_loss = token_loss + 0.3 * verl_kl(log_probs, inputs.reference_log_probs_BT, estimator)
        expected = aggregate(token_loss, inputs.mask_BT, aggregation, norm or 1)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(grads, torch.autograd.grad(expected, [log_probs, entropy]), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", SURROGATES)
def test_micro_batches_add_up_to_the_batch(name: str) -> None:
    for aggregation, norm in (("token_mean", None), ("sequence_mean", None), ("sequence_sum_norm", 32)):
        config = AlgorithmConfig(loss=name, loss_aggregation=aggregation, sequence_norm_tokens=norm)  # type: ignore[arg-type]
        loss = build_loss(config)
        log_probs, entropy, inputs = columns(1)
        whole = loss(log_probs, entropy, inputs)[0] / loss.denominator(inputs)
        parts = [LossInputs(*(getattr(inputs, field)[i : i + 2] for field in vars(inputs))) for i in range(0, B, 2)]
        sums = [loss(log_probs[2 * i : 2 * i + 2], entropy[2 * i : 2 * i + 2], part)[0] for i, part in enumerate(parts)]
        added = torch.stack(sums).sum() / torch.stack([loss.denominator(part) for part in parts]).sum()
        torch.testing.assert_close(added, whole, atol=1e-9, rtol=1e-9)
