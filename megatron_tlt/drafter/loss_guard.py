"""Detects diverging drafter training while all numbers are still finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

Alarm = Literal["loss_above_uniform", "loss_grows"]
ALARMS: dict[Alarm, str] = {
    "loss_above_uniform": "the loss stays above that of guessing uniformly: this head does not fit the target, "
    "or the learning rate is too high",
    "loss_grows": "the loss grows on the same data: the learning rate is too high",
}
"""Meaning of each alarm and what to change."""


class LossGuard:
    """Watches the losses of the trained draft depths, in nats per token.

    Trends use the mean over depths, because single depths may trade places while the mean falls. A single depth above
    twice the limit raises an alarm at once.

    Args:
        vocab_size: number of tokens that can be drafted; the limit is its logarithm. None sets no limit.
        patience: alarm after this many consecutive losses above the limit, unless the mean of their second half is
            below that of the first. A falling loss may still get below the limit, for example after the policy has
            changed. Halves are compared because batches vary.
        window: number of losses whose mean is compared with the lowest such mean of the session.
        growth: allowed factor of growth of the mean.
        slack: allowed additional growth in nats.
    """

    def __init__(
        self, vocab_size: int | None, patience: int = 20, window: int = 10, growth: float = 1.5, slack: float = 0.25
    ) -> None:
        self._limit = math.inf if vocab_size is None else math.log(vocab_size)
        self._growth, self._slack = growth, slack
        self._losses: deque[float] = deque(maxlen=window)
        self._lowest = math.inf
        self._above: deque[float] = deque(maxlen=patience)
        self._session: int | None = None

    def reset(self) -> None:
        """Forget all losses: the drafter was replaced, or ranks that have not seen these losses join the training."""
        self._above.clear()
        self._session = None

    def check(self, session: int, drafts: Sequence[float]) -> Alarm | None:
        """Record a step's loss by draft depth; returns the alarm, if any.

        Losses are comparable only within one ``session``: the target of another session may have another entropy.
        """
        if session != self._session:
            self._session, self._lowest = session, math.inf
            self._losses.clear()
        loss = sum(drafts) / len(drafts)
        if max(drafts) > 2 * self._limit:
            return "loss_above_uniform"
        if loss > self._limit:
            self._above.append(loss)
        else:
            self._above.clear()
        if len(self._above) == self._above.maxlen and not self._above_falls():
            return "loss_above_uniform"
        self._losses.append(loss)
        if len(self._losses) == self._losses.maxlen:
            mean = sum(self._losses) / len(self._losses)
            self._lowest = min(self._lowest, mean)
            if mean > self._growth * self._lowest + self._slack:
                return "loss_grows"
        return None

    def _above_falls(self) -> bool:
        losses, half = list(self._above), len(self._above) // 2
        return sum(losses[-half:]) < sum(losses[:half])
