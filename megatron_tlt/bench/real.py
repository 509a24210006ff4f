"""A real policy's rollouts with full speculation, against vLLM's drafters, none, and an oracle; resumable."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult, median_of_ratios, ratio_of_medians
from megatron_tlt.bench.rollout import ABLE, summarize
from megatron_tlt.bench.spot import summarize as summarize_steps
from megatron_tlt.bench.workers import measure_in_worker
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.jsonl import read_jsonl

STEPS = "RL steps"
"""The case with whole steps of the launch config, on its own number of ranks."""
AFTER_UPDATE, IN_BUBBLE = "trained after the update", "trained in the bubble"
STEP_ARMS = {
    "off": ("speculation.enabled=false", "drafter=null", "spot=null"),
    AFTER_UPDATE: ("spot=null",),
    IN_BUBBLE: (),
}
"""Changes to the launch config for each arm's run."""
_SETTLE = 2
"""Uncounted first steps of each arm: its tuner has no data in the first, and drafts there for the first time."""
TUNER = "beg_mab"
OVERHEAD = 1.01
"""Step time of an engine that could draft over that of one that cannot."""
PAIRS = 10
"""Minimum number of interleaved repeats of off and the tuner for judging "never slower"."""
WANTED = {"batch 1": 2.0, "batch 4": 2.3, "batch 8": 1.9, "batch 16": 1.6}
"""Target speed over off for the tuner, by the rollout's requests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=Path("launch/smollm2-135m-cpu.yaml"), help="launch config")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the config")
    parser.add_argument("--model", type=Path, help="model folder (default: the config's)")
    parser.add_argument("--problems", type=Path, help="prompt file (JSONL or parquet) instead of the config's tasks")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 1, 16, 2, 32], help="requests per rollout")
    parser.add_argument("--uniform", type=int, nargs="*", default=[8], help="batches repeated with equal lengths")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved, after one without data for tuners")
    parser.add_argument("--pairs", type=int, default=10, help="interleaved repeats of off and the tuner")
    parser.add_argument("--rollouts", type=int, default=4, help="consecutive rollouts per measurement")
    parser.add_argument("--requests", type=int, default=256, help="held-out problems; rollouts share none")
    parser.add_argument(
        "--rounds", type=int, default=8, help=f"interleaved RL steps of each arm, {_SETTLE} uncounted; 0: none"
    )
    parser.add_argument("--session-steps", type=int, default=10, help="drafter steps after each update, in that arm")
    parser.add_argument("--threshold", type=int, default=32, help="running batch up to which the tuner may speculate")
    parser.add_argument("--warm-problems", type=int, default=192, help="responses for the head's training")
    parser.add_argument("--warm-steps", type=int, default=150, help="steps of the head's training")
    parser.add_argument("--warm-entries", type=int, default=8, help="responses per step")
    parser.add_argument("--warm-threads", type=int, default=2, help="threads of the head's training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=Path("runs/models"), help="folder for the head")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no later batch; run again for the rest")
    parser.add_argument("--timeout", type=float, default=14400.0, help="seconds in all")


def _settings(arguments: argparse.Namespace, config: TltConfig, folder: Path) -> dict[str, Any]:
    """The settings of a measurement; measurements with other settings are not combined with it."""
    own = set(vars(arguments)) - {
        "model",
        "minutes",
        "timeout",
        "json",
        "cache",
        "name",
        "traceback",
        "batches",
        "uniform",
        "rounds",
        "session_steps",
        "run",
    }
    values = {key: getattr(arguments, key) for key in sorted(own)} | {"config": str(arguments.config)}
    values["policy"] = _digest(folder)
    values["drafter"] = None if config.drafter is None else config.drafter.model_dump(mode="json")
    for section in ("speculation", "rollout"):
        values[section] = getattr(config, section).model_dump(mode="json")
    values["run_seed"] = config.run.seed
    values["tasks"] = [task.model_dump(mode="json") for task in config.tasks]
    return values


def _digest(folder: Path) -> str:
    """A digest of all weights: in bfloat16 a small step leaves most of them unchanged."""
    digest = hashlib.sha256()
    for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def _head_folder(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> Path:
    own = ("warm_problems", "warm_steps", "warm_entries", "seed")
    keys = ("config", "rollout", "tasks", "run_seed", "policy", "drafter", *own)
    digest = hashlib.sha256(json.dumps({key: settings[key] for key in keys}, sort_keys=True).encode()).hexdigest()
    return Path(arguments.cache).resolve() / f"head-{digest[:16]}"


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per batch and arm; ratios are of medians of interleaved repeats, with the spread of pairs.

    Each finished batch is appended to ``FILE.runs.jsonl``; run again, the benchmark measures the missing ones.

    Raises:
        ConfigError: the model does not exist yet, or the file of an earlier run has other settings.
        RunError: the worker failed.
    """
    own_set = arguments.set
    if arguments.problems is not None:
        task = {"kind": "file", "name": arguments.problems.stem, "path": str(arguments.problems.resolve())}
        arguments.set = [*arguments.set, f"tasks={json.dumps([task])}"]
    config = load_config(arguments.config, arguments.set)
    # a recipe's model depends on its tasks and number of ranks: use those with which it was built
    folder = arguments.model or model_folder(load_config(arguments.config, own_set))
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(f"{folder}: no model; `tlt train {arguments.config}` builds it, or give --model")
    settings = _settings(arguments, config, folder)
    record = Path(f"{arguments.json}.runs.jsonl" if arguments.json else "real.runs.jsonl").resolve()
    done = _done(record, settings)
    if STEPS in done and done[STEPS]["of"] != _steps_settings(arguments, config):
        raise ConfigError(
            f"{record}: RL steps were measured with other settings; allowed: the same, or another --json file"
        )
    given = vars(arguments) | {
        "config": str(arguments.config),
        "model": str(folder),
        "cache": str(_head_folder(arguments, settings)),
        "record": str(record),
        "done": sorted(done),
        "json": None,
    }
    plain = {key: value for key, value in given.items() if isinstance(value, (str, int, float, list, type(None)))}
    began = time.monotonic()
    if not done.keys() >= set(_names(arguments.batches, arguments.uniform)):
        measure_in_worker("real policy", "real", plain, arguments.timeout)
    if arguments.rounds and STEPS not in done and time.monotonic() - began < 60 * arguments.minutes:
        _measure_steps(arguments, config, folder, record, _head_folder(arguments, settings) / "drafter")
    done = _done(record, settings)
    return judge(done, arguments.batches, arguments.uniform, arguments.rounds)


