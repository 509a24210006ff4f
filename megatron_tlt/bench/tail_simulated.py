"""What the simulation says about the arms of `tlt bench tail`, given the engine steps that the benchmark measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_tlt.bench.recorded_lengths import lengths_of_problems
from megatron_tlt.config.schedule import ScheduleConfig
from megatron_tlt.config.tail import TailConfig
from megatron_tlt.planning.devices import DEFAULT_DEVICE, device
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.planning.simulation.constants import shipped
from megatron_tlt.planning.simulation.engine import EngineModel
from megatron_tlt.planning.simulation.lengths import LongTail
from megatron_tlt.planning.simulation.policies import Prompts
from megatron_tlt.planning.simulation.rollout import Limits, Speculation
from megatron_tlt.planning.simulation.rounds import RacingRounds, RoundKind
from megatron_tlt.planning.simulation.scenario import Scenario

Array = NDArray[np.float64]
_STEPS = 100


class MeasuredEngine(EngineModel):
    """An engine whose steps take ``fixed_s``, ``request_s`` per request of their batch and ``token_s`` per prompt's."""

    def __init__(self, fixed_s: float, request_s: float, token_s: float) -> None:
        self.fixed_s, self.request_s, self.token_s = fixed_s, request_s, token_s

    @classmethod
    def fitted(cls, steps: Sequence[Mapping[str, float]], prompt_tokens: float) -> MeasuredEngine:
        """From measured steps: the line through those without prompts, and what those with prompts took beyond it.

        Args:
            steps: rows with ``batch``, ``ms_per_step``, how many ``steps``, and whether they have prompts, ``prefill``.
            prompt_tokens: of all their prompts.
        """
        names = ("batch", "ms_per_step", "steps", "prefill")
        batch, ms, count, prefill = (np.array([row[name] for row in steps], float) for name in names)
        plain = prefill == 0
        request_ms, fixed_ms = np.polyfit(batch[plain], ms[plain], 1, w=np.sqrt(count[plain]))
        beyond = float((count * (ms - fixed_ms - request_ms * batch))[~plain].sum())
        return cls(max(0.0, fixed_ms) / 1e3, request_ms / 1e3, max(0.0, beyond) / 1e3 / prompt_tokens)

    def plain(self, batch: ArrayLike, context: ArrayLike) -> Array:
        return self.fixed_s + self.request_s * np.asarray(batch, dtype=np.float64)

    def prefill(self, tokens: ArrayLike) -> Array:
        return self.token_s * np.asarray(tokens, dtype=np.float64)


@dataclass(frozen=True)
class MeasuredScenario(Scenario):
    """A scenario with an engine that was measured, and room for every request."""

    measured: MeasuredEngine = MeasuredEngine(0.0, 1.0, 0.0)  # noqa: RUF009 - given by every caller

    def engine(self) -> EngineModel:
        return self.measured

    def limits(self) -> Limits:
        return Limits(self.max_seqs, np.inf)


class RecordedRounds(RacingRounds):
    """Rounds at the lengths of recorded problems."""

    problems: Sequence[Sequence[int]] = ()

    def _draw(self, samples: int, common: float | None) -> tuple[float, Array]:
        at = int(self.rng.integers(len(self.problems))) if common is None else int(common)
        return float(at), self.rng.choice(np.array(self.problems[at], dtype=np.float64), samples)


def simulated_seconds(
    engine: MeasuredEngine,
    given: Mapping[str, Any],
    engines: int,
    max_seqs: int,
    prompt_tokens: float,
    tail: Mapping[str, Any] | None,
    schedule: Mapping[str, Any] | None,
) -> float:
    """Seconds of a rollout, the mean of a hundred steps.

    Args:
        engine: of one rank.
        given: ``prompts``, ``group``, ``longest``, ``law`` and ``seed`` of the benchmark.
        engines: their number.
        max_seqs: requests of an engine at a time.
        prompt_tokens: of a prompt.
        tail: the section of that name; None as ``schedule`` too: a step waits for all that it began.
        schedule: the section of that name.
    """
    settings = TailConfig(**tail) if tail is not None else TailConfig(eta_prompts=1.0)
    kind: RoundKind = "continue" if settings.deferred == "continue" else "tail"
    if schedule is not None:
        kind = schedule["kind"]
    scenario = MeasuredScenario(
        model=ModelSize(1, 1, 1, 1, 1, 1, 1),
        device=device(DEFAULT_DEVICE),
        constants=shipped(),
        lengths=LongTail(1.0, 1.0),
        devices=engines,
        per_node=engines,
        engine_devices=1,
        prompts=given["prompts"],
        group=given["group"],
        prompt_tokens=prompt_tokens,
        max_response_tokens=1 << 20,
        memory_fraction=1.0,
        max_seqs=max_seqs,
        arms=(),
        tail=settings,
        schedule=None if schedule is None else ScheduleConfig(**schedule),
        measured=engine,
    )
    prompts = Prompts(scenario, np.random.default_rng(given["seed"]), kind)
    prompts.racing = RecordedRounds(scenario, kind, prompts.rng)
    prompts.racing.problems = lengths_of_problems(given["longest"], given["law"])
    return float(np.mean([prompts.round(Speculation()).seconds for _ in range(_STEPS)]))
