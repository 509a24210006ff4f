"""Runs routers' auxiliary losses and a padded vocabulary under several layouts in the same two processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.megatron_weights import shards
from megatron_tlt.actor.policy import Policy
from megatron_tlt.actor.scores import of_all_samples
from megatron_tlt.algorithms.clipped import ClippedPolicyLoss
from megatron_tlt.config.schema import ActorConfig, AlgorithmConfig
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.helpers.samples import Sample, batch_of, log_probs_of_all

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "cp2": {"context_parallel_size": 2},
    "tp2sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
VOCABULARY = 65
"""Two ranks hold 33 rows each: one of them is padding."""


def sample(length: int, seed: int, advantage: float = 0.0) -> Sample:
    """Of ``length`` tokens, half of them a response.

    Packed, the last token is left out: 17 tokens are 16, which every layout divides without padding.
    """
    tokens = torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    half = (0.0,) * (length - length // 2)
    return Sample(tuple(tokens), length // 2, advantage, old_log_probs=half, token_weights=half)


def repeated() -> list[Sample]:
    """However they are grouped, every micro-batch has the routing of each of them."""
    return [sample(17, seed=1)] * 8


def mixed() -> list[Sample]:
    """With room for one of them in a micro-batch, two of unequal length."""
    return [sample(17, seed=1), sample(33, seed=2)]


def policy_of(folder: Path, layout: str, max_tokens: int = 64, **options: Any) -> Policy:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    actor = ActorConfig(
        transformer_impl="local",
        megatron=LAYOUTS[layout] | options,
        optimizer={"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "clip_grad": 0.0},
        max_tokens_per_micro_batch=max_tokens,
    )
    return Policy(folder, actor, seed=0)


def gradients(policy: Policy, samples: list[Sample], aggregation: str, like: str) -> dict[str, Any]:
    """Gradients of the tensors whose name has ``like``: gradient descent at rate 1 changes a weight by its own."""
    names = [name for name in policy.model.weights.shapes if like in name]
    before = {name: tensor.clone() for name, tensor in policy.export_weights(names)}
    policy.update(batch_of(samples), ClippedPolicyLoss(AlgorithmConfig(loss_aggregation=aggregation)))
    return {name: (before[name] - tensor).tolist() for name, tensor in policy.export_weights(names)}


def auxiliary_rows(folder: Path) -> dict[str, Any]:
    """The routers' gradients where only the auxiliary losses have one."""
    rows: dict[str, Any] = {}
    for layout in LAYOUTS:
        for aggregation in ("token_mean", "sequence_mean"):
            for max_tokens in (17, 68):
                policy = policy_of(folder, layout, max_tokens, **AUXILIARY)
                rows[f"repeated-{layout}-{aggregation}-{max_tokens}"] = gradients(
                    policy, repeated(), aggregation, "mlp.gate"
                )
            policy = policy_of(folder, layout, 33, **AUXILIARY)
            rows[f"mixed-{layout}-{aggregation}"] = gradients(policy, mixed(), aggregation, "mlp.gate")
    return rows


@torch.no_grad()
def fill_padding(policy: Policy, value: float) -> int:
    """Sets the rows of the output layer that pad the vocabulary; how many this rank has."""
    padded = 0
    for shard in shards(policy.model.weights, policy.model.chunks):
        if shard.name == "output_layer.weight":
            held = sum(piece.length for piece in shard.pieces)
            shard.parameter[held:] = value
            padded = len(shard.parameter) - held
    return padded


def vocabulary_rows(folder: Path) -> dict[str, Any]:
    """Log-probs, entropies and the output layer's gradient, its padding set to what would win every softmax."""
    rows: dict[str, Any] = {}
    for layout in ("dp2", "tp2sp"):
        policy = policy_of(folder, layout)
        padded = fill_padding(policy, 3.0)
        samples = [sample(9, seed=3, advantage=1.0), sample(14, seed=4, advantage=-0.5)]
        batch = batch_of(samples)
        scores = policy.log_probs(batch, 0.7)
        log_probs = log_probs_of_all(batch, scores)
        # old log-probs of 0 would clip: these are the policy's own
        own = [
            Sample(s.token_ids, s.prompt_length, s.advantage, old_log_probs=tuple(found))
            for s, found in zip(samples, log_probs, strict=True)
        ]
        rows[layout] = {
            "padded": padded,
            "log_probs": log_probs,
            "entropies": of_all_samples(scores.entropy_sums_H[:, None], scores.samples, len(samples))[:, 0].tolist(),
            "gradient": gradients(policy, own, "token_mean", "lm_head"),
            "exported": [list(tensor.shape) for _, tensor in policy.export_weights(["lm_head.weight"])],
        }
    return rows


def refused(folder: Path) -> str:
    """What an update says of an advantage that is not finite, where nothing clips the gradient."""
    try:
        policy_of(folder, "dp2").update(
            batch_of([sample(9, 3, float("inf"))] * 2), ClippedPolicyLoss(AlgorithmConfig())
        )
    except RunError as error:
        return str(error)
    return ""


def main(moe: str, odd: str, out: str) -> None:
    initialize_distributed(120)
    rows = {"auxiliary": auxiliary_rows(Path(moe)), "vocabulary": vocabulary_rows(Path(odd))}
    rows["refused"] = refused(Path(odd))
    last = rank() == 1  # the rank with the padding
    if last:
        Path(out).write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
