"""Compares the actor's replicas while a run trains, so that silent corruption names its rank and is not saved."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megatron_tlt.actor.megatron_replicas import OddWeights, ReplicaComparison
from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.integrity import IntegrityConfig
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import show, warn

_MOST_RANKS = 8
"""Ranks that a message lists."""


class ReplicaCheck:
    """The comparisons that ``integrity.replicas_every`` asks for; its methods are collectives over the world.

    Both methods raise RunError on all ranks if replicas differ, or warn, as ``integrity.on_difference`` says. They do
    nothing if ``replicas_every`` is 0.
    """

    def __init__(self, config: IntegrityConfig, policy: Policy) -> None:
        self._config = config
        self._comparison = ReplicaComparison(policy) if config.replicas_every else None
        self._warned = ""
        if self._comparison is not None and not self._comparison.experts_compared:
            show("note: integrity.replicas_every: each expert has one replica; experts' weights are not compared")

    def after_update(self, step: int) -> dict[str, float]:
        """Compares if it is the turn of ``step`` (number of completed steps); the metrics, empty if it is not."""
        if self._comparison is None or step % self._config.replicas_every:
            return {}
        began = time.perf_counter()
        odd = self._compare(step, self._comparison)
        return {"integrity/replicas_ms": 1e3 * (time.perf_counter() - began), "integrity/odd_ranks": float(len(odd))}

    def before_save(self, step: int) -> None:
        """Compares before the weights after ``step`` are saved, so that no difference gets into a checkpoint."""
        if self._comparison is not None:
            self._compare(step, self._comparison)

    def _compare(self, step: int, comparison: ReplicaComparison) -> Mapping[int, OddWeights]:
        odd = comparison.run()
        if odd:
            message = difference(step, odd)
            if self._config.on_difference == "stop":
                raise RunError(message)
            if message != self._warned:
                warn(message)
            self._warned = message
        return odd


def difference(step: int, odd: Mapping[int, OddWeights]) -> str:
    """The message for ranks whose weights differ after ``step``: which, where, in what, and what to do."""
    proven = {rank: found for rank, found in odd.items() if found.proven}
    named = proven or odd  # where a majority convicts ranks, the others need not be suspected
    lines = [_of_rank(rank, found) for rank, found in list(named.items())[:_MOST_RANKS]]
    if len(named) > _MOST_RANKS:
        lines.append(f"{len(named) - _MOST_RANKS} more ranks")
    hosts = ",".join(sorted({found.host for found in named.values()}))
    if proven:
        advice = f"the memory or links of these devices may be faulty: exclude the node (sbatch --exclude={hosts})"
    else:
        advice = f"no majority tells which of them is wrong: check the nodes ({hosts}) with `tlt doctor`"
    return (
        f"after step {step} the actor's weights differ between replicas: {'; '.join(lines)}: {advice}, and run again: "
        "the run resumes from its newest checkpoint, which was saved before"
    )


def _of_rank(rank: int, found: OddWeights) -> str:
    more = f" (and {len(found.tensors) - 1} more tensors)" if len(found.tensors) > 1 else ""
    return f"rank {rank} on {found.host} in {found.tensors[0]}{more}"
