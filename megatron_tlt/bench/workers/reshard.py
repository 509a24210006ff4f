"""One rank of a resharding: both methods, alternating, from one actor to one engine."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.bench.export_sync import ExportSync
from megatron_tlt.bench.result import interleave
from megatron_tlt.bench.workers.memory import PeakSampler
from megatron_tlt.config.schema import ActorConfig, ModelConfig, ReshardConfig, RolloutConfig, TltConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, initialize_distributed, prepare, rank
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.reshard.interface import SyncReport, WeightSync
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.trainer.synchronization import policy_sync

_LOOPBACK = re.compile(r"^\s*lo:\s*(\d+)", re.MULTILINE)


def loopback_bytes() -> int:
    """Bytes that this machine's processes have received from each other over the loopback device."""
    found = _LOOPBACK.search(Path("/proc/net/dev").read_text(encoding="ascii"))
    return int(found[1]) if found else 0


def _config(given: dict[str, Any]) -> TltConfig:
    return TltConfig(
        model=ModelConfig(path=Path(given["folder"])),
        tasks=[TaskConfig(name="gcd")],
        actor=ActorConfig(transformer_impl="local", megatron=given["megatron"]),
        rollout=RolloutConfig(
            tensor_parallel_size=given["engine_tp"],
            max_prompt_tokens=64,
            max_response_tokens=64,
            vllm={"dtype": "bfloat16", "load_format": "dummy", "num_gpu_blocks_override": 16, "max_num_seqs": 4},
        ),
        speculation=SpeculationConfig(enabled=False),
        reshard=ReshardConfig(staging_mb=given["staging_mb"]),
    )


class _ReshardBench:
    """An actor, an engine, and the two methods between them."""

    def __init__(self, given: dict[str, Any]) -> None:
        config = _config(given)
        folder = Path(given["folder"])
        self._policy = Policy(folder, config.actor, seed=0, trainable=False)
        self._engine = VllmEngine(folder, config.rollout, config.speculation, seed=0)
        self._ways: dict[str, WeightSync] = {
            "direct": policy_sync(config, self._policy, self._engine),
            "export": ExportSync(self._policy.export_weights, self._engine),
        }
        self._version = 0

    def sync(self, method: str, verify: bool) -> SyncReport:
        """Synchronization of all ranks, from the start of the first to the end of the last."""
        self._version += 1
        report = self._ways[method].sync(version=self._version, verify=verify)
        barrier()
        return report

    @torch.no_grad()
    def change(self) -> None:
        """Writes other weights to the actor, and clears the engine."""
        for chunk in self._policy.model.chunks:
            for parameter in chunk.parameters():
                parameter.mul_(-1.25)
        for _, view, _ in self._engine.read_weights():
            view.fill_(float("nan"))
        barrier()

    def looked_at(self, method: str) -> dict[str, Any]:
        """An untimed synchronization: its bytes, its memory, and the engine's contents after it."""
        self.change()
        before = loopback_bytes()
        report = self.sync(method, verify=False)
        moved = loopback_bytes() - before
        equal = self._equal()
        self.change()
        with PeakSampler() as memory:
            self.sync(method, verify=True)
        rows = all_gather_data((equal, memory.peak - memory.start, report.staging_bytes or 0), tuple[bool, int, int])
        return {
            "bit_equal": all(row[0] for row in rows),
            "rise": max(row[1] for row in rows),
            "buffers": max(row[2] for row in rows),
            "link_bytes": moved,
            "lower_bound": report.lower_bound_bytes,
        }

    def _equal(self) -> bool:
        exported = dict(self._policy.export_weights())
        same, names = True, set()
        for name, view, part in self._engine.read_weights():
            whole = exported[name]
            expected = whole if part is None else whole.narrow(part.dim, part.start, part.length)
            same = same and torch.equal(view.view(torch.int16), expected.contiguous().view(torch.int16))
            names.add(name)
        return same and bool(names)


def main(given_json: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    given = json.loads(given_json)
    prepare()
    initialize_distributed(600)
    bench = _ReshardBench(given)
    rows = {method: bench.looked_at(method) for method in ("direct", "export")}
    cases: dict[str, Callable[[], Any]] = {
        f"{method}{suffix}": partial(bench.sync, method, verify)
        for method in rows
        for suffix, verify in (("seconds", False), ("verified_seconds", True))
    }
    times = interleave(cases, given["repeats"], warmups=1)
    for method, row in rows.items():
        row["seconds"], row["verified_seconds"] = times[f"{method}seconds"], times[f"{method}verified_seconds"]
    if rank() == 0:
        atomic_write_text(Path(out), json.dumps({"lower_bound": rows["direct"]["lower_bound"], **rows}))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
