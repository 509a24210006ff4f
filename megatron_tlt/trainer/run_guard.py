"""The guard of a run's updates: judges them, keeps the responses of bad ones, and says when the run goes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import RunError, RunRefused
from megatron_tlt.platform.device import warn
from megatron_tlt.trainer.guard_batch import save_batch, step_folder
from megatron_tlt.trainer.rank_speeds import RankSpeeds
from megatron_tlt.trainer.rank_times import RankTimes
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.update_guard import UpdateGuard, Verdict

_WHAT_FOLLOWS = {
    "warn": "the update is applied",
    "skip": "the update is skipped",
    "go_back": "the run goes back to its newest checkpoint",
    "stop": "the run stops",
}


class RunGuard:
    """Follows the updates of a run, on every rank alike, and the times of its ranks.

    Args:
        config: of the run, with a section ``guard``.
        policy: whose passes are timed.
        speeds: of the ranks.
    """

    def __init__(self, config: TltConfig, policy: Policy, speeds: RankSpeeds) -> None:
        assert config.guard is not None
        self._settings, self._folder = config.guard, Path(config.run.dir)
        self._updates_per_step = config.trainer.mini_batches
        self._guard = UpdateGuard(config.guard)
        self._times = None
        if config.guard.straggler_factor is not None:
            # elsewhere a step trains on other tokens than its engines decoded
            whole = not (config.tail or config.schedule or config.algorithm.dynamic_sampling.enabled)
            engine = speeds.own_engine(config.rollout.tensor_parallel_size)
            replica = 1.0 if policy.speeds is None else policy.speeds[policy.replica]
            self._times = RankTimes(config.guard, policy.clock, counts_rollout=whole, engine=engine, replica=replica)
        self.has_checkpoint = False
        """Whether there is one to go back to; the run sets it."""
        self._verdicts: list[Verdict] = []
        self._step = 0
        self._responses: tuple[Sequence[ScoredResponse], RolloutBatch] | None = None

    def begin_step(
        self, step: int, scored: Sequence[ScoredResponse], batch: RolloutBatch, rollout_s: float = 0.0
    ) -> None:
        """Before the updates of step ``step``, counted from 0, on these responses as the engines gave them.

        ``rollout_s``: seconds that this rank's engine took for its own.
        """
        self._step, self._responses, self._verdicts = step, (scored, batch), []
        if self._times is not None:
            self._times.end_rollout(rollout_s, batch)

    def judge(self, norm: float, loss: float) -> bool:
        """As ``Policy.update`` asks; see ``UpdateGuard.judge``."""
        verdict = self._guard.judge(norm, loss, may_go_back=self.has_checkpoint)
        self._verdicts.append(verdict)
        return verdict.is_applied

    def settle(self) -> None:
        """After an update: says what is wrong with it, and keeps the step's responses; a collective if it is bad.

        Raises:
            RunRefused: on every rank, if the run must stop.
        """
        verdict = self._verdicts[-1]
        if verdict.decision == "accept":
            return
        against = "" if verdict.median is None else f", median {verdict.median:.4g}"
        found = f"gradient norm {verdict.norm:.4g}{against}, loss {verdict.loss:.4g}"
        line = f"step {self._step + 1}, update {len(self._verdicts)}: {found}: {verdict.why}"
        kept = "" if verdict.is_applied else f"; {self._keep()}"
        if verdict.decision == "stop":
            raise RunRefused(f"{line}; the run stops{kept}; the last checkpoint is unaffected")
        warn(f"guard: {line}; {_WHAT_FOLLOWS[verdict.decision]}{kept}")

    def _keep(self) -> str:
        """Writes the responses; returns where, or why not: without them the run goes on all the same."""
        assert self._responses is not None
        folder = step_folder(self._folder, self._step + 1)
        about = {"step": self._step + 1, "updates": [asdict(verdict) for verdict in self._verdicts]}
        try:
            save_batch(folder, *self._responses, about, self._settings.keep_batches)
        except RunError as error:
            return f"its responses are not kept: {error}"
        return f"its responses are in {folder}"

    @property
    def goes_back(self) -> bool:
        """Whether the run must go back before any other update."""
        return bool(self._verdicts) and self._verdicts[-1].decision == "go_back"

    @property
    def unwanted_ranks(self) -> list[int]:
        """Slow ranks whose nodes are to be left out, the same on all ranks."""
        if self._times is None or self._settings.on_straggler != "leave_out":
            return []
        return self._times.slow_ranks

    def end_step(self, rows: Sequence[dict[str, float]]) -> tuple[list[dict[str, float]], dict[str, float]]:
        """The metrics of those updates that were applied (of all, if none was), and the guard's own; a collective."""
        self._responses = None
        applied = [row for row, verdict in zip(rows, self._verdicts, strict=True) if verdict.is_applied]
        skipped = sum(verdict.decision == "skip" for verdict in self._verdicts)
        own = {"guard/skipped": float(skipped), "guard/went_back": float(self._guard.returns)}
        if self._times is not None:
            own |= self._times.end_step()
        return applied or list(rows), own

    @property
    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._guard.state

    def restore(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Resumes after ``step`` steps; ``saved``: the :attr:`state` in the checkpoint, if it has one."""
        self.has_checkpoint = step > 0
        self._guard.restore(saved, step * self._updates_per_step)

    def go_back(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """The run has gone back to the checkpoint after ``step`` steps, with this :attr:`state`."""
        self._verdicts = []
        self._guard.go_back(saved, step * self._updates_per_step)
