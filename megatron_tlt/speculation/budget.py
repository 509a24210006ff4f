"""Length-aware draft budgets in closed form, and the fits of their inputs (DAS, length-aware budget).

Units: lengths and budgets are tokens, N is target forward passes, costs are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# search range for alpha in the fit of an acceptance curve
_LOWEST_ALPHA, _HIGHEST_ALPHA = 1e-2, 1e2
_LOWEST_SHARE = 1e-3
# minimum cost relative to the step's own time
_LEAST_COST = 1e-6
# Huber's usual constant: 95 % efficiency for normally distributed errors
_HUBER = 1.345


@dataclass(frozen=True)
class AcceptanceCurve:
    """Accepted tokens of a response of ``l`` tokens for ``p`` drafted ones: ``A(p) = k l (1 - exp(-alpha p / l))``.

    ``k`` is the maximum share of a response that drafts can cover; ``alpha k`` is the initial acceptance rate.
    """

    alpha: float
    k: float

    def __post_init__(self) -> None:
        """Validate the parameters.

        Raises:
            ValueError: ``alpha`` is not positive, or ``k`` is not in (0, 1].
        """
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ValueError(f"alpha is {self.alpha}; allowed: above 0")
        if not 0 < self.k <= 1:
            raise ValueError(f"k is {self.k}; allowed: above 0, at most 1")

    def accepted(self, budget: float, length: float) -> float:
        """A(p)."""
        return -self.k * length * math.expm1(-self.alpha * budget / length)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a decode step: ``base`` per step and ``token`` per token that it computes."""

    base: float
    token: float

    def __post_init__(self) -> None:
        """Reject costs that would make drafts free or forbid all drafts.

        Raises:
            ValueError: a cost is not positive and finite.
        """
        if not all(cost > 0 and math.isfinite(cost) for cost in (self.base, self.token)):
            raise ValueError(f"costs are {self.base} per step and {self.token} per token; allowed: above 0")


@dataclass(frozen=True)
class Budgets:
    """The optimum: the total ``tokens`` to draft for each response, and the resulting number of ``passes`` N."""

    passes: float
    tokens: tuple[float, ...]

    def per_round(self, max_tokens: int) -> list[int]:
        """Drafts per pass, about p / N [reconstruction], rounded, in [0, ``max_tokens``]."""
        if not self.tokens:
            return []
        return [min(max_tokens, round(tokens / self.passes)) for tokens in self.tokens]


def optimal_budgets(lengths: Sequence[float], curves: Sequence[AcceptanceCurve], costs: StepCosts) -> Budgets:
    """Minimise ``base N + token sum(p_i)`` where response i needs ``l_i - A_i(p_i) <= N`` passes.

    With ``N`` passes response i needs ``p_i = -(l_i / alpha_i) ln(1 - (1 - N / l_i) / k_i)`` if ``l_i > N``, else 0;
    ``N > max l_i (1 - k_i)``. The derivative, ``base - token sum over l_i > N of 1 / (alpha_i (k_i - 1 + N / l_i))``,
    grows with N, so N is bisected; it jumps where N passes a length, and the optimum may lie there.

    Raises:
        ValueError: a length is not positive, or the number of curves differs.
    """
    if len(curves) != len(lengths):
        raise ValueError(f"{len(curves)} curves for {len(lengths)} lengths; allowed: one each")
    if not all(length > 0 and math.isfinite(length) for length in lengths):
        raise ValueError(f"the lengths hold {min(lengths)}; allowed: above 0")
    if not lengths:
        return Budgets(0.0, ())
    # N is searched as an excess over its lower bound, where the arguments of the logarithm cancel exactly
    lower = max(length * (1.0 - curve.k) for length, curve in zip(lengths, curves, strict=True))
    margins = [lower / length - (1.0 - curve.k) for length, curve in zip(lengths, curves, strict=True)]

    def slope(excess: float) -> float:
        saved = sum(
            1.0 / (curve.alpha * (max(margin, 0.0) + excess / length))
            for length, curve, margin in zip(lengths, curves, margins, strict=True)
            if length > lower + excess
        )
        return costs.base - costs.token * saved

    low, high = 0.0, max(lengths) - lower
    while high - low > 1e-12 * high + 1e-300:
        middle = (low + high) / 2
        if slope(middle) < 0:
            low = middle
        else:
            high = middle
    passes = lower + high
    tokens = tuple(
        0.0 if length <= passes else -length / curve.alpha * math.log((max(margin, 0.0) + high / length) / curve.k)
        for length, curve, margin in zip(lengths, curves, margins, strict=True)
    )
    return Budgets(passes, tuple(max(0.0, number) for number in tokens))


