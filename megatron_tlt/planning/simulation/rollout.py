"""Simulates a rollout of many engines from event to event.

Between two events (a response ends, is admitted or preempted, the gate opens) an engine's batch does not change, so the
time to the next event has a closed form. All engines take their next events together, as rows of arrays: the cost is
one pass over the requests per event of the engine with the most events.

Suffixes: E engines, R requests of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_tlt.planning.simulation.acceptance import OFF, DraftShape
from megatron_tlt.planning.simulation.engine import EngineModel

Array = NDArray[np.float64]
_GRID = 2048.0
"""Tokens after which an engine's context is updated even without an event."""
_WATERMARK = 0.99
"""Fraction of the KV cache up to which requests are admitted, as in vLLM."""
_TINY = 1e-6
"""Of a token."""


@dataclass(frozen=True)
class Limits:
    """Capacity of an engine: requests, and tokens in its KV cache."""

    max_seqs: int
    kv_tokens: float


@dataclass(frozen=True)
class Speculation:
    """Strategies of an engine, and their gain.

    The gate is ``speculation.gate.ElasticGate``, for consecutive engine steps with one batch. While it is open, the
    strategy with the most tokens per second is used, to which a tuner converges, minus ``explore_cost`` of the time.
    """

    arms: tuple[DraftShape, ...] = (OFF,)
    tokens: tuple[float, ...] = (1.0,)
    """Tokens per request and round, for each arm."""
    threshold: float = float("inf")
    patience: int = 1
    hysteresis: int = 0
    explore_cost: float = 0.0

    def choose(self, engine: EngineModel, batch: Array, context: Array) -> NDArray[np.intp]:
        """Index of each engine's arm; the first among equals."""
        rates = [gain / engine.round(batch, context, arm) for arm, gain in zip(self.arms, self.tokens, strict=True)]
        return np.argmax(rates, axis=0)


@dataclass
class Rollout:
    """Results; seconds since the start of the rollout."""

    ends_E: Array
    """Time at which each engine had no requests left; 0 if it never had any."""
    finished_ER: Array
    """Time at which each response ended; NaN if there was none."""
    decoded_E: Array
    """Tokens."""
    rounds_E: Array
    """Engine steps."""
    seconds: dict[str, float]
    """Seconds of all engines together, by strategy, and under "prefill"."""
    preemptions: int
    running: list[list[tuple[float, int]]] = field(default_factory=list)
    """For each watched engine: (start time, number of requests)."""

    @property
    def seconds_in_all(self) -> float:
        return float(self.ends_E.max(initial=0.0))


class _State:
    """The engines that still decode; ``p`` is the number of requests admitted, in order."""

    def __init__(self, lengths_ER: Array, left_ER: Array, prompt: float) -> None:
        self.row = np.arange(len(lengths_ER))
        self.column = np.broadcast_to(np.arange(lengths_ER.shape[1]), lengths_ER.shape).copy()
        self.length, self.left = lengths_ER.astype(np.float64), left_ER.astype(np.float64)
        self.prompt = prompt
        count = len(lengths_ER)
        self.p, self.time, self.context = np.zeros(count, np.intp), np.zeros(count), np.zeros(count)
        self.is_open, self.calm = np.zeros(count, bool), np.zeros(count)

    def keep(self, rows: Any) -> None:
        """Keeps the engines for which ``rows`` is True."""
        for name in ("row", "column", "length", "left", "p", "time", "context", "is_open", "calm"):
            setattr(self, name, getattr(self, name)[rows])

    def running(self, least: float) -> NDArray[np.bool_]:
        """Requests that decode and have more than ``least`` tokens left."""
        alive = self.left > least
        width = alive.shape[1]
        return alive if (self.p >= width).all() else alive & (np.arange(width) < self.p[:, None])

    def compact(self) -> None:
        """Drops unused columns once they are a third."""
        alive = self.left > 0
        most = int(alive.sum(axis=1).max(initial=0))
        if not most or most > 0.67 * alive.shape[1]:
            return
        before = np.arange(alive.shape[1]) < self.p[:, None]
        self.p = (alive & before).sum(axis=1)
        order = np.argsort(~alive, axis=1, kind="stable")[:, :most]
        for name in ("column", "length", "left"):
            setattr(self, name, np.take_along_axis(getattr(self, name), order, axis=1))


