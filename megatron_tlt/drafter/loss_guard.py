"""Says when a drafter's training goes wrong although every number is finite."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

Alarm = Literal["loss_above_uniform", "loss_grows"]
ALARMS: dict[Alarm, str] = {
    "loss_above_uniform": "the loss stays above that of guessing uniformly: this head does not fit the target, "
    "or the learning rate is too high",
    "loss_grows": "the loss grows on the same data: the learning rate is too high",
}
"""What each alarm means and what to change."""


class LossGuard:
    """Watches the loss of the worst draft of those trained in a row, in nats per token.

    Args:
        vocab_size: tokens that can be drafted; a loss above its logarithm is above the limit. None sets no limit.
        patience: so many losses that stay above the limit without a new lowest are an alarm, or one above twice the
            limit. One that falls from there may get below: the policy may have moved on from a good head.
        window: the mean of so many losses is compared with the lowest such mean of the session.
        growth: the factor that the mean may grow by.
        slack: nats that it may grow by on top.
    """

    def __init__(
        self, vocab_size: int | None, patience: int = 3, window: int = 10, growth: float = 1.5, slack: float = 0.25
    ) -> None:
        self._limit = math.inf if vocab_size is None else math.log(vocab_size)
        self._patience, self._growth, self._slack = patience, growth, slack
        self._losses: deque[float] = deque(maxlen=window)
        self._lowest = math.inf
        self._above, self._least_above = 0, math.inf
        self._session: int | None = None

    def reset(self) -> None:
        """Forgets all losses: the drafter is another one, or other ranks train it, that have not seen them."""
        self._above, self._least_above = 0, math.inf
        self._session = None

    def check(self, session: int, loss: float) -> Alarm | None:
        """Takes in a step's loss; returns the alarm that it raises, if any.

        ``session`` numbers what the losses are comparable in: the target of another session may have another entropy.
        """
        if session != self._session:
            self._session, self._lowest = session, math.inf
            self._losses.clear()
        if loss <= self._limit:
            self._above, self._least_above = 0, math.inf
        elif loss < self._least_above:
            self._above, self._least_above = 0, loss
        else:
            self._above += 1
        if self._above >= self._patience or loss > 2 * self._limit:
            return "loss_above_uniform"
        self._losses.append(loss)
        if len(self._losses) == self._losses.maxlen:
            mean = sum(self._losses) / len(self._losses)
            self._lowest = min(self._lowest, mean)
            if mean > self._growth * self._lowest + self._slack:
                return "loss_grows"
        return None
