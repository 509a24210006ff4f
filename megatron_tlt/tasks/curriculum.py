"""A mixture of tasks whose weights follow the policy: tasks of medium difficulty are drawn most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_tlt.config.task import CurriculumConfig
from megatron_tlt.tasks.mixture import ProblemMixture
from megatron_tlt.tasks.seeding import stable_int
from megatron_tlt.tasks.types import Problem


@dataclass
class _Segment:
    """Problems from index ``start`` on, until the weights change.

    ``drawn``: each source's problems before it. ``rates``: each source's pass rate, a moving average; None: unknown.
    """

    start: int = 0
    drawn: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    rates: list[float | None] = field(default_factory=list)


class CurriculumMixture:
    """Problems by index, with weights that change after each step.

    A task's weight is its own times ``floor + (1 - floor) * 4 p (1 - p)``, where p is the moving average of its pass
    rate: the variance of its rewards, from which the policy learns, relative to the largest possible. Unknown p counts
    as 1/2. Within a segment of equal weights ``problem`` is a pure function, and every source's problems are used in
    sequence over all segments.

    Args:
        mixture: its sources and their own weights.
        seed: of the order.
    """

    def __init__(self, mixture: ProblemMixture, settings: CurriculumConfig, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._sources, self._own_weights = mixture.sources, mixture.weights
        self.held_out = mixture.held_out
        count = len(self._sources)
        self._set(_Segment(0, [0] * count, list(self._own_weights), [None] * count))

    def problem(self, index: int) -> Problem:
        """Problem ``index``, which must not be before the current segment."""
        segment = self._segment
        if index < segment.start:
            raise IndexError(
                f"problem index {index}; allowed: {segment.start} and more, where the weights last changed"
            )
        source, within = self._order.locate(index - segment.start)
        return self._sources[source].problem(segment.drawn[source] + within)

    def end_step(self, next_index: int, judged: Iterable[tuple[str, bool]]) -> dict[str, float]:
        """Sets the weights of the problems from ``next_index`` on.

        Args:
            judged: problem (uid) of each response of the step, and whether it is correct.

        Returns:
            Metrics ``curriculum/<task>_weight`` (share of the problems drawn) and ``curriculum/<task>_pass_rate``.
        """
        before, settings = self._segment, self._settings
        drawn, rates = list(before.drawn), list(before.rates)
        for index in range(next_index - before.start):
            drawn[self._order.locate(index)[0]] += 1
        passed: dict[int, list[bool]] = {}
        for uid, is_correct in judged:
            passed.setdefault(self._source_of(uid), []).append(is_correct)
        for source, correct in passed.items():
            now, old = sum(correct) / len(correct), rates[source]
            rates[source] = now if old is None else settings.decay * old + (1 - settings.decay) * now
        weights = [
            own * (settings.floor + (1 - settings.floor) * 4 * p * (1 - p))
            for own, p in zip(self._own_weights, (0.5 if rate is None else rate for rate in rates), strict=True)
        ]
        self._set(_Segment(next_index, drawn, weights, rates))
        metrics = {}
        for each, weight, rate in zip(self._sources, weights, rates, strict=True):
            metrics[f"curriculum/{each.label}_weight"] = weight / sum(weights)
            if rate is not None:
                metrics[f"curriculum/{each.label}_pass_rate"] = rate
        return metrics

    @property
    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as plain data."""
        return asdict(self._segment)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from an earlier :attr:`state`."""
        self._set(_Segment(**state))

    def _set(self, segment: _Segment) -> None:
        self._segment = segment
        seed = stable_int(self._seed, "curriculum", segment.start)
        self._order = ProblemMixture(self._sources, segment.weights, "train", seed)

    def _source_of(self, uid: str) -> int:
        """A label may be the beginning of another, but not with the split's name after it."""
        return next(i for i, source in enumerate(self._sources) if uid.startswith(f"{source.label}/train/"))
