"""Runs one model under several layouts in the same two processes and writes what each one computed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_tlt.actor.megatron_checkpoint import load_policy, save_policy
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.helpers.samples import Sample, batch_of, log_probs_of_all

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VP2 = {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2-padded": {},
    "dp2-overlap": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2sp": TP2SP,
    "tp2sp-padded": TP2SP,
    "pp2": PP2,
    "pp2-padded": PP2,
    "pp2vp2": PP2 | VP2,
    "cp2": CP2,
    "cp2-padded": CP2,
    "moe-dp2": {},
    "moe-tp2": TP2SP,
    "moe-ep2": EP2,
    "moe-ep2-padded": EP2,
    "moe-tp2ep2": TP2SP | EP2 | {"expert_tensor_parallel_size": 1},
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10000}
TEMPERATURE = 0.7
TIMEOUT_S = 120


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    out = []
    for length in (6, 30, 11, 17, 8, 23):
        tokens = torch.randint(64, (length,), generator=generator).tolist()
        out.append(Sample(tuple(tokens), 2 + length // 4))
    return out


def batch() -> RolloutBatch:
    """The samples, as every rank holds them."""
    return batch_of(samples())


def model_of(folder: Path, name: str) -> Path:
    """The mixture of experts or the dense model."""
    return folder / ("moe" if name.startswith("moe") else "dense")


def policy_of(folder: Path, name: str, speeds: Sequence[float] | None = None, **changes: Any) -> Policy:
    """A policy under a layout, the only one of its process; ``changes`` replace keys of the actor's section."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    settings = {
        "megatron": LAYOUTS.get(name),
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "lr_warmup_steps": 6,  # a rate that changes every step shows whether the schedule was resumed
        **changes,
    }
    actor = ActorConfig(
        transformer_impl="local",
        packing=not name.endswith("-padded"),
        ddp=OVERLAP if name.endswith("-overlap") else {},
        max_tokens_per_micro_batch=64,
        **settings,
    )
    return Policy(model_of(folder, name), actor, seed=0, total_steps=8, speeds=speeds)


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export_weights()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def timeouts() -> list[float]:
    """Seconds after which a collective of some group of this process fails."""
    # the one that Megatron-Core 0.16 makes with torch's default; no collective of a training step is over it
    groups = [g for g in dist.distributed_c10d._world.pg_map if g.group_desc != "EXPERT_DATA_PARALLEL_GROUP_GLOO"]
    return sorted({g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups})


def main(folder: str, out: str) -> None:
    initialize_distributed(TIMEOUT_S)
    data, rows = batch(), {}
    for name in LAYOUTS:
        policy = policy_of(Path(folder), name)
        initial = load_file(model_of(Path(folder), name) / "model.safetensors")
        row: dict[str, Any] = {"exported_equals_loaded": equal(weights_of(policy), initial)}
        row["timeouts"] = timeouts()
        row["log_probs"] = log_probs_of_all(data, policy.log_probs(data, TEMPERATURE))
        steps = [policy.update(data, negative_log_likelihood) for _ in range(2)]
        row["loss"], row["grad_norm"] = [s["loss"] for s in steps], [s["grad_norm"] for s in steps]
        checkpoint = Path(out) / f"checkpoint-{name}"
        if rank() == 0:
            checkpoint.mkdir()
        barrier()
        save_policy(policy, checkpoint)
        policy.update(data, negative_log_likelihood)
        uninterrupted = weights_of(policy)
        resumed = policy_of(Path(folder), name)
        load_policy(resumed, checkpoint)
        resumed.update(data, negative_log_likelihood)
        row["resume_is_bit_equal"] = equal(uninterrupted, weights_of(resumed))
        rows[name] = row
    if rank() == 0:
        Path(out, "rows.json").write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
