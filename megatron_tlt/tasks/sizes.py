"""Distribution of problem sizes: mostly small, with a long tail."""

from __future__ import annotations

import random
from functools import cached_property
from itertools import accumulate
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Params(BaseModel):
    """Base of the generators' ``params``: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Sizes(Params):
    """A discrete Pareto distribution truncated at ``max``: P(size = s) is proportional to (s / min) ** -tail.

    ``tail`` 0 is uniform; 2 to 3 gives a median near ``min`` and a long tail; large values almost always give ``min``.
    """

    min: Annotated[int, Field(ge=1, le=10_000)]
    max: Annotated[int, Field(ge=1, le=10_000)]
    tail: Annotated[float, Field(ge=0.0, le=20.0)] = 2.0

    @model_validator(mode="after")
    def _ordered(self) -> Sizes:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}; it must be at least min, {self.min}")
        return self

    @cached_property
    def _cumulative(self) -> list[float]:
        return list(accumulate((size / self.min) ** -self.tail for size in range(self.min, self.max + 1)))

    def sample(self, rng: random.Random) -> int:
        """Samples a size, with exactly one draw from ``rng``."""
        return rng.choices(range(self.min, self.max + 1), cum_weights=self._cumulative)[0]
