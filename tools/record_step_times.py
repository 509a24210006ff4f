#!/usr/bin/env python3
"""Records what engine steps cost under each strategy and batch, on a random model; `tlt bench tuner` replays it.

python tools/record_step_times.py --out megatron_tlt/bench/traces/cpu-25m.json --hidden 512 --layers 8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_tlt.config.drafter_kinds import KINDS

VOCAB = 32  # every prompt holds all of it, so that the n-gram drafter always finds a match
SKIPPED = 3  # steps at the start of a rollout: the prompts, and the first drafts
FULL = 0.9  # least share of all drafts in a step that is kept: of many requests, some n-gram is always cut short


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description="Record the duration of engine steps by strategy and batch.")
    own.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    own.add_argument("--hidden", type=int, default=512, help="the random model's hidden size (heads have 64)")
    own.add_argument("--layers", type=int, default=8)
    own.add_argument("--batches", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    own.add_argument("--drafts", type=int, nargs="+", default=[1, 3, 5, 7], help="numbers of draft tokens")
    own.add_argument("--drafters", nargs="+", default=["ngram", "eagle"], choices=("ngram", *KINDS))
    own.add_argument("--steps", type=int, default=8, help="steps that are kept of a rollout")
    own.add_argument("--rounds", type=int, default=8, help="interleaved rounds of all strategies")
    return own


def build_engines(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """An engine for every strategy, by the strategy's name; the drafter models are made from the last layer."""
    from megatron_tlt.bench.engines import one_of_several
    from megatron_tlt.config.schema import ArchitectureConfig, RecipeConfig, RolloutConfig
    from megatron_tlt.config.speculation import NgramConfig, SpeculationConfig
    from megatron_tlt.drafter import drafter_from_target, save_drafter
    from megatron_tlt.models.recipe import write_untrained
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    heads = arguments.hidden // 64
    architecture = ArchitectureConfig(
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        initializer_range=0.05,
    )
    write_untrained(folder / "target", architecture, RecipeConfig(), VOCAB, VOCAB)  # an end that is never drawn
    longest = (SKIPPED + arguments.steps + 1) * (max(arguments.drafts) + 1)
    vllm = {
        "dtype": "float32",
        "max_num_seqs": max(arguments.batches),
        "block_size": 32,
        "kv_cache_memory_bytes": 400 << 20,  # there are as many engines as strategies
    }
    rollout = RolloutConfig(max_prompt_tokens=VOCAB, max_response_tokens=longest, vllm=vllm)
    rollout = one_of_several(rollout)
    engines = {"off": VllmEngine(folder / "target", rollout, SpeculationConfig(enabled=False), 0)}
    for drafter in arguments.drafters:
        path = None
        if drafter != "ngram":
            path = folder / drafter
            save_drafter(drafter_from_target(folder / "target", drafter, 0), path)
        for k in arguments.drafts:
            speculation = SpeculationConfig(
                drafter=drafter,
                path=path,
                num_speculative_tokens=k,
                ngram=NgramConfig(prompt_lookup_min=1, prompt_lookup_max=3),
            )
            engines[f"{drafter}-{k}"] = VllmEngine(folder / "target", rollout, speculation, 0)
    return engines


def steady_steps(engine: Any, batch: int, steps: int, seed: int) -> list[Any]:
    """The records of a rollout's steps in which all ``batch`` requests decoded, with nearly all of their drafts."""
    from megatron_tlt.rollout.types import Request, SamplingSpec

    drafts = engine.num_speculative_tokens
    sampling = SamplingSpec(max_tokens=(SKIPPED + steps) * (drafts + 1))
    rng = random.Random(seed)
    requests = []
    for index in range(batch):
        prompt = tuple(rng.sample(range(VOCAB), VOCAB))
        requests.append(Request(f"{seed}-{index}", prompt, sampling, rng.randrange(1 << 40)))
    records: list[Any] = []

    class Enough(Exception):
        pass

    def keep(record: Any) -> None:
        records.append(record)
        if len(records) == SKIPPED + steps:
            raise Enough

    with contextlib.suppress(Enough):
        engine.generate(requests, on_step=keep)
    kept = [record for record in records[SKIPPED:] if record.batch == batch]
    return [record for record in kept if record.num_draft_tokens >= FULL * batch * drafts]


def record(arguments: argparse.Namespace) -> dict[str, Any]:
    from megatron_tlt.observe.environment import describe_environment
    from megatron_tlt.platform.device import initialize_distributed, prepare
    from megatron_tlt.rollout import vllm_setup

    vllm_setup.prepare_environment()
    prepare()
    initialize_distributed()
    durations: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        engines = build_engines(Path(folder), arguments)
        names = list(engines)
        for turn in range(-1, arguments.rounds):
            for batch in arguments.batches:
                shift = turn % len(names)
                for name in names[shift:] + names[:shift]:
                    steps = steady_steps(engines[name], batch, arguments.steps if turn >= 0 else 2, turn + 1)
                    if turn >= 0:
                        durations[name, batch].append([round(1000 * step.duration, 3) for step in steps])
            print(f"round {turn + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
        for engine in engines.values():
            engine.shutdown()
    return {
        "source": "tools/record_step_times.py: steady decoding steps, a list for each rollout; an engine per strategy",
        "environment": describe_environment(),
        "model": {"hidden_size": arguments.hidden, "num_layers": arguments.layers, "dtype": "float32", "vocab": VOCAB},
        "steps": [
            {"strategy": name, "batch": batch, "milliseconds": values}
            for (name, batch), values in sorted(durations.items())
        ],
    }


def typical(rollouts: list[list[float]]) -> float:
    """The median of the least disturbed rollout."""
    return min((statistics.median(rollout) for rollout in rollouts if rollout), default=0.0)


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    recorded = record(arguments)
    lines = ",\n".join(json.dumps(step) for step in recorded.pop("steps"))
    head = json.dumps(recorded, indent=1)[:-2]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(f'{head},\n "steps": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    table = {(s["strategy"], s["batch"]): s["milliseconds"] for s in json.loads(arguments.out.read_text())["steps"]}
    for name in dict.fromkeys(name for name, _ in table):
        row = (f"{typical(table[name, batch]):8.2f}" for batch in arguments.batches)
        print(f"{name:10}", *row, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
