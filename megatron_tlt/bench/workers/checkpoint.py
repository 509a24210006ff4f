"""One rank of the checkpoint benchmark: stalls of alternating saves, then losses after resuming in other layouts."""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.bench.layouts import LAYOUTS
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.collectives import all_gather_data, broadcast_data
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.trainer.checkpoints import Checkpoints, TrainerState

PAIRS = [("DP2", "TP2"), ("DP2", "PP2"), ("DP2", "TP2+SP"), ("TP2", "DP2"), ("PP2", "DP2"), ("TP2+SP", "DP2")]


class CheckpointBench:
    """A model, samples for its steps and a folder for its checkpoints."""

    def __init__(self, model: Path, root: Path, vocabulary: int) -> None:
        self._model = model
        self._root = root
        rng = random.Random(0)
        sequences = [[rng.randrange(vocabulary) for _ in range(24)] for _ in range(4)]
        self._samples = RolloutBatch.of_sequences(sequences, [3] * len(sequences))
        self._saved = 0

    def policy(self, layout: str) -> Policy:
        from megatron.core import parallel_state  # after the adapter, which megatron_tlt.actor installs

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        actor = ActorConfig(
            transformer_impl="local",
            megatron=LAYOUTS[layout].megatron,
            optimizer={"lr": 1e-4, "weight_decay": 0.01},
            max_tokens_per_micro_batch=96,
        )
        return Policy(self._model, actor, seed=0, total_steps=100)

    def step(self, policy: Policy) -> float:
        return policy.update(self._samples, negative_log_likelihood)["loss"]

    def losses(self, policy: Policy, steps: int) -> list[float]:
        return [self.step(policy) for _ in range(steps)]

    def save(self, policy: Policy, *, in_background: bool) -> dict[str, Any]:
        """Seconds that a save blocked training (slowest rank), and those of steps while it was written."""
        checkpoints = Checkpoints(self._root, 1, in_background=in_background)
        self._saved += 1
        stall = _slowest(lambda: checkpoints.save(policy, TrainerState(self._saved)))
        steps, published = [], not in_background
        while not published:
            steps.append(_slowest(lambda: self.step(policy)))
            began = time.perf_counter()
            published = checkpoints.poll()
            stall += max(all_gather_data(time.perf_counter() - began, float))
        return {"stall": stall, "whole": checkpoints.published_s, "steps": steps}

    def stalls(self, repeats: int) -> dict[str, Any]:
        policy = self.policy("DP2")
        self.losses(policy, 2)
        alone = [_slowest(lambda: self.step(policy)) for _ in range(6)]
        saves: dict[str, list[dict[str, Any]]] = {"async": [], "sync": []}
        for turn in range(-1, repeats):
            for name in ("async", "sync") if turn % 2 else ("sync", "async"):
                found = self.save(policy, in_background=name == "async")
                if turn >= 0:
                    saves[name].append(found)
        alone += [_slowest(lambda: self.step(policy)) for _ in range(6)]
        written = self._root / f"step_{self._saved:06d}"
        return {
            "parameters": sum(t.numel() for t in policy.model.chunks[0].parameters()),
            "bytes": sum(file.stat().st_size for file in written.rglob("*") if file.is_file()),
            "steps_alone": alone,
            **saves,
        }

    def resumes(self, steps: int) -> list[dict[str, Any]]:
        rows = []
        for source in dict.fromkeys(first for first, _ in PAIRS):
            policy = self.policy(source)
            self.losses(policy, 3)
            self.save(policy, in_background=False)
            expected = self.losses(policy, steps)
            for target in [second for first, second in PAIRS if first == source]:
                policy = self.policy(target)
                Checkpoints(self._root, 1).resume(policy)
                rows.append(
                    {"from": source, "to": target, "uninterrupted": expected, "resumed": self.losses(policy, steps)}
                )
        return rows


def _slowest(act: Callable[[], Any]) -> float:
    barrier()
    began = time.perf_counter()
    act()
    return max(all_gather_data(time.perf_counter() - began, float))


def main(model: str, vocabulary: int, repeats: int, steps: int, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    initialize_distributed(120)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=Path(out).parent) as folder:
        root = Path(broadcast_data(folder, str)) / "checkpoints"
        bench = CheckpointBench(Path(model), root, vocabulary)
        found = {"stalls": bench.stalls(repeats), "resumes": bench.resumes(steps)}
        if rank() == 0:
            atomic_write_text(Path(out), json.dumps(found))
        barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
