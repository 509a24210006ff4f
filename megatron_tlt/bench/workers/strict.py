"""One rank of several layouts: updates on the same responses; rank 0 writes a hash of every weight, norms and times."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import Loss
from megatron_tlt.algorithms.registry import build_loss
from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.data.exchange import redistribute
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, initialize_distributed, prepare, rank, seed_everything
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent

_LENGTHS = (6, 9, 17, 40)


@dataclass(frozen=True)
class RecordedTraining:
    """What training on given responses led to, the same on every rank but for the times."""

    hashes: dict[str, str]
    """SHA-256 of the bytes of each Hugging Face tensor after the last update."""
    log_probs: list[str] = field(default_factory=list)
    """SHA-256 of the old log-probs of all response tokens, for each batch."""
    updates: list[dict[str, float]] = field(default_factory=list)
    """What each update reported."""
    seconds: list[float] = field(default_factory=list)
    """Of each batch, scores and updates: the slowest rank's."""


def synthetic_responses(batches: int, count: int, vocabulary: int = 64) -> Iterator[RolloutBatch]:
    """Batches of random responses with advantages, of very different lengths; the same in every process."""
    rng = random.Random(0)
    for _ in range(batches):
        sequences = [[rng.randrange(vocabulary) for _ in range(rng.choice(_LENGTHS))] for _ in range(count)]
        yield RolloutBatch.of_sequences(sequences, [3] * count, [rng.uniform(-2, 2) for _ in range(count)])


def train_recorded(
    policy: Policy, batches: Sequence[RolloutBatch], loss: Loss, *, mini_batches: int = 1
) -> RecordedTraining:
    """Scores and trains on each batch, which every rank holds whole, as a step of a run does; a collective.

    ``mini_batches``: updates on each batch.
    """
    found = RecordedTraining({})
    for batch in batches:
        barrier()
        began = time.perf_counter()
        scores = policy.log_probs(batch)
        scored = batch.holding(scores.samples).with_columns(old_log_probs_G=scores.log_probs_G)
        parts = [list(range(batch.num_samples))[start::mini_batches] for start in range(mini_batches)]
        shares = [policy.share([batch.lengths[i] for i in part]) for part in parts]
        needed = redistribute(scored, [part[i] for part, share in zip(parts, shares, strict=True) for i in share])
        found.updates.extend(policy.update(needed.select(part), loss) for part in parts)
        found.seconds.append(max(all_gather_data(time.perf_counter() - began, float)))
        whole = redistribute(scored, range(batch.num_samples))
        assert whole.old_log_probs_G is not None
        found.log_probs.append(_hash(whole.old_log_probs_G))
    found.hashes.update((name, _hash(tensor)) for name, tensor in policy.export_weights())
    return found


def _hash(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def train_under_layouts(
    model: Path,
    layouts: Mapping[str, Mapping[str, Any]],
    *,
    batches: int = 5,
    responses: int = 16,
    mini_batches: int = 1,
    optimizer: Mapping[str, Any] | None = None,
    packing: bool = True,
) -> dict[str, RecordedTraining]:
    """Trains the model in ``model`` from its start under each layout of this launch's processes; a collective.

    Args:
        model: a Hugging Face folder.
        layouts: for each name ``megatron``, the options of ``actor.megatron``, and ``logical_shards`` (absent: None).
        batches: of ``responses`` synthetic responses each.
        responses: of a batch.
        mini_batches: updates on each batch.
        optimizer: the options of ``actor.optimizer``; None clips at a norm that every update exceeds.
        packing: as ``actor.packing``.
    """
    from megatron.core import parallel_state  # after the package above has prepared the platform

    rows: dict[str, RecordedTraining] = {}
    loss = build_loss(AlgorithmConfig())
    data = list(synthetic_responses(batches, responses))
    for name, layout in layouts.items():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        actor = ActorConfig(
            transformer_impl="local",
            megatron=dict(layout.get("megatron", {})),
            optimizer=dict(optimizer or {"lr": 1e-3, "weight_decay": 0.01, "clip_grad": 0.05}),
            max_tokens_per_micro_batch=64,
            packing=packing,
        )
        updates, shards = batches * mini_batches, layout.get("logical_shards")
        policy = Policy(model, actor, seed=0, total_steps=updates, logical_shards=shards)
        rows[name] = train_recorded(policy, data, loss, mini_batches=mini_batches)
    return rows


def main(given_json: str, _work: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    prepare(deterministic=True)
    initialize_distributed(120)
    seed_everything(0)
    given = json.loads(given_json)
    rows = train_under_layouts(Path(given.pop("model")), given.pop("layouts"), **given)
    if rank() == 0:
        atomic_write_text(Path(out), json.dumps({name: asdict(row) for name, row in rows.items()}))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
