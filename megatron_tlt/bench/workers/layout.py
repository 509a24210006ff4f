"""One rank of a layout: supervised steps on fixed samples; rank 0 writes losses and gradient norms."""

from __future__ import annotations

import json
import random
import signal
import sys
from pathlib import Path

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent


def random_samples(count: int = 24) -> RolloutBatch:
    """Random tokens below 64, of very different lengths."""
    rng = random.Random(0)
    sequences = [[rng.randrange(64) for _ in range(rng.choice((6, 9, 17, 40)))] for _ in range(count)]
    return RolloutBatch.of_sequences(sequences, [3] * count)


def main(model: str, options: str, steps: int, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    initialize_distributed(120)
    samples = random_samples()
    actor = ActorConfig(
        transformer_impl="local",
        **json.loads(options),
        optimizer={"lr": 1e-3, "weight_decay": 0.01},
        max_tokens_per_micro_batch=96,
    )
    policy = Policy(Path(model), actor, seed=0, total_steps=steps)
    rows = [policy.update(samples, negative_log_likelihood) for _ in range(steps)]
    if rank() == 0:
        found = {key: [row[key] for row in rows] for key in ("loss", "grad_norm")}
        atomic_write_text(Path(out), json.dumps(found))
    barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