def _steps_settings(arguments: argparse.Namespace, config: TltConfig) -> dict[str, Any]:
    """Further settings on which RL steps depend."""
    sections = ("spot", "trainer", "algorithm", "actor", "launcher", "rewards")
    values = config.model_dump(mode="json", include=set(sections))
    return {**values, "rounds": arguments.rounds, "session_steps": arguments.session_steps}


def _measure_steps(arguments: argparse.Namespace, config: TltConfig, folder: Path, record: Path, head: Path) -> None:
    if not head.is_dir():
        raise ConfigError(f"--rounds {arguments.rounds}: no folder {head}; allowed: after a case of --batches")
    given = {"config": str(arguments.config), "set": arguments.set, "model": str(folder.resolve()), "head": str(head)}
    given |= {"rounds": arguments.rounds, "session_steps": arguments.session_steps}
    ranks = config.launcher.nproc_per_node
    found = measure_in_worker("real policy, RL steps", "real_steps", given, arguments.timeout, ranks)
    of = _steps_settings(arguments, config)
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"case": STEPS, "of": of, **found}) + "\n")


def case_name(batch: int, uniform: bool) -> str:
    """The name in rows and targets."""
    return f"batch {batch}, uniform" if uniform else f"batch {batch}"


def _names(batches: Sequence[int], uniform: Sequence[int]) -> list[str]:
    return [case_name(batch, False) for batch in sorted(batches)] + [case_name(one, True) for one in sorted(uniform)]


