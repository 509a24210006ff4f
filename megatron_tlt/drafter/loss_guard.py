"""Says when a drafter's training goes wrong although every number is finite."""

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
"""What each alarm means and what to change."""


class LossGuard:
    """Watches the losses of the drafts that are trained in a row, in nats per token.

    Single drafts may trade places while their mean falls, so trends are those of the mean; one draft alone may explode.

    Args:
        vocab_size: tokens that can be drafted; a loss above its logarithm is above the limit. None sets no limit.
        patience: so many losses in a row above the limit are an alarm if the mean of their second half is not below
            that of the first; so is one draft's above twice the limit. A falling loss may get below the limit: the
            policy may have moved on from a good head. Halves are compared because batches differ by chance.
        window: the mean of so many losses is compared with the lowest such mean of the session.
        growth: the factor that the mean may grow by.
        slack: nats that it may grow by on top.
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
        """Forgets all losses: the drafter is another one, or other ranks train it, that have not seen them."""
        self._above.clear()
        self._session = None

    def check(self, session: int, drafts: Sequence[float]) -> Alarm | None:
        """Takes in a step's loss by draft; returns the alarm that it raises, if any.

        ``session`` numbers what the losses are comparable in: the target of another session may have another entropy.
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
