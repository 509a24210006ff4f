"""Batches of random samples, and what they say of each sample in plain Python."""

from __future__ import annotations

import random
from typing import Any

import torch

from megatron_tlt.data.rollout_batch import RESPONSE_COLUMNS, RolloutBatch


def random_batch(count: int, seed: int = 0, columns: tuple[str, ...] = ("rollout_log_probs_G",)) -> RolloutBatch:
    """Samples of 2 to 12 tokens, all held; no two have the same values."""
    rng = random.Random(seed)
    lengths = [rng.randint(2, 12) for _ in range(count)]
    prompts = [rng.randint(1, length - 1) for length in lengths]
    sequences = [[1000 * i + t for t in range(length)] for i, length in enumerate(lengths)]
    total = sum(lengths) - sum(prompts)
    values = {name: torch.arange(total) / 8 + at for at, name in enumerate(columns)}
    batch = RolloutBatch.of_sequences(
        sequences,
        prompts,
        [float(seed * 100 + i) for i in range(count)],
        **{name: column.to(RESPONSE_COLUMNS[name]) for name, column in values.items()},
    )
    rewards = torch.tensor([rng.random() for _ in range(count)], dtype=torch.float64)
    routes = torch.tensor(list(rng.randbytes(3 * sum(lengths))), dtype=torch.uint8).view(-1, 3)
    return batch.with_columns(rewards_N=rewards, versions_N=torch.arange(count) + seed, routes_SF=routes)


def row(batch: RolloutBatch, sample: int) -> dict[str, Any]:
    """All that a batch says of a sample that it holds."""
    columns = {name: batch.response(name, sample).tolist() for name in batch.columns}
    every = {"tokens": batch.tokens(sample).tolist(), "routes": batch.routes(sample).tolist()}
    return columns | known(batch, sample) | every


def known(batch: RolloutBatch, sample: int) -> dict[str, Any]:
    """All that it says of any sample."""
    names = ("prompt_lengths_N", "lengths_N", "rewards_N", "advantages_N", "versions_N")
    return {name: getattr(batch, name)[sample].item() for name in names}
