"""Estimates the time of an engine step by strategy and batch, from few and noisy steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_tlt.speculation.strategy import MODEL_FREE, OFF, Strategy

_RIDGE = 0.03
"""Variance of a measured cell's relative error, fit included: the prior's weight relative to cells."""
_NEAR = 0.5
"""Width, in doublings of the batch, within which measured cells inform others of their strategy."""
_NEAR_DRAFTS = 1.0
"""The same width in draft tokens of the mean draft budget."""
_FAR = 1e-3
"""Weight in steps below which a cell is ignored, because choosing takes time in every step."""
_PATIENCE = 32
"""Observations between two fits, unless a strategy is seen for the first time, or early on a new batch."""
_EARLY = 16
"""Number of cells up to which each new one triggers a fit; later ones are only corrected until the next fit."""
_FLOOR = 0.25
"""Minimum share of its prior that a cost keeps: a few noisy steps must not make drafting or verifying free."""
_UNSEEN = 0.3
"""Relative uncertainty without observations nearby."""
_TRUST = 2.0
"""Weight of the fit, in steps, relative to a strategy's own measurements nearby."""
_SUPPRESSED = 0.9
"""Fraction of the estimated machine slowdown that is removed from the step times that estimated it."""
_SURE_SHARE = 0.5
"""Expected share of the drafts that a bounded strategy makes, until its own steps are measured."""
_KNOWN = 8.0
"""Minimum number of nearby steps of a strategy before its times help to estimate the machine slowdown."""


@dataclass
class _Cell:
    """The latest step times of a strategy at a batch and mean draft budget, and their log median relative to the fit.

    ``drafts``: the mean draft budget of a request in these steps.
    """

    strategy: Strategy
    batch: int
    seconds: list[float]
    drafts: float
    median: float = 0.0
    residual: float = 0.0


