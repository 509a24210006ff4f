"""Skips bad updates under two processes, and compares the policy with one that never saw the bad batch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor import policy as policy_module
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import LossInputs, Metrics, NegativeLogLikelihood, negative_log_likelihood
from megatron_tlt.config.guard import GuardConfig
from megatron_tlt.config.optimizer import LrScheduleConfig, OptimizerSplitConfig
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.trainer.update_guard import UpdateGuard
from tests.actor.workers.layouts import OVERLAP, batch, equal, weights_of


@dataclass(frozen=True)
class Case:
    path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    sharding: str = "auto"
    split: OptimizerSplitConfig | None = None
    megatron: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)


CASES = {
    "adam": Case("adam"),
    "adam-overlap-bf16": Case("adam", ddp=OVERLAP, megatron={"bf16": True}),
    "nadam": Case("torch.optim.NAdam"),
    "muon-split": Case("torch.optim.Muon", split=OptimizerSplitConfig(lr=1e-3)),
    "adamw-tensor": Case("torch.optim.AdamW", sharding="tensor"),
}


class OnRankOne(NegativeLogLikelihood):
    """The loss times a factor on rank 1."""

    def __init__(self, factor: float) -> None:
        self._factor = factor if rank() == 1 else 1.0

    def __call__(
        self, log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().__call__(log_probs_BT, entropy_BT, inputs)
        return loss * self._factor, metrics


def policy_of(model: Path, case: Case) -> Policy:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    actor = ActorConfig(
        transformer_impl="local",
        megatron=case.megatron,
        ddp=case.ddp,
        optimizer={"optimizer": case.path, "lr": 1e-3, "weight_decay": 0.01, "clip_grad": 0.5},
        optimizer_arguments=case.arguments,
        optimizer_sharding=case.sharding,
        optimizer_split=case.split,
        lr_warmup_steps=2,
        lr_schedule=LrScheduleConfig(kind="linear"),  # another rate at every update
        max_tokens_per_micro_batch=64,
    )
    return Policy(model, actor, seed=0, total_steps=8)


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found.detach().clone()]
    if isinstance(found, dict):
        return [tensor for value in found.values() for tensor in _tensors(value)]
    if isinstance(found, int | float) and not isinstance(found, bool):
        return [torch.tensor(float(found), dtype=torch.float64)]
    return []


def state_of(policy: Policy) -> list[torch.Tensor]:
    """All that the optimizer keeps on this rank, and its rates."""
    whole = getattr(policy.optimizer, "parts", None)
    own = [one.optimizer for one in (whole or policy.optimizer.chained_optimizers) if one.optimizer is not None]
    found = [tensor for one in own for state in one.state.values() for tensor in _tensors(state)]
    found += [p.detach().clone() for one in own for group in one.param_groups for p in group["params"]]
    return [*found, torch.tensor([group["lr"] for group in policy.optimizer.param_groups])]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _by_megatrons_step(policy: Policy, expected: tuple[dict[str, torch.Tensor], list[torch.Tensor]]) -> bool:
    """Whether two updates with the ``step`` of Megatron's optimizer in one piece lead to the same bits."""

    def whole(optimizer: Any, *_: Any) -> tuple[float, bool]:
        succeeded, norm, _ = optimizer.step()
        return float(norm), succeeded

    parts, policy_module.take_step = policy_module.take_step, whole
    try:
        for _ in range(2):
            policy.update(batch(), negative_log_likelihood)
    finally:
        policy_module.take_step = parts
    return equal(weights_of(policy), expected[0]) and same(state_of(policy), expected[1])


def run(model: Path, case: Case) -> dict[str, Any]:
    settings = GuardConfig(on_nonfinite="skip", spike_factor=4.0, spike_window=4, on_spike="skip", most_in_a_row=3)
    guard, data, row = UpdateGuard(settings), batch(), dict[str, Any]()
    decisions = []

    def judge(norm: float, loss: float) -> bool:
        verdict = guard.judge(norm, loss)
        decisions.append(verdict.decision)
        return verdict.is_applied

    never = policy_of(model, case)
    for _ in range(2):
        expected = never.update(data, negative_log_likelihood)
    norms = [expected["grad_norm"]]
    never_two = weights_of(never), state_of(never)
    norms.append(never.update(data, negative_log_likelihood)["grad_norm"])
    never_three = weights_of(never), state_of(never)
    if not case.split and case.sharding == "auto":
        row["megatrons_step_equal"] = _by_megatrons_step(policy_of(model, case), never_two)
    policy = policy_of(model, case)
    for _ in range(2):
        policy.update(data, negative_log_likelihood, judge=judge)
    row["judged_as_unjudged"] = equal(weights_of(policy), never_two[0]) and same(state_of(policy), never_two[1])
    known = dict(guard.state)
    for name, factor in (("nan", float("nan")), ("inf", float("inf")), ("spike", 1e4)):
        found = policy.update(data, OnRankOne(factor), judge=judge)
        row[f"{name}_norm"] = str(found["grad_norm"])
        row[f"{name}_unchanged"] = equal(weights_of(policy), never_two[0]) and same(state_of(policy), never_two[1])
        guard.restore({**guard.state, "in_a_row": 0}, 0)
    row["norms_unchanged"] = guard.state["norms"] == known["norms"]
    row["next_norm_equal"] = policy.update(data, negative_log_likelihood, judge=judge)["grad_norm"] == norms[1]
    row["next_equal"] = equal(weights_of(policy), never_three[0]) and same(state_of(policy), never_three[1])
    row["decisions"] = decisions
    try:
        policy.update(data, OnRankOne(float("nan")))
    except RunError as error:
        row["stopped"] = str(error)
    return row


def main(models: str, out: str) -> None:
    initialize_distributed(120)
    rows = {name: run(Path(models, "dense"), case) for name, case in CASES.items()}
    if rank() == 0:
        Path(out, "rows.json").write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
