"""Held-out accuracy from counts of correct samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of ``k`` samples is right (Chen et al. 2107.03374, eq. 1).

    Raises:
        ValueError: ``k`` is not between 1 and ``samples``.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} of {samples} samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on held-out problems: mean over problems of pass@1 and pass@k over samples, and of greedy decoding."""

    pass_at_1: float
    pass_at_k: float
    greedy: float | None
    problems: int
    samples: int

    @staticmethod
    def from_counts(correct: Sequence[int], samples: int, greedy: Sequence[bool] | None) -> Evaluation:
        """``correct[i]`` of ``samples`` samples of problem i were right; ``greedy[i]`` is its greedy response."""
        count = len(correct)
        return Evaluation(
            pass_at_1=sum(pass_at_k(samples, c, 1) for c in correct) / count,
            pass_at_k=sum(pass_at_k(samples, c, samples) for c in correct) / count,
            greedy=None if greedy is None else sum(greedy) / count,
            problems=count,
            samples=samples,
        )
