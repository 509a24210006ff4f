"""Deals random batches to ranks and moves their samples; each rank writes what it found to be wrong."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from megatron_tlt.data.exchange import redistribute
from megatron_tlt.data.rollout_batch import RESPONSE_COLUMNS, RolloutBatch
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import barrier, initialize_distributed, rank, world_size
from tests.data.batches import random_batch, row

ROUNDS = 20


def round_trip(seed: int) -> list[str]:
    """One random batch with a first and a second owner of each sample, some held by several, some wanted by none."""
    rng = random.Random(seed)
    columns = tuple(name for name in RESPONSE_COLUMNS if rng.random() < 0.5)
    whole = random_batch(rng.randint(1, 12), seed, columns)
    held = [{i for i in range(whole.num_samples) if rng.randrange(world_size()) == r} for r in range(world_size())]
    for i in set(range(whole.num_samples)).difference(*held):
        held[rng.randrange(world_size())].add(i)
    wanted = [{i for i in range(whole.num_samples) if rng.random() < 0.6} for _ in range(world_size())]
    start = whole.holding(held[rank()])
    if not start.held:  # as on a rank that leads no engine
        start = start.with_columns(**dict.fromkeys(columns))
    found = redistribute(start, wanted[rank()])
    wrong = []
    if found.held != tuple(sorted(wanted[rank()])):
        wrong.append(f"round {seed}: held {found.held}")
    return wrong + [f"round {seed}: sample {i}" for i in found.held if row(found, i) != row(whole, i)]


def refusal(batch: RolloutBatch, wanted: list[int]) -> str:
    try:
        redistribute(batch, wanted)
    except RunError as error:
        return str(error)
    return ""


def main(out: str) -> None:
    initialize_distributed(60)
    wrong = [line for seed in range(ROUNDS) for line in round_trip(seed)]
    batch = random_batch(3)
    missing = refusal(batch.holding([1]), [2] if rank() == 0 else [])
    differ = refusal(batch if rank() else batch.with_columns(rollout_log_probs_G=None), [0])
    found = {"rounds": ROUNDS, "wrong": wrong, "missing": missing, "differ": differ}
    Path(out, f"rank{rank()}.json").write_text(json.dumps(found))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
