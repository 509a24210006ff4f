"""Rollout with and without speculation, interleaved, on the same prompts, seeds and weights.

A run estimates the same ratio from its own engine steps (``GainMeter``); the estimate is compared with it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.bench.engines import one_of_several
from megatron_tlt.bench.result import BenchmarkResult, interleave, ratio_of_medians
from megatron_tlt.bench.rollout_cases import of_length
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.platform.device import initialize_distributed, prepare
from megatron_tlt.rollout.engine_speculation import EngineSpeculation
from megatron_tlt.rollout.types import DraftStats, Request, Response
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.speculation.gain import RolloutGain
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.requests import one_request_each, training_sampling

_MEASURING = "measuring"
_PROBED = 0.25
"""Share of the engine steps of untimed rollouts without drafts, for the estimates."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, default=Path("launch/quickstart-deterministic.yaml"), help="launch config"
    )
    parser.add_argument("--model", type=Path, help="model folder (default: the config's)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128], help="requests per rollout")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats")


def _requests(config: TltConfig, folder: Path, count: int) -> list[Request]:
    tokenizer = load_tokenizer(folder)
    problems = build_sources(config.tasks, "held_out", config.run.seed).held_out(count)
    return one_request_each(problems, tokenizer, training_sampling(config.rollout, tokenizer), "bench")


def _engines(config: TltConfig, folder: Path) -> dict[str, VllmEngine]:
    """Two engines in one process: the one without speculation has none of its machinery."""
    on = config.speculation.model_copy(update={"enabled": True})
    rollout = one_of_several(config.rollout)
    return {
        "off": VllmEngine(folder, rollout, SpeculationConfig(enabled=False), config.run.seed),
        on.drafter: VllmEngine(folder, rollout, on, config.run.seed),
    }


class _Estimated:
    """Rollouts of the speculating engine, measured as in training."""

    def __init__(self, engine: VllmEngine, speculation: SpeculationConfig, probe_share: float = 0.01) -> None:
        self._engine = engine
        self._speculation = EngineSpeculation(speculation, None, probe_share=probe_share)

    def __call__(self, requests: list[Request]) -> list[Response]:
        speculation = self._speculation
        speculation.begin_step()
        speculation.begin_rollout(requests, self._engine.versions.get("drafter"))
        responses = self._engine.generate(requests, on_finished=speculation.finished, chooser=speculation)
        speculation.end_rollout(requests)
        speculation.keep_rollout()
        return responses

    @property
    def gain(self) -> RolloutGain:
        return self._speculation.account.gain

    def know(self, other: _Estimated) -> None:
        """Adopts the measurements of ``other``; a run has many more rollouts than a benchmark."""
        own = self._speculation
        own.load_state({"plain": other._speculation.state()["plain"], "probe": own.state()["probe"]})


def _error(estimates: Sequence[float], measured: float) -> float:
    """Relative error of the estimates' median; not finite without estimates."""
    return abs(statistics.median(estimates) / measured - 1.0) if estimates else math.inf


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Times whole rollouts; a row per batch size, with the ratio of medians off / on and its spread.

    Raises:
        ConfigError: the model does not exist yet.
    """
    config = load_config(arguments.config, [])
    folder = arguments.model or model_folder(config)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no model; run `tlt train {arguments.config}` first, or give --model")
    prepare()
    initialize_distributed()
    engines = _engines(config, folder)
    on = next(name for name in engines if name != "off")
    section = config.speculation.model_copy(update={"enabled": True, "adaptive": None})
    estimated, probing = (_Estimated(engines[on], section, share) for share in (0.01, _PROBED))
    result = BenchmarkResult(environment=describe_environment(), name="speculation")
    for batch in arguments.batches:
        sampled = _requests(config, folder, batch)
        # equal lengths with and without: otherwise sampling, not speculation, determines the time
        lengths = [len(response.token_ids) for response in engines["off"].generate(sampled)]
        requests = [of_length(request, length) for request, length in zip(sampled, lengths, strict=True)]
        last: dict[str, list[Response]] = {}
        gains: list[RolloutGain] = []

        def off(requests: list[Request] = requests, last: dict[str, list[Response]] = last) -> None:
            last["off"] = engines["off"].generate(requests)

        def speculating(
            requests: list[Request] = requests,
            last: dict[str, list[Response]] = last,
            gains: list[RolloutGain] = gains,
        ) -> None:
            last[on] = estimated(requests)
            gains.append(estimated.gain)

        def measuring(requests: list[Request] = requests) -> None:
            probing(requests)
            estimated.know(probing)

        cases = {"off": off, on: speculating, _MEASURING: measuring}
        times = interleave(cases, arguments.repeats, warmups=2)
        del times[_MEASURING]
        estimates = [one.gain for one in gains[-arguments.repeats :] if one.gain is not None]
        tokens = {name: sum(len(r.token_ids) for r in last[name]) for name in engines}
        speed = {name: [tokens[name] / seconds for seconds in times[name]] for name in engines}
        drafts = sum((r.draft for r in last[on]), DraftStats())
        result.rows.append(
            {
                "requests": batch,
                "drafter": on,
                "num_speculative_tokens": config.speculation.num_speculative_tokens,
                "seconds": times,
                "tokens": tokens,
                "time_ratio_off_over_on": ratio_of_medians(times["off"], times[on]),
                "tokens_per_s_ratio_on_over_off": ratio_of_medians(speed[on], speed["off"]),
                "acceptance_length": drafts.acceptance_length,
                "estimated_ratio": statistics.median(estimates) if estimates else None,
            }
        )
        measured = result.rows[-1]["time_ratio_off_over_on"]["ratio"]
        result.target(f"{batch} requests: error of the estimate", _error(estimates, measured), "<=", 0.10)
    best = max(row["tokens_per_s_ratio_on_over_off"]["ratio"] for row in result.rows)
    result.target("best_tokens_per_s_ratio", best, ">=", 1.0)
    for engine in engines.values():
        engine.shutdown()
    return result
