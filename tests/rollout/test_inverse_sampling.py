"""Sampling by inversion and verification of drafts against the distributions that they must have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.rollout.inverse_sampling import Drafts, draft_slots, sample_by_inversion, verify
from megatron_tlt.speculation.uniforms import Use, uniforms
from tests.helpers.statistics import chi_squared_p_value

ROWS = 40_000


def numbers(use: Use, count: int = ROWS) -> torch.Tensor:
    return torch.from_numpy(uniforms(use, np.arange(count, dtype=np.uint64), np.full(count, 9, dtype=np.uint64)))


def distribution(width: int, seed: int, zeros: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(width, generator=generator)
    logits[torch.randperm(width, generator=generator)[:zeros]] = -torch.inf
    return logits.softmax(-1)


@pytest.mark.parametrize(("width", "zeros"), [(7, 0), (512, 200), (1300, 0), (1300, 1250)])
def test_samples_follow_the_weights(width: int, zeros: int) -> None:
    probs = distribution(width, seed=width, zeros=zeros)
    counts = torch.zeros(width, dtype=torch.long)
    for part in numbers(Use.TARGET).split(4000):
        counts += torch.bincount(sample_by_inversion(3.0 * probs.expand(len(part), -1), part), minlength=width)
    exact = probs.double()
    assert chi_squared_p_value(counts, exact / exact.sum()) > 1e-3
    assert not counts[probs == 0].any()


@pytest.mark.parametrize("width", [5, 1024, 1537])
def test_extreme_numbers_give_the_first_and_the_last_token_with_mass(width: int) -> None:
    weights = torch.zeros(2, width)
    weights[:, 2], weights[:, width - 2] = 0.1, 0.7
    extremes = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert sample_by_inversion(weights, extremes).tolist() == [2, width - 2]


def test_a_row_that_is_no_distribution_gives_a_token_of_the_vocabulary() -> None:
    weights = torch.stack([torch.full((700,), torch.nan), torch.zeros(700), torch.ones(700)])
    found = sample_by_inversion(weights, torch.tensor([0.9, 0.9, 0.5], dtype=torch.float64))
    assert ((found >= 0) & (found < 700)).all() and found[2] == 350


def test_a_sample_does_not_depend_on_the_other_rows() -> None:
    weights = torch.stack([distribution(900, seed) for seed in range(50)])
    together = sample_by_inversion(weights, numbers(Use.TARGET, 50))
    alone = [sample_by_inversion(weights[i : i + 1], numbers(Use.TARGET, 50)[i : i + 1]) for i in range(50)]
    assert torch.equal(together, torch.cat(alone))


def given(counts: list[int], tokens: torch.Tensor, q: torch.Tensor | None = None) -> Drafts:
    slots = torch.from_numpy(draft_slots(np.array(counts)))
    return Drafts(tokens, q, torch.tensor(counts), slots)


def verified(p: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor | None, last: int = 0) -> torch.Tensor:
    """Two drafts for each of ROWS requests, tokens (ROWS, 2); logits of p (3, vocabulary)."""
    return verify(
        given([2] * ROWS, tokens.flatten(), None if q is None else q.repeat(ROWS, 1)),
        p[:2].log().repeat(ROWS, 1),
        torch.full((ROWS,), last),
        None,
        torch.stack([numbers(Use.VERIFY), numbers(Use.DRAFT, 2 * ROWS)[ROWS:]], dim=1),
        numbers(Use.REPLACE),
    )


@pytest.mark.parametrize("certain", [True, False])
def test_verified_tokens_follow_the_target(certain: bool) -> None:
    p = torch.stack([distribution(12, 1, zeros=3), distribution(12, 2), distribution(12, 3)])
    q = torch.stack([distribution(12, 4), distribution(12, 5)])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.stack([torch.multinomial(row, ROWS, True, generator=generator) for row in q], dim=1)
    found = verified(p, tokens, None if certain else q)
    assert found.shape == (ROWS, 3) and found.dtype == torch.int32
    exact = p.double() / p.double().sum(-1, keepdim=True)
    assert chi_squared_p_value(torch.bincount(found[:, 0], minlength=12), exact[0]) > 1e-3
    second = found[:, 1][found[:, 1] >= 0]  # only after an accepted draft, whose token is independent of it
    assert 0.05 * ROWS < len(second) < 0.9 * ROWS
    assert chi_squared_p_value(torch.bincount(second, minlength=12), exact[1]) > 1e-3
    assert torch.equal(found[:, 0] == tokens[:, 0], found[:, 1] >= 0)
    assert torch.equal((found[:, :2] == tokens).all(1), found[:, 2] == 0)


@pytest.mark.parametrize("certain", [True, False])
def test_padding_is_replaced_by_a_sample_of_the_target(certain: bool) -> None:
    p, q = distribution(12, 1), torch.eye(12)[:1]  # what stands for the distribution of padding
    tokens = torch.full((ROWS, 2), -1)
    found = verified(p.expand(3, -1), tokens, None if certain else q.expand(2, -1))
    exact = p.double() / p.double().sum()
    assert chi_squared_p_value(torch.bincount(found[:, 0], minlength=12), exact) > 1e-3
    assert (found[:, 1:] == -1).all()


def test_equal_distributions_that_round_apart_still_give_a_token_of_the_target() -> None:
    p = distribution(12, 1, zeros=9)
    q = (p * (1 + 1e-6))[None]
    token = p.argmax()[None]
    one = torch.ones(1, dtype=torch.float64)
    found = verify(given([1], token, q), p.log()[None], token, None, one[None] * (1 - 1e-9), one / 2)
    assert found[0, 0] != -1 and p[found[0, 0]] > 0 and found[0, 1] == -1


def test_greedy_requests_get_the_most_likely_tokens() -> None:
    p = torch.stack([distribution(12, seed) for seed in range(6)])
    best = p.argmax(-1)
    tokens = best.clone()
    tokens[1] = (best[1] + 1) % 12  # the first request: right, wrong; the second: right, right, right, right
    high, half = torch.full((2, 4), 0.999, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    high[0, 2:] = torch.inf
    last, greedy = torch.tensor([7, 8]), torch.tensor([True, True])
    found = verify(given([2, 4], tokens), p.log(), last, greedy, high, half)
    assert found.tolist() == [[best[0], best[1], -1, -1, -1], [*best[2:].tolist(), 8]]


class _Count(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_depend_on_the_batch() -> None:
    counts = set()
    for requests in (1, 64):
        drafts = given([3] * requests, torch.zeros(3 * requests, dtype=torch.long))
        chances = numbers(Use.VERIFY, 3 * requests)
        with _Count() as counter:
            verify(
                drafts,
                torch.zeros(3 * requests, 12),
                torch.zeros(requests, dtype=torch.long),
                torch.zeros(requests, dtype=torch.bool),
                chances.view(requests, 3),
                chances[:requests],
            )
        counts.add(counter.count)
    assert len(counts) == 1
