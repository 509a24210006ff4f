"""Rollout with and without speculation, on the same prompts, seeds and weights, interleaved."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.benchmark import BenchmarkResult, interleave, ratio_of_medians
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.platform.device import initialize_distributed, prepare
from megatron_tlt.rollout.types import DraftStats, Request, Response
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.experience import one_request_each, training_sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=Path("launch/quickstart-cpu.yaml"), help="launch config")
    parser.add_argument("--model", type=Path, help="model folder (default: the config's)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128], help="requests in a rollout")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats")


def _requests(config: TltConfig, folder: Path, count: int) -> list[Request]:
    tokenizer = load_tokenizer(folder)
    problems = build_sources(config.tasks, "held_out", config.run.seed).held_out(count)
    return one_request_each(problems, tokenizer, training_sampling(config.rollout, tokenizer.eos_id), "bench")


def _engines(config: TltConfig, folder: Path) -> dict[str, VllmEngine]:
    """Two engines in one process: the one without speculation carries none of its machinery."""
    on = config.speculation.model_copy(update={"enabled": True})
    return {
        "off": VllmEngine(folder, config.rollout, SpeculationConfig(enabled=False), config.run.seed),
        on.drafter: VllmEngine(folder, config.rollout, on, config.run.seed),
    }


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Times whole rollouts; every row is a batch size, with the ratio of medians off / on and its spread.

    Raises:
        ConfigError: the model is not there yet.
    """
    config = load_config(arguments.config, [])
    folder = arguments.model or model_folder(config)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no model there; run `tlt train {arguments.config}` first, or give --model")
    prepare()
    initialize_distributed()
    engines = _engines(config, folder)
    result = BenchmarkResult(environment=describe_environment(), name="speculation")
    for batch in arguments.batches:
        requests = _requests(config, folder, batch)
        last: dict[str, list[Response]] = {}

        def rollout(name: str, requests: list[Request] = requests, last: dict[str, list[Response]] = last) -> None:
            last[name] = engines[name].generate(requests)

        times = interleave({name: partial(rollout, name) for name in engines}, arguments.repeats, warmups=1)
        on = next(name for name in engines if name != "off")
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
            }
        )
    best = max(row["tokens_per_s_ratio_on_over_off"]["ratio"] for row in result.rows)
    result.target("best_tokens_per_s_ratio", best, ">=", 1.0)
    for engine in engines.values():
        engine.shutdown()
    return result