def _huber_weights(errors: np.ndarray) -> np.ndarray:
    """Weights of 1 for usual errors, decreasing for outliers; the scale is the median absolute error."""
    scale = 1.4826 * float(np.median(np.abs(errors)))
    if scale <= 0:
        return np.ones_like(errors)
    return np.minimum(1.0, _HUBER * scale / np.maximum(np.abs(errors), 1e-300))


def fit_step_costs(num_tokens: Sequence[float], seconds: Sequence[float]) -> StepCosts | None:
    """Least squares of ``seconds = base + token num_tokens`` over steps, outliers weighted down (Huber).

    ``base`` includes all costs that do not depend on tokens (``c_base`` and ``C`` of DAS). A cost fitted as zero is
    replaced by a millionth of the median step. None if all steps have the same number of tokens.

    Raises:
        ValueError: the numbers of entries differ.
    """
    if len(num_tokens) != len(seconds):
        raise ValueError(f"{len(num_tokens)} numbers of tokens and {len(seconds)} times; allowed: as many of each")
    x, y = np.asarray(num_tokens, float), np.asarray(seconds, float)
    if len(np.unique(x)) < 2:
        return None
    design = np.stack([np.ones_like(x), x], axis=1)
    weights = np.ones_like(y)
    for _ in range(20):
        root = np.sqrt(weights)
        (base, token), *_ = np.linalg.lstsq(design * root[:, None], y * root, rcond=None)
        weights = _huber_weights(y - design @ (base, token))
    least = _LEAST_COST * float(np.median(y))
    return StepCosts(max(float(base), least), max(float(token), least)) if least > 0 else None


def fit_acceptance(
    lengths: Sequence[float], drafted: Sequence[float], accepted: Sequence[float]
) -> AcceptanceCurve | None:
    """Least squares of ``A / l = k (1 - exp(-alpha p / l))`` over finished responses, outliers weighted down (Huber).

    For a given alpha the best k is linear; alpha is searched on a grid and then refined. No draft counts twice, so
    ``alpha k <= 1``. None if no response had drafts. Responses with similar or small ``p / l`` determine little more
    than the product ``alpha k``, so that many curves fit.

    Raises:
        ValueError: the numbers of entries differ.
    """
    if not len(lengths) == len(drafted) == len(accepted):
        raise ValueError(f"{len(lengths)} lengths, {len(drafted)} drafted, {len(accepted)} accepted; allowed: as many")
    rows = [(a / n, p / n) for n, p, a in zip(lengths, drafted, accepted, strict=True) if n > 0 and p > 0]
    if not rows:
        return None
    y, x = np.asarray(rows, float).T
    weights = np.ones_like(y)

    def k_of(alpha: float) -> float:
        covered = -np.expm1(-alpha * x)
        best = float((weights * y * covered).sum() / (weights * covered**2).sum())
        return min(max(best, _LOWEST_SHARE), 1.0, 1.0 / alpha)

    def errors_of(alpha: float) -> np.ndarray:
        return y + k_of(alpha) * np.expm1(-alpha * x)

    def loss(alpha: float) -> float:
        return float((weights * errors_of(alpha) ** 2).sum())

    alpha = 1.0
    for _ in range(6):
        grid = np.geomspace(_LOWEST_ALPHA, _HIGHEST_ALPHA, 81)
        best = int(np.argmin([loss(float(value)) for value in grid]))
        alpha = _golden(loss, float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)]))
        weights = _huber_weights(errors_of(alpha))
    return AcceptanceCurve(alpha, k_of(alpha))


def _golden(function: Callable[[float], float], low: float, high: float) -> float:
    """Minimum of a function with one minimum in [low, high], by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        width = ratio * (high - low)
        if function(high - width) < function(low + width):
            high = low + width
        else:
            low = high - width
    return (low + high) / 2
