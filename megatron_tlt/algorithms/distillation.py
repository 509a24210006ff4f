"""On-policy distillation: the policy's own responses, judged token by token by a teacher."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.algorithms.algorithm import Algorithm


class Distillation(Algorithm):
    """No credit from rewards, so that the KL penalty to ``kl.reference``, the teacher, is all of the loss.

    With the estimator k2 its gradient is the expectation of (log p - log p_teacher) grad log p over the policy's
    tokens: the gradient of the reverse KL of each token given the ones before (GKD 2306.13649, with on-policy data
    alone; Schulman, "Approximating KL divergence", for k2). Rewards are still measured.
    """

    per_problem = True

    def advantages(self, rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        return [0.0] * len(rewards)