class StepTimes:
    """Seconds of a step under any strategy at any batch.

    t(s, b) = w_0 + w_1 b + w_2 b d + (source's own) (w_3 + w_4 K), all w above 0. The terms are the step, its requests,
    the verified drafts, and drafting. d is the mean draft budget of a request, at most K, or half of that for
    strategies that omit unlikely drafts (``least_percent``). The weights are fitted to medians of the latest steps by
    least squares of the relative error, with a prior shape. A strategy's measurements at nearby batches then correct
    the fit there. So one strategy's steps inform all others at once, but a strategy's own steps soon dominate.

    A shared machine has slow periods, and a strategy tried in one must not be remembered as slow. While its times are
    uncertain, they are divided by the slowdown of the preceding steps relative to their prediction.
    """

    def __init__(self, strategies: Sequence[Strategy], max_batch: int, per_cell: int = 48) -> None:
        """Steps of batches above ``max_batch`` are ignored.

        The ``per_cell`` latest steps of a strategy at a batch are stored. Batches above 32 share cells with their
        neighbours, so that the number of cells grows with the logarithm of ``max_batch``.
        """
        self._per_cell, self._max_batch = per_cell, max_batch
        self._grid = sorted({_cell_batch(batch) for batch in range(1, max_batch + 1)})
        sources = sorted({s.source: s for s in strategies if s != OFF}.items())
        self._source_column = {source: 3 + 2 * i for i, (source, _) in enumerate(sources)}
        prior, spread = [1.0, 0.01, 0.01], [0.5, 0.03, 0.03]
        for _, one in sources:
            prior += [0.05, 0.01] if one.drafter in MODEL_FREE else [0.1, 0.1]
            spread += [0.4, 0.05] if one.drafter in MODEL_FREE else [0.4, 0.2]
        self._prior = np.array(prior)
        self._stiffness = np.diag(_RIDGE * (self._prior / np.array(spread)) ** 2)
        self._cells: dict[tuple[Strategy, int, int], _Cell] = {}
        self._cells_of: dict[Strategy, list[_Cell]] = {}
        self._weights: list[float] = prior
        self._since_fit = 0
        self._slowdowns: list[float] = []
        self._nearness: dict[int, dict[int, float]] = {}
        self._predictions: dict[Strategy, dict[tuple[int, float], tuple[float, float]]] = {}

    def __len__(self) -> int:
        """Number of observed cells (strategy, batch, mean draft budget)."""
        return len(self._cells)

    def observe(self, strategy: Strategy, batch: int, duration: float, drafts: float | None = None) -> None:
        """Record a step of ``duration`` seconds; ``drafts`` is its mean draft budget (None: all drafts)."""
        if batch > self._max_batch:
            return
        drafts = float(strategy.num_tokens) if drafts is None else drafts
        expected, doubt = self.predict(strategy, batch, drafts)
        known = doubt <= _doubt(_KNOWN)
        if known:
            self._slowdowns = [*self._slowdowns[-7:], math.log(duration / expected)]
        if len(self._slowdowns) >= 4:
            slowdown = min(1.4, max(-1.4, statistics.median(self._slowdowns)))
            # Partial if this strategy's own times estimate the slowdown, so that a wrong prediction corrects itself.
            duration *= math.exp(-slowdown * (_SUPPRESSED if known else 1.0))
        is_new_strategy = strategy not in self._cells_of
        at = _cell_batch(batch)
        cell = self._cells.get((strategy, at, round(drafts))) or self._add(strategy, at, [], drafts)
        cell.seconds.append(duration)
        del cell.seconds[: -self._per_cell]
        cell.drafts += (drafts - cell.drafts) / len(cell.seconds)
        cell.median = statistics.median(cell.seconds)
        self._since_fit += 1
        is_news = len(cell.seconds) == 1 and (len(self._cells) <= _EARLY or is_new_strategy)
        if is_news or self._since_fit >= _PATIENCE:
            self._fit()
        self._compare(cell)
        self._predictions.pop(strategy, None)

    def _add(self, strategy: Strategy, batch: int, seconds: list[float], drafts: float) -> _Cell:
        cell = _Cell(strategy, batch, seconds, drafts)
        self._cells[strategy, batch, round(drafts)] = cell
        self._cells_of.setdefault(strategy, []).append(cell)
        return cell

    def predict(self, strategy: Strategy, batch: int, drafts: float | None = None) -> tuple[float, float]:
        """(seconds, their relative uncertainty); in units of a plain step before the first observation.

        ``drafts`` is the mean draft budget of a request; None: all drafts of the strategy.
        """
        key = batch, float(strategy.num_tokens) if drafts is None else drafts
        known = self._predictions.setdefault(strategy, {})
        if key not in known:
            known[key] = self._predict(strategy, *key)
        return known[key]

    def _predict(self, strategy: Strategy, batch: int, drafts: float) -> tuple[float, float]:
        nearness, weight, total = self._near(batch), 0.0, 0.0
        for cell in self._cells_of.get(strategy, ()):
            near = min(len(cell.seconds), 12) * nearness[cell.batch]
            if near < _FAR:
                continue
            if cell.drafts != drafts:
                near *= math.exp(-(((cell.drafts - drafts) / _NEAR_DRAFTS) ** 2) / 2)
            weight += near
            total += near * cell.residual
        return self._parametric(strategy, batch, drafts) * math.exp(total / (weight + _TRUST)), _doubt(weight)

    def _near(self, batch: int) -> dict[int, float]:
        """Weights of the measured batches for this batch; cached, because choosing takes time in every step."""
        if batch not in self._nearness:
            self._nearness[batch] = {at: math.exp(-((math.log2(batch / at) / _NEAR) ** 2) / 2) for at in self._grid}
        return self._nearness[batch]

    def _compare(self, cell: _Cell) -> None:
        """Update the deviation of a cell's steps from the fit."""
        cell.residual = math.log(cell.median / self._parametric(cell.strategy, cell.batch, cell.drafts))

    def _features(self, cell: _Cell) -> list[float]:
        row = [1.0, float(cell.batch), cell.batch * self._made(cell.strategy, cell.drafts)]
        row += [0.0] * (len(self._prior) - 3)
        if cell.strategy.num_tokens:
            column = self._source_column[cell.strategy.source]
            row[column : column + 2] = 1.0, float(cell.strategy.num_tokens)
        return row

    @staticmethod
    def _made(strategy: Strategy, drafts: float) -> float:
        """Expected drafts of a request with a budget of ``drafts``."""
        return drafts * (_SURE_SHARE if strategy.least_percent else 1.0)

    def _parametric(self, strategy: Strategy, batch: int, drafts: float) -> float:
        w = self._weights
        seconds = w[0] + w[1] * batch
        if strategy.num_tokens:
            column = self._source_column[strategy.source]
            seconds += w[2] * batch * self._made(strategy, drafts) + w[column] + w[column + 1] * strategy.num_tokens
        return seconds

    def _fit(self) -> None:
        self._since_fit = 0
        cells = list(self._cells.values())
        rows = np.array([self._features(cell) for cell in cells])
        measured = np.array([cell.median for cell in cells])
        scale = float(np.median(measured / (rows @ self._prior)))
        prior = self._prior * scale
        x = rows * prior / measured[:, None]
        confidence = np.array([min(len(cell.seconds), 6) / 6 for cell in cells])
        gram = (x * confidence[:, None]).T @ x + self._stiffness
        self._weights = (prior * _bounded(gram, x.T @ confidence + self._stiffness.diagonal())).tolist()
        for cell in cells:
            self._compare(cell)
        self._predictions.clear()

    def state(self) -> dict[str, Any]:
        """The state as JSON."""
        return {
            "cells": [
                [cell.strategy.name, cell.batch, list(cell.seconds), cell.drafts] for cell in self._cells.values()
            ],
            "weights": list(self._weights),
            "since_fit": self._since_fit,
            "machine_slowdown": self._slowdowns,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state()``, also from another range: batches above this one's are omitted.

        States of earlier releases have no budgets; they are read as if each request could have had all drafts.
        """
        self._weights = list(state["weights"])
        self._since_fit = int(state["since_fit"])
        self._slowdowns = list(state.get("machine_slowdown", state.get("mood", ())))  # "mood" until November 2026
        self._cells.clear()
        self._cells_of.clear()
        self._predictions.clear()
        for name, batch, seconds, *drafts in state["cells"]:
            strategy, at = Strategy.parse(name), _cell_batch(int(batch))
            if at > self._grid[-1]:
                continue
            budget = float(*drafts or (strategy.num_tokens,))
            cell = self._cells.get((strategy, at, round(budget))) or self._add(strategy, at, [], budget)
            cell.seconds = [*cell.seconds, *seconds][-self._per_cell :]
            cell.median = statistics.median(cell.seconds)
            self._compare(cell)


def _cell_batch(batch: int) -> int:
    """The batch that represents this one: itself up to 32, above that the nearest of 16 per doubling."""
    width = 1 << max(0, (batch - 1).bit_length() - 5)
    return (batch + width // 2) // width * width


def _doubt(weight: float) -> float:
    return _UNSEEN / math.sqrt(1.0 + weight)


def _bounded(gram: np.ndarray, target: np.ndarray, sweeps: int = 40) -> np.ndarray:
    """Minimise u'Gu/2 - u't over u >= _FLOOR for definite G, by coordinate descent if an entry would be below."""
    u = np.linalg.solve(gram, target)
    if u.min() >= _FLOOR:
        return u
    u = np.maximum(u, _FLOOR)
    for _ in range(sweeps):
        before = u.copy()
        for i in range(len(u)):
            u[i] = max(_FLOOR, u[i] + (target[i] - gram[i] @ u) / gram[i, i])
        if np.abs(u - before).max() < 1e-3:
            break
    return u
