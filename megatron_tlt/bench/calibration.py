"""Derives the constants that are not assumed: from published figures, and from a fit to TLT's 7B row alone.

Three constants are fitted to four figures: median and spread of response lengths, and training efficiency. The row of
the 32B model is not used in the fit; the fit predicts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from megatron_tlt.planning.devices import device
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.planning.simulation.acceptance import DraftShape, tokens_per_round
from megatron_tlt.planning.simulation.constants import Constants
from megatron_tlt.planning.simulation.engine import EngineModel
from megatron_tlt.planning.simulation.lengths import LongTail
from megatron_tlt.planning.simulation.scenario import Actor, Gate, Scenario, Spot
from megatron_tlt.planning.simulation.steps import simulate, speedup

SMALL, LARGE = "qwen2.5-7b", "qwen2.5-32b"
DEVICE = "H100-80GB"
FITTED = ("length_median", "length_sigma", "training_efficiency")
DERIVED = ("draft_overhead_s", "candidates_exponent", "aligned_acceptance", "cold_acceptance")
SEEDS = tuple(range(6))


@cache
def published() -> dict[str, Any]:
    """``published.yaml``."""
    text = resources.files("megatron_tlt.planning.simulation").joinpath("published.yaml").read_text("utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def model_of(name: str) -> ModelSize:
    """A model of the published figures."""
    return ModelSize.of(SimpleNamespace(**published()["models"][name]))


@dataclass(frozen=True)
class Setup:
    """Assumptions about TLT's runs; may be changed."""

    engine_devices: tuple[int, int] = (2, 4)
    """Devices per engine of the small and of the large model."""
    prompts: int = 64

    def scenario(self, model: str, nodes: int, constants: Constants) -> Scenario:
        """The scenario of a published point."""
        recipe, assumed = published()["recipe"], published()["assumed"]
        large = "_32b" if model == LARGE else ""
        return Scenario(
            model=model_of(model),
            device=device(DEVICE),
            constants=constants,
            lengths=LongTail(constants.length_median, constants.length_sigma),
            devices=8 * nodes,
            per_node=8,
            engine_devices=self.engine_devices[model == LARGE],
            prompts=self.prompts,
            group=recipe["group"],
            prompt_tokens=assumed["prompt_tokens"],
            max_response_tokens=recipe["response_tokens_at_most"],
            memory_fraction=recipe["memory_fraction" + large],
            max_seqs=assumed["max_seqs"],
            arms=tuple(DraftShape(*arm) for arm in recipe["arms"]),
            actor=Actor(
                context=recipe["context_parallel" + large],
                mini_batches=max(1, self.prompts // recipe["mini_batch_prompts"]),
                log_prob_passes=recipe["log_prob_passes"],
            ),
            gate=Gate(threshold=recipe["threshold"]),
            spot=Spot(entries_per_step=recipe["drafter_entries_per_device"]),
        )

    def speedup(self, model: str, nodes: int, constants: Constants, seeds: Sequence[int] = SEEDS) -> dict[str, float]:
        """Speed-up of TLT over VeRL."""
        return speedup(simulate(self.scenario(model, nodes, constants), ("off", "spot"), seeds, 1), "spot")


def speculation_speedup(verify: int, batch: int, constants: Constants, depth: int | None = None) -> float:
    """Speed-up of decoding alone: a cell of TLT's table for the 32B model on four devices.

    The drafter is the best point's.
    """
    assumed, best = published()["assumed"], published()["best_32b"]
    engine = EngineModel(model_of(LARGE), device(DEVICE), 4, constants)
    draft = DraftShape(depth or assumed["speculation_depth"], assumed["speculation_top_k"], verify)
    hit = _solve(
        lambda p: tokens_per_round(DraftShape(best["depth"], 8, 64), p, constants.candidates_exponent), best["tokens"]
    )
    context = batch * assumed["speculation_context"]
    gain = tokens_per_round(draft, hit, constants.candidates_exponent)
    return float(gain * engine.plain(batch, context) / engine.round(batch, context, draft))


def _solve(function: Any, value: float, low: float = 1e-3, high: float = 1.0 - 1e-9) -> float:
    from scipy.optimize import brentq

    return float(brentq(lambda x: function(x) - value, low, high))


def derive(constants: Constants) -> Constants:
    """The four constants that follow from published figures, one from each; the others are given.

    A drafter pass follows from the best point's speed-up and tokens per round. The gain of further candidates follows
    from the row of 16 tokens at batch 1. The two acceptances follow from the published acceptance lengths under the
    recipe's first arm.
    """
    known = published()
    best, lengths = known["best_32b"], known["acceptance_length"]
    context, top_k = known["assumed"]["speculation_context"], known["assumed"]["speculation_top_k"]
    tree = DraftShape(best["depth"], top_k, 64)

    def best_speedup(overhead: float) -> float:
        engine = EngineModel(model_of(LARGE), device(DEVICE), 4, replace(constants, draft_overhead_s=overhead))
        return float(best["tokens"] * engine.plain(1, context) / engine.round(1, context, tree))

    constants = replace(constants, draft_overhead_s=_solve(best_speedup, best["speedup"], 0.0, 0.1))

    def narrow(exponent: float) -> float:
        return speculation_speedup(16, 1, replace(constants, candidates_exponent=exponent))

    constants = replace(constants, candidates_exponent=_solve(narrow, known["speculation_32b"][16][1], 0.01, 1.0))
    arm = DraftShape(*known["recipe"]["arms"][0])

    def acceptance(tokens: float) -> float:
        return _solve(lambda p: tokens_per_round(arm, p, constants.candidates_exponent), tokens)

    return replace(
        constants, aligned_acceptance=acceptance(lengths["aligned"]), cold_acceptance=acceptance(lengths["cold"])
    )


def fit(
    constants: Constants,
    setup: Setup | None = None,
    seeds: Sequence[int] = SEEDS,
    row: Mapping[int, float] | None = None,
) -> Constants:
    """Fits ``FITTED`` by least squares of the logarithms of the 7B row's speed-ups only.

    The start point does not depend on ``constants``, and every trial uses the same seeds.

    Args:
        row: speed-ups by nodes; the published ones by default.
    """
    from scipy.optimize import least_squares

    setup = setup or Setup()
    wanted = published()["speedups"][SMALL] if row is None else row

    def read(values: Any) -> Constants:
        median, sigma, efficiency = (float(value) for value in values)
        return replace(
            constants,
            length_median=float(np.exp(median)),
            length_sigma=sigma,
            training_efficiency=float(np.exp(efficiency)),
        )

    def errors(values: Any) -> list[float]:
        trial = read(values)
        return [log(setup.speedup(SMALL, nodes, trial, seeds)["ratio"] / speedup) for nodes, speedup in wanted.items()]

    found = least_squares(
        errors,
        x0=(log(2000.0), 1.2, log(0.2)),
        bounds=((log(100.0), 0.3, log(0.02)), (log(20000.0), 2.5, log(0.6))),
        x_scale=(1.0, 0.5, 1.0),
        diff_step=0.02,
        xtol=1e-3,
        ftol=1e-4,
    )
    return read(found.x)