def _done(record: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The cases in a file of measurements, by name; a new file starts with the settings."""
    if not record.is_file():
        record.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        return {}
    first, *cases = read_jsonl(record)
    if first.get("settings") != json.loads(json.dumps(settings)):
        raise ConfigError(f"{record}: measured with other settings; allowed: the same, or another --json file")
    return {case["case"]: case for case in cases}


def judge(
    done: Mapping[str, Mapping[str, Any]], batches: Sequence[int], uniform: Sequence[int] = (), rounds: int = 0
) -> BenchmarkResult:
    """Rows and targets of the finished cases; targets of missing cases are incomplete.

    ``rounds``: number of RL steps requested per arm.
    """
    result = BenchmarkResult(environment=describe_environment(), name="real")
    lowest, over_oracle, over_stock, overheads = [], [], [], []
    few_pairs = no_suffix = False
    for name in _names(batches, uniform):
        case = done.get(name)
        if case is None:
            result.incomplete(name)
            continue
        (arms,) = summarize(case["rows"]).values()
        seconds = {arm: found["seconds"] for arm, found in arms.items()}
        for arm, found in arms.items():
            result.rows.append(
                {
                    "case": name,
                    "arm": arm,
                    "seconds": found["seconds"],
                    "speed_over_off": _over(seconds["off"], found["seconds"]),
                    "first_round_s": found["cold"],
                    "acceptance_length": statistics.fmean(
                        row["acceptance_length"] or 1.0 for row in case["rows"] if row["arm"] == arm and row["repeat"]
                    ),
                    "ceiling": case["ceiling"] if arm == TUNER else None,
                }
            )
        tuner = seconds[TUNER]
        ratio = _over(seconds["off"], tuner)["ratio"]
        lowest.append(ratio)
        few_pairs |= len(tuner) < PAIRS
        overheads.append(_over(seconds[ABLE], seconds["off"])["ratio"])
        over_oracle.append(_over(seconds["oracle"], tuner)["ratio"])
        stock = [arm for arm in arms if arm.startswith("vLLM's")]
        no_suffix |= not any("suffix" in arm for arm in stock)
        over_stock.append(min(_over(seconds[arm], tuner)["ratio"] for arm in stock))
        if name in WANTED:
            result.target(f"speed over off, {name}", ratio, ">=", WANTED[name])
    if lowest:
        if few_pairs:
            result.incomplete(f"speed over off, lowest: at least {PAIRS} pairs")
        else:
            result.target("speed over off, lowest", min(lowest), ">=", 0.98)
        result.target("time able to draft over unable, median of batches", statistics.median(overheads), "<=", OVERHEAD)
        result.target("speed over the oracle, lowest", min(over_oracle), ">=", 0.95)
        if no_suffix:
            result.incomplete("speed over the best of vLLM's own: vLLM's suffix decoding needs arctic-inference")
        result.target("speed over the best of vLLM's own, lowest", min(over_stock), ">=", 1.05)
    if rounds and STEPS in done:
        _judge_steps(result, done[STEPS])
    elif rounds:
        result.incomplete(STEPS)
    return result


def _over(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """a over b, for the repeats that both have; each repeat has its own problems."""
    shared = min(len(a), len(b))
    return median_of_ratios(a[:shared], b[:shared])


def _judge_steps(result: BenchmarkResult, found: Mapping[str, Any]) -> None:
    """Responses end naturally, so arms decode different numbers of tokens: speed is per token."""
    arms = summarize_steps(found, _SETTLE)
    per_token: dict[str, list[float]] = {}
    for arm, measured in arms.items():
        rows = [row for row in found["steps"] if row["arm"] == arm and row["round"] >= _SETTLE]
        rows.sort(key=lambda row: int(row["round"]))
        tokens = [row["time/rollout"] * row["rollout/tokens_per_s"] for row in rows]
        per_token[arm] = [row["time/total"] / count for row, count in zip(rows, tokens, strict=True)]
        rollout = [1.0 / row["rollout/tokens_per_s"] for row in rows]
        per_token[f"{arm}, rollout"] = rollout
        result.rows.append(
            {
                "case": STEPS,
                "arm": arm,
                **measured,
                "tokens": statistics.fmean(tokens),
                "reward": statistics.fmean(row["reward/mean"] for row in rows),
                "speed_over_off": ratio_of_medians(per_token["off"], per_token[arm]),
                "rollout_speed_over_off": ratio_of_medians(per_token["off, rollout"], rollout),
                "pinned": found["pinned"],
            }
        )
    result.target("share of idle time that trains", arms[IN_BUBBLE]["idle_share_used"], ">=", 0.8)
