"""A real policy's rollouts under every way to speculate, case after case; one process holds all engines."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.bench.rollout import ABLE
from megatron_tlt.bench.rollout_cases import Case, make_cases, make_uniform
from megatron_tlt.bench.rollout_oracle import RateTable
from megatron_tlt.bench.workers.quickstart import Quickstart, prepare_quickstart, warm_head
from megatron_tlt.bench.workers.rollout import Target, epochs_of, timed
from megatron_tlt.config.speculation import AdaptiveConfig, SpeculationConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.drafter import WarmupPlan, read_pairs, write_pairs
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf_folder import read_hf_config
from megatron_tlt.platform.device import initialize_distributed, prepare
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.rollout.adaptive import strategies_of
from megatron_tlt.rollout.types import Request
from megatron_tlt.speculation.strategy import OFF, Strategy

PAIRS = "pairs.jsonl"
"""In the head's folder: the responses that it learns from."""
PAIR = ("off", ABLE, "beg_mab")
"""The arms whose ratios are wanted most closely."""


def head_of(given: Mapping[str, Any], prepared: Quickstart) -> Path:
    """The folder of the config's drafter, trained on the policy's own responses; kept in the cache."""
    drafter = prepared.config.drafter
    if drafter is None:
        raise ConfigError(f"{given['config']}: no drafter section; the benchmark needs a drafter that drafts")
    cache = Path(given["cache"])
    cache.mkdir(parents=True, exist_ok=True)
    sampled = cache / PAIRS
    if not sampled.is_file():
        write_pairs(sampled, prepared.pairs)
    vocab_size = int(read_hf_config(prepared.folder).vocab_size)
    pairs = read_pairs(sampled, vocab_size, lambda: load_tokenizer(prepared.folder))
    plan = WarmupPlan(steps=given["warm_steps"], entries_per_step=given["warm_entries"], evaluate_every=50)
    return warm_head(prepared.folder, pairs, drafter, plan, cache)


def statics_of(speculation: SpeculationConfig) -> list[Strategy]:
    """Strategies that are each timed alone: those that the tuner chooses between, but off."""
    return [strategy for strategy in strategies_of(speculation) if strategy != OFF]


def ceiling(table: RateTable, case: Case, strategies: Sequence[Strategy]) -> float:
    """Speed over off of a rollout that is always under the strategy of most tokens per second at its batch."""
    off_s = best_s = 0.0
    for requests in case.rollouts:
        lengths = sorted(request.sampling.max_tokens for request in requests)
        before = 0
        for ended, length in enumerate(lengths):
            batch = len(lengths) - ended
            tokens, before = batch * (length - before), length
            rates = [table.rate(strategy, batch) for strategy in strategies]
            off_s += tokens / table.rate(OFF, batch)
            best_s += tokens / max(rates)
    return off_s / best_s


def measure(target: Target, case: Case, given: Mapping[str, Any], pool: Sequence[Request]) -> list[dict[str, Any]]:
    """A row per arm and repeat; the first round, in which tuners know nothing of the case, has repeat 0."""
    rows = []
    epochs = epochs_of(given, pool)
    names = list(target.arms)
    for repeat in range(max(given["repeats"], given["pairs"]) + 1):
        arms = names if repeat <= given["repeats"] else [name for name in names if name in PAIR]
        target.begin_case(case.name)
        turn = repeat % len(arms)
        for name in arms[turn:] + arms[:turn]:
            rows.append(timed(target, case, name, epochs, repeat))
        if repeat == 0:
            for requests in case.rollouts:
                target.learn_off(requests)
        target.end_epoch()
        print(f"{case.name}, repeat {repeat}", flush=True)
    return rows


def main(given_json: str, _: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    given, began = json.loads(given_json), time.monotonic()
    prepare()
    initialize_distributed(600)
    torch.set_num_threads(given["warm_threads"])
    folder, seed = Path(given["model"]), given["seed"]
    sampled = (Path(given["cache"]) / PAIRS).is_file()
    warm_problems = 0 if sampled else given["warm_problems"]
    prepared = prepare_quickstart(given["config"], folder, given["requests"], warm_problems, seed, given["set"])
    head = head_of(given, prepared)
    torch.set_num_threads(1)
    drafter = prepared.config.speculation.drafter
    speculation = prepared.config.speculation.model_copy(update={"path": head})
    statics = statics_of(speculation)
    names = [strategy.name for strategy in (OFF, *statics)]
    adaptive = AdaptiveConfig(strategies=names, threshold=given["threshold"])
    target = Target(
        folder,
        prepared.config.rollout,
        speculation.model_copy(update={"adaptive": adaptive}),
        {},
        statics,
        {**given, "lengths": None, "tuners": ("beg_mab",)},
    )
    record = Path(given["record"])
    uniform = make_uniform(make_cases(prepared.pool, given["uniform"], given["rollouts"])[1:])
    for case in make_cases(prepared.pool, given["batches"], given["rollouts"])[1:] + uniform:
        if case.name in given["done"] or time.monotonic() - began > 60 * given["minutes"]:
            continue
        rows = measure(target, case, given, prepared.pool)
        row = {
            "case": case.name,
            "head": drafter,
            "ceiling": ceiling(target.table, case, [OFF, *statics]),
            "rows": rows,
        }
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    report = json.loads((head.parent / "report.json").read_text(encoding="utf-8"))
    lengths = [request.sampling.max_tokens for request in prepared.pool]
    atomic_write_text(Path(out), json.dumps({"head": report, "lengths": lengths}))


if __name__ == "__main__":
    main(*sys.argv[1:])
