"""Scores and a step under given experts, under several layouts of four processes, one after another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.data.routes import RouteFormat
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.actor.workers.lora import EXPERTS, PolicyGradient
from tests.helpers.samples import batch_of, log_probs_of_all
from tests.helpers.sequences import samples

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "ep2 tp2": EXPERTS["ep2 tp2"],
    "pp2 recomputed": {"pipeline_model_parallel_size": 2, **RECOMPUTED},
    "cp2 padded": {"context_parallel_size": 2},
}
FORMAT = RouteFormat(layers=2, top_k=2, experts=4)
VOCABULARY, RATE = 64, 0.5


def experts(sample: int, length: int) -> torch.Tensor:
    """Any two experts of each token and layer, (T, L, K)."""
    generator = torch.Generator().manual_seed(100 + sample)
    return torch.rand(length, FORMAT.layers, FORMAT.experts, generator=generator).argsort(dim=2)[:, :, :2]


def weights(sample: int, length: int) -> torch.Tensor:
    """Any weights of these experts, (T, L, K), exact in float16; their sums are 1."""
    generator = torch.Generator().manual_seed(200 + sample)
    first = torch.randint(64, 960, (length, FORMAT.layers, 1), generator=generator) / 1024
    return torch.cat([first, 1 - first], dim=2)


def routed_batch(*, weighted: bool) -> RolloutBatch:
    """All samples with the experts of all tokens but the last."""
    rows = []
    for i, sample in enumerate(samples(VOCABULARY)):
        length = len(sample.token_ids) - 1
        row = FORMAT.encode(experts(i, length), weights(i, length) if weighted else None)
        rows += [row, torch.full((1, row.shape[1]), 255, dtype=torch.uint8)]
    return batch_of(samples(VOCABULARY)).with_columns(routes_SF=torch.cat(rows))


def build(folder: Path, layout: str) -> Policy:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    actor = ActorConfig(
        transformer_impl="local",
        megatron=LAYOUTS[layout],
        optimizer={"optimizer": "sgd", "sgd_momentum": 0.0, "lr": RATE, "clip_grad": 0.0},
        max_tokens_per_micro_batch=40,
        packing="padded" not in layout,
    )
    return Policy(folder, actor, seed=3)


def main(folder: str, out: str, weighted: str) -> None:
    initialize_distributed(120)
    routed = routed_batch(weighted=weighted == "weighted")
    for layout in LAYOUTS:
        policy = build(Path(folder), layout)
        rows = {
            "replayed": log_probs_of_all(routed, policy.log_probs(routed)),
            "own": log_probs_of_all(routed, policy.log_probs(routed.with_columns(routes_SF=None))),
        }
        found = {name: torch.tensor([value for one in row for value in one]) for name, row in rows.items()}
        metrics = policy.update(routed, PolicyGradient())
        found["agreement"] = torch.tensor(metrics["router_agreement"])
        found |= {f"after {name}": tensor.clone() for name, tensor in policy.export_weights()}
        assert "router_agreement" not in policy.update(routed.with_columns(routes_SF=None), PolicyGradient())
        if rank() == 0:
            save_file(found, Path(out, f"{layout}.safetensors"))
        barrier()


if __name__ == "__main__":
    main(*sys.argv[1:4])
