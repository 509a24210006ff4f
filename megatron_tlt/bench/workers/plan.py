"""One rank of a layout: its memory beyond that after imports, and seconds per optimizer step; rank 0 writes them."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.bench.workers.memory import PeakSampler, anonymous_bytes
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent


def main(given: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    initialize_distributed(600)
    values = json.loads(given)
    rng = random.Random(0)
    # a position predicts the next one, so a row is one shorter
    count, length = values["sequences"], values["tokens"] + 1
    sequences = [[rng.randrange(values["vocab"]) for _ in range(length)] for _ in range(count)]
    samples = RolloutBatch.of_sequences(sequences, [3] * count)
    actor = ActorConfig.model_validate({"transformer_impl": "local", "optimizer": {"lr": 1e-4}, **values["actor"]})
    barrier()
    before = anonymous_bytes()
    policy = Policy(Path(values["model"]), actor, seed=0)
    seconds = []
    with PeakSampler() as sampler:
        for _ in range(1 + values["steps"]):
            barrier()
            began = time.perf_counter()
            policy.update(samples, negative_log_likelihood)
            barrier()
            seconds.append(time.perf_counter() - began)
    peaks = all_gather_data(sampler.peak - before, int)
    if rank() == 0:
        print(f"{min(seconds[1:]):.2f} s a step", flush=True)
        atomic_write_text(Path(out), json.dumps({"peaks": peaks, "seconds": seconds[1:]}))
    barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
