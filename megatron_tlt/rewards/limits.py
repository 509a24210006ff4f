"""How long a verdict may take."""

from __future__ import annotations

from collections import OrderedDict

from megatron_tlt.config.reward import LEAST_ADAPTIVE_S

_FACTOR = 1.5
"""RollPacker (Gao et al. 2025, arXiv:2509.21009), section 4.3."""
_MOST_PROBLEMS = 1 << 16


class AdaptiveLimits:
    """Seconds for a verdict on a response to a problem, from the verdicts on correct ones; pure.

    A program that is right takes about as long as the right ones before it. So once a problem has a correct response,
    others have 1.5 times the slowest correct verdict, at least 2 s and at most ``timeout_s``. Without one the limit is
    ``timeout_s``. The least recently judged of very many problems are forgotten.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slowest: OrderedDict[str, float] = OrderedDict()

    def limit(self, uid: str) -> float:
        """For the next response to the problem."""
        slowest = self._slowest.get(uid)
        return self._timeout_s if slowest is None else min(max(LEAST_ADAPTIVE_S, _FACTOR * slowest), self._timeout_s)

    def judged_correct(self, uid: str, seconds: float) -> None:
        """Accounts for a verdict on a correct response."""
        self._slowest[uid] = max(seconds, self._slowest.pop(uid, 0.0))
        if len(self._slowest) > _MOST_PROBLEMS:
            self._slowest.popitem(last=False)
