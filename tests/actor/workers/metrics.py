"""Updates one model under several layouts, with a loss whose metrics have names of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import LossInputs, Metrics
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import barrier, initialize_distributed, rank

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
MAX_TOKENS = (24, 96)
"""Several micro-batches to a rank, and one."""


def samples() -> RolloutBatch:
    """Only the last has a positive advantage, so most micro-batches and one data-parallel rank know of none."""
    generator = torch.Generator().manual_seed(3)
    lengths = (17, 9, 23, 12, 20, 15)
    sequences = [torch.randint(64, (length,), generator=generator).tolist() for length in lengths]
    advantages = [1.0 if i == len(lengths) - 1 else -1.0 for i in range(len(lengths))]
    return RolloutBatch.of_sequences(sequences, [length // 2 for length in lengths], advantages)


class OwnMetrics:
    """Negative log-likelihood."""

    def denominator(self, inputs: LossInputs) -> torch.Tensor:
        return inputs.mask_BT.sum()

    def __call__(
        self, log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, Metrics]:
        inputs = inputs.zero_outside()
        loss = -torch.where(inputs.inside_BT, log_probs_BT, 0.0).sum()
        metrics = {"advantage": inputs.advantages_BT.sum(), "nll": loss}
        if (inputs.advantages_BT > 0).any():
            metrics["rewarded/tokens"] = (inputs.advantages_BT > 0).sum()
        return loss, metrics


class WrongMetrics(OwnMetrics):
    """A metric for each token, or one with a name that is taken."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().__call__(log_probs_BT, entropy_BT, inputs)
        return loss, metrics | {self.name: log_probs_BT if self.name == "each" else loss}


def policy_of(folder: Path, layout: str, max_tokens: int) -> Policy:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    actor = ActorConfig(
        transformer_impl="local",
        megatron=LAYOUTS[layout],
        optimizer={"lr": 1e-3},
        max_tokens_per_micro_batch=max_tokens,
    )
    return Policy(folder, actor, seed=0)


def refusal(policy: Policy, name: str) -> str:
    try:
        policy.update(samples(), WrongMetrics(name))
    except RunError as error:
        return str(error)
    return ""


def main(folder: str, out: str) -> None:
    initialize_distributed(120)
    rows: dict[str, Any] = {}
    for layout in LAYOUTS:
        for max_tokens in MAX_TOKENS:
            policy = policy_of(Path(folder), layout, max_tokens)
            rows[f"{layout}-{max_tokens}"] = policy.update(samples(), OwnMetrics())
    dp2 = policy_of(Path(folder), "dp2", 96)  # where every rank computes the loss and raises
    refused = {name: refusal(dp2, name) for name in ("each", "lr")}
    Path(out, f"rank{rank()}.json").write_text(json.dumps({"rows": rows, "refused": refused}))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