def simulate_rollout(
    engine: EngineModel,
    lengths_ER: Array,
    prompt: float,
    limits: Limits,
    speculation: Speculation,
    watched: Sequence[int] = (),
    left_ER: Array | None = None,
) -> Rollout:
    """Decodes every response to its end; raises ValueError if one does not fit into an engine's KV cache.

    ``lengths_ER``: tokens of each response, in the order of its engine's queue; 0 for none. ``prompt``: tokens of a
    prompt. ``watched``: engines whose running requests are recorded. ``left_ER``: those of the tokens that are still to
    be decoded, after the others are computed again with the prompt; None: all.
    """
    longest = prompt + float(lengths_ER.max(initial=0.0))
    if longest > _WATERMARK * limits.kv_tokens:
        raise ValueError(
            f"a response of {longest:.0f} tokens does not fit into a KV cache of {limits.kv_tokens:.0f} tokens"
        )
    rollout = Rollout(
        np.zeros(len(lengths_ER)),
        np.full(lengths_ER.shape, np.nan),
        np.zeros(len(lengths_ER)),
        np.zeros(len(lengths_ER)),
        {},
        0,
        [[] for _ in watched],
    )
    state = _State(lengths_ER, lengths_ER if left_ER is None else left_ER, prompt)
    state.keep(np.any(state.left > 0, axis=1))
    places = {row: place for place, row in enumerate(watched)}
    while len(state.row):
        _admit(engine, state, limits, rollout)
        running = state.running(0.0)
        batch = running.sum(axis=1).astype(np.float64)
        if places:
            for at in np.flatnonzero(np.isin(state.row, watched)):
                rollout.running[places[int(state.row[at])]].append((float(state.time[at]), int(batch[at])))
        _decode(engine, state, limits, speculation, rollout, running, batch)
        rollout.preemptions += _preempt(state, limits, batch)
        ended = (state.left <= _TINY) & running
        if ended.any():
            at, place = np.nonzero(ended)
            rollout.finished_ER[state.row[at], state.column[at, place]] = state.time[at]
            gone = state.length[at, place] + state.prompt
            state.context -= np.bincount(at, weights=gone, minlength=len(state.row))
            state.left[ended] = 0.0
            alive = np.any(state.left > 0, axis=1)
            if not alive.all():
                rollout.ends_E[state.row[~alive]] = state.time[~alive]
                for at in np.flatnonzero(~alive):
                    if int(state.row[at]) in places:
                        rollout.running[places[int(state.row[at])]].append((float(state.time[at]), 0))
                state.keep(alive)
            state.compact()
    return rollout


def _admit(engine: EngineModel, state: _State, limits: Limits, rollout: Rollout) -> None:
    """Admits requests in order while there is room; a preempted request is computed again."""
    width = state.left.shape[1]
    if (state.p >= width).all():
        return
    computed = np.zeros(len(state.row))
    running = state.running(0.0).sum(axis=1)
    while True:  # skips responses that have already ended
        waits = state.p < width
        at = np.minimum(state.p, width - 1)
        rows = np.arange(len(at))
        is_over = waits & (state.left[rows, at] <= 0)
        tokens = state.prompt + state.length[rows, at] - state.left[rows, at]
        fits = state.context + tokens + running + 1 <= _WATERMARK * limits.kv_tokens
        comes = waits & ~is_over & (running < limits.max_seqs) & (fits | (running == 0))
        if not (comes | is_over).any():
            break
        state.context += np.where(comes, tokens, 0.0)
        computed += np.where(comes, tokens, 0.0)
        running = running + comes
        state.p += comes | is_over
    seconds = engine.prefill(computed)
    state.time += seconds
    rollout.seconds["prefill"] = rollout.seconds.get("prefill", 0.0) + float(seconds.sum())


def _decode(
    engine: EngineModel,
    state: _State,
    limits: Limits,
    speculation: Speculation,
    rollout: Rollout,
    running: NDArray[np.bool_],
    batch: Array,
) -> None:
    """Decodes up to each engine's next event."""
    tokens = np.minimum(np.where(running, state.left, np.inf).min(axis=1), _GRID)
    room = np.maximum(1.0, np.floor((limits.kv_tokens - state.context) / batch))
    tokens = np.minimum(tokens, np.where(batch > 1, room, np.inf))
    is_small = batch <= speculation.threshold
    state.is_open &= batch <= speculation.threshold + speculation.hysteresis
    # number of steps until the gate opens; it is open in the last of them
    wanted = np.where(is_small, speculation.patience - state.calm, np.inf)
    state.is_open |= wanted <= 1.0 + _TINY
    shut = ~state.is_open
    tokens = np.where(shut & is_small, np.minimum(tokens, np.maximum(wanted - 1.0, 0.0)), tokens)
    middle = state.context + batch * tokens / 2
    arm = speculation.choose(engine, batch, middle)
    seconds, gains = engine.plain(batch, middle), np.ones(len(batch))
    names = np.full(len(batch), -1)
    for index, (draft, gain) in enumerate(zip(speculation.arms, speculation.tokens, strict=True)):
        own = state.is_open & (arm == index)
        if own.any():
            seconds[own] = engine.round(batch[own], middle[own], draft) / (1.0 - speculation.explore_cost)
            gains[own], names[own] = gain, index
    rounds = tokens / gains
    state.calm = np.where(is_small, np.minimum(state.calm + rounds, speculation.patience), 0.0)
    state.time += rounds * seconds
    state.context += batch * tokens
    np.subtract(state.left, tokens[:, None], out=state.left, where=running)
    rollout.rounds_E[state.row] += rounds
    rollout.decoded_E[state.row] += batch * tokens
    for index in np.unique(names):
        name = speculation.arms[index].name if index >= 0 else OFF.name
        spent = float((rounds * seconds)[names == index].sum())
        rollout.seconds[name] = rollout.seconds.get(name, 0.0) + spent


def _preempt(state: _State, limits: Limits, batch: Array) -> int:
    """If the cache has no room for a token of each request, returns the last admitted request to the queue's head."""
    count = 0
    while (state.context + batch > limits.kv_tokens).any():
        running = state.running(_TINY)
        batch = running.sum(axis=1).astype(np.float64)
        # responses that have just ended free their memory first
        ending = ((state.left > 0) & (state.left <= _TINY)).any(axis=1)
        rows = np.flatnonzero((state.context + batch > limits.kv_tokens) & (batch > 1) & ~ending)
        if not len(rows):
            break
        at = running.shape[1] - 1 - np.argmax(running[rows, ::-1], axis=1)
        state.context[rows] -= state.prompt + state.length[rows, at] - state.left[rows, at]
        state.p[rows] = at
        count += len(rows)
    return count
