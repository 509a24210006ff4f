"""Takes the same step from even shares and from shares by speed, by layout."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.registry import build_loss
from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.speeds import replicas_of
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.actor.workers.accumulation import NO_AUXILIARY_LOSS, RATE
from tests.actor.workers.layouts import CP2, EP2, PP2, TP2SP, VP2, batch, policy_of, weights_of
from tests.helpers.samples import log_probs_of_all

CASES: dict[int, dict[str, tuple[dict[str, Any], list[float]]]] = {
    2: {
        "dp2": ({}, [1, 0.5]),
        "dp2-padded": ({}, [1, 0.5]),
        "dp2-empty": ({}, [1, 0.01]),  # nothing is left for the slow replica
        "moe-ep2": (NO_AUXILIARY_LOSS | EP2, [1, 0.5]),
        "moe-ep2-empty": (NO_AUXILIARY_LOSS | EP2, [1, 0.01]),
        "dp2-whole": ({}, [0.5, 1]),
    },
    4: {
        "dp4": ({}, [1, 0.5, 1, 0.25]),
        "tp2sp": (TP2SP, [1, 1, 1, 0.5]),
        "pp2": (PP2, [1, 0.5, 1, 1]),
        "pp2vp2": (PP2 | VP2, [1, 1, 0.5, 1]),
        "cp2": (CP2, [0.5, 1, 1, 1]),
    },
}
"""Layout and speeds of the ranks."""


def stepping(folder: Path, name: str, megatron: dict[str, Any], speeds: list[float] | None) -> Policy:
    """A policy whose step is its gradient, and so long that the rounding of the weights does not hide it."""
    optimizer = {"optimizer": "sgd", "lr": RATE, "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    sharding = "tensor" if name.endswith("-whole") else "element"
    return policy_of(
        folder, name, speeds, megatron=megatron, optimizer=optimizer, optimizer_sharding=sharding, lr_warmup_steps=0
    )


def main(folder: str, out: str) -> None:
    initialize_distributed(120)
    rows: dict[str, Any] = {}
    world = dist.get_world_size()
    loss = build_loss(AlgorithmConfig())
    data = batch()
    data = data.with_columns(
        old_log_probs_G=torch.full((sum(data.response_length(i) for i in data.held),), -4.0),
        advantages_N=torch.linspace(-1, 1, data.num_samples, dtype=torch.float64),
    )
    for name, (megatron, speeds) in CASES[world].items():
        found = {}
        for case, given in (("even", None), ("uneven", speeds)):
            policy = stepping(Path(folder), name, megatron, given)
            initial = weights_of(policy)
            tokens = [sum(data.lengths[i] for i in policy.share(data.lengths))]
            found[case] = {
                "replicas": all_gather_data(policy.replica, int),
                "tokens": all_gather_data(tokens, list[int]),
                "log_probs": log_probs_of_all(data, policy.log_probs(data)),
                "metrics": policy.update(data, loss),
                "weights": weights_of(policy),
            }
        even, uneven = found["even"], found["uneven"]
        steps = {key: even["weights"][key] - initial[key] for key in initial}
        errors = {key: float((uneven["weights"][key] - even["weights"][key]).norm()) for key in initial}
        assert even["replicas"] == replicas_of(world, Layout.read(megatron, world)), "as Megatron-Core numbers them"
        rows[name] = {
            "error": math.hypot(*errors.values()) / math.hypot(*(float(step.norm()) for step in steps.values())),
            "replicas": even["replicas"],
            "speeds": policy.speeds,
            **{key: {case: found[case][key] for case in found} for key in ("tokens", "log_probs", "metrics")},
        }
    if rank() == 0:
        Path(out, "rows.json").write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
