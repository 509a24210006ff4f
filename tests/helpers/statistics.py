"""Tests of a sample against an exact distribution."""

from __future__ import annotations

import torch


def chi_squared_p_value(counts: torch.Tensor, probabilities: torch.Tensor, smallest_expected: float = 5.0) -> float:
    """Pearson's goodness of fit: the probability of a misfit this large if ``probabilities`` are the truth.

    ``counts`` and ``probabilities`` have the same shape. Cells that expect fewer than ``smallest_expected`` are pooled
    into one. A count where the probability is zero gives 0.0.
    """
    observed, exact = counts.flatten().double(), probabilities.flatten().double()
    assert observed.shape == exact.shape and abs(float(exact.sum()) - 1.0) < 1e-6
    if bool((observed[exact == 0] > 0).any()):
        return 0.0
    expected = exact * observed.sum()
    large = expected >= smallest_expected
    observed_cells, expected_cells = observed[large], expected[large]
    rest_expected = expected[~large].sum()
    if float(rest_expected) > 0:
        observed_cells = torch.cat([observed_cells, observed[~large].sum()[None]])
        expected_cells = torch.cat([expected_cells, rest_expected[None]])
    degrees = len(expected_cells) - 1
    assert degrees >= 5, f"only {degrees} degrees of freedom: the test would say nothing"
    statistic = ((observed_cells - expected_cells) ** 2 / expected_cells).sum()
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), statistic / 2))


def total_variation(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Half the L1 distance of the sample's frequencies from ``probabilities``, and the most that chance explains.

    The bound is the distance's mean for such a sample from ``probabilities`` (of half-normal cells, from above), and
    six times the most that its standard deviation can be: 1/2 of the square root of 1/samples (McDiarmid).
    """
    observed, exact = counts.flatten().double(), probabilities.flatten().double()
    samples = float(observed.sum())
    distance = float((observed / samples - exact).abs().sum()) / 2
    mean = float((exact * (1 - exact) / samples).sqrt().sum()) / 2 * (2 / torch.pi) ** 0.5
    return distance, mean + 3 / samples**0.5
