"""A real policy's rollouts with every method of speculation, case after case; one process holds all engines."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.bench.real import case_name
from megatron_tlt.bench.rollout import ABLE
from megatron_tlt.bench.rollout_cases import make_groups, of_length
from megatron_tlt.bench.rollout_oracle import RateTable
from megatron_tlt.bench.workers.quickstart import Quickstart, prepare_quickstart, warm_head
from megatron_tlt.bench.workers.rollout import RolloutTarget, timed
from megatron_tlt.config.loader import load_config
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
"""In the head's folder: the responses for its training."""
PAIR = ("off", ABLE, "beg_mab")
"""The arms whose ratios need the most repeats."""


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
    """Strategies that are each timed alone: the tuner's choices except off."""
    return [strategy for strategy in strategies_of(speculation) if strategy != OFF]


def ceiling(table: RateTable, rollouts: Sequence[Sequence[int]], strategies: Sequence[Strategy]) -> float:
    """Speed over off if every batch used its strategy with the most tokens per second.

    ``rollouts`` are the response lengths of each rollout.
    """
    off_s = best_s = 0.0
    for rollout in rollouts:
        lengths, before = sorted(rollout), 0
        for ended, length in enumerate(lengths):
            batch = len(lengths) - ended
            tokens, before = batch * (length - before), length
            rates = [table.rate(strategy, batch) for strategy in strategies]
            off_s += tokens / table.rate(OFF, batch)
            best_s += tokens / max(rates)
    return off_s / best_s


def natural(request: Request, longest: int) -> Request:
    """The request with a response that ends naturally."""
    return replace(request, sampling=replace(request.sampling, max_tokens=longest, min_tokens=0))


def measure(
    target: RolloutTarget, name: str, rollouts: Sequence[Sequence[Request]], uniform: bool, given: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """A row per arm and repeat, and each rollout's response lengths; tuners have no data in repeat 0.

    A repeat is ``given["rollouts"]`` consecutive rollouts.

    Lengths are those of an untimed rollout without drafts, which ends naturally, or with ``uniform`` their mean. Every
    arm decodes the same number of tokens per request, with the same seeds.
    """
    rows, decoded = [], []
    arms, each = list(target.arms), given["rollouts"]
    for repeat in range(max(given["repeats"], given["pairs"]) + 1):
        measured = rollouts[repeat * each :][:each]
        lengths = []
        for requests in measured:
            responses = target.learn_off([natural(request, given["longest"]) for request in requests])
            own = [len(response.token_ids) for response in responses]
            lengths.append([round(sum(own) / len(own))] * len(own) if uniform else own)
        decoded += lengths
        timed_arms = arms if repeat <= given["repeats"] else [arm for arm in arms if arm in PAIR]
        turn = repeat % len(timed_arms)
        for arm in timed_arms[turn:] + timed_arms[:turn]:
            asked = [
                [
                    replace(of_length(request, length), problem_key=f"{arm}/{request.problem_key}")
                    for request, length in zip(requests, own, strict=True)
                ]
                for requests, own in zip(measured, lengths, strict=True)
            ]
            rows.append(timed(target, name, arm, asked, repeat))
        target.end_epoch()
        longest = max(map(max, lengths))
        print(f"{name}, repeat {repeat}: {sum(map(sum, lengths))} tokens, the longest {longest}", flush=True)
    return rows, decoded


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
    config = load_config(given["config"], given["set"])
    states_bytes = 0 if config.spot is None else config.spot.states_bytes
    given |= {"longest": config.rollout.max_response_tokens}
    target = RolloutTarget(
        folder,
        prepared.config.rollout,
        speculation.model_copy(update={"adaptive": adaptive}),
        {},
        statics,
        {**given, "lengths": None, "tuners": ("beg_mab",), "states_bytes": states_bytes},
    )
    record = Path(given["record"])
    group = config.algorithm.group_size
    count = given["rollouts"] * (1 + max(given["repeats"], given["pairs"]))
    cases = [(batch, False) for batch in given["batches"]] + [(batch, True) for batch in given["uniform"]]
    for batch, uniform in cases:
        name = case_name(batch, uniform)
        if name in given["done"] or time.monotonic() - began > 60 * given["minutes"]:
            continue
        target.begin_case(name)
        rollouts = make_groups(prepared.pool, batch, group, count)
        rows, lengths = measure(target, name, rollouts, uniform, given)
        row = {
            "case": name,
            "head": drafter,
            "ceiling": ceiling(target.table, lengths, [OFF, *statics]),
            "lengths": lengths,
            "rows": rows,
        }
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    report = json.loads((head.parent / "report.json").read_text(encoding="utf-8"))
    atomic_write_text(Path(out), json.dumps({"head": report}))


if __name__ == "__main__":
    main(*sys.argv[1:])
