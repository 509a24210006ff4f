"""The ``evaluation`` section of a launch config."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from megatron_tlt.config.section import Fraction, NonNegativeInt, PositiveInt, Section
from megatron_tlt.config.task import TaskConfig


class EvaluationSettings(Section):
    """One greedy response and ``samples`` sampled responses for each of ``problems`` problems.

    ``top_p`` and ``top_k`` of the sampled responses default to those of ``rollout.sampling``.
    """

    problems: PositiveInt = 200
    samples: PositiveInt = 4
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Fraction | None = None
    top_k: int | None = Field(default=None, ge=-1)
    greedy: bool = True


class EvaluationSetConfig(EvaluationSettings):
    """A data set of its own to evaluate on. All rows of a task of kind ``file`` belong to it."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    tasks: Annotated[list[TaskConfig], Field(min_length=1)]


class EvaluationConfig(EvaluationSettings):
    """Evaluation on the held-out problems of ``tasks``, and on further data sets with sampling of their own."""

    every: NonNegativeInt = 0
    sets: list[EvaluationSetConfig] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names_differ(self) -> EvaluationConfig:
        names = [each.name for each in self.sets]
        if len({*names}) < len(names):
            raise ValueError(f"sets have the names {', '.join(names)}; allowed: different names")
        return self
