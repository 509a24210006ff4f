"""The policy that the KL penalty compares with: the initial policy, that of an earlier step, or a teacher."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from megatron_tlt.actor.megatron_checkpoint import save_weights
from megatron_tlt.actor.megatron_weights import load_checkpoint_weights
from megatron_tlt.actor.policy import Policy, PolicyScores
from megatron_tlt.config.algorithm import KlConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.collectives import failing_together
from megatron_tlt.platform.device import barrier, rank

_STEP = "step_"


class ReferencePolicy:
    """A policy that is not trained, on the device only while it scores.

    With ``kl.update_every`` it takes the trained policy's weights after every so many steps. Each time they are also
    written below ``folder``, for resumes from any checkpoint since; older ones are removed.

    Args:
        policy: of the reference, not trainable.
        settings: of the penalty.
        folder: of the written weights.
        checkpoints: the run's checkpoints, whose names end in their step.
    """

    def __init__(self, policy: Policy, settings: KlConfig, folder: Path, checkpoints: Path) -> None:
        self.policy = policy
        self._every = settings.update_every
        self._folder, self._checkpoints = folder, checkpoints
        policy.memory.offload()

    def log_probs(self, batch: RolloutBatch, temperature: float) -> PolicyScores:
        """As ``Policy.log_probs``, with the routers' own choice: other weights choose other experts."""
        self.policy.memory.reload()
        scores = self.policy.log_probs(batch.with_columns(routes_SF=None), temperature)
        self.policy.memory.offload()
        return scores

    @torch.no_grad()
    def follow(self, trained: Policy, step: int) -> None:
        """Takes the weights of ``trained``, which has had ``step`` updates, if it is their turn; a collective.

        Raises:
            RunError: they cannot be written.
        """
        if not self._every or step % self._every:
            return
        self.policy.memory.reload()
        trained.synchronize_parameters()
        for mine, theirs in zip(self.policy.model.chunks, trained.model.chunks, strict=True):
            for target, source in zip(mine.parameters(), theirs.parameters(), strict=True):
                target.copy_(source)
        final = self._folder / f"{_STEP}{step:06d}"
        partial = final.with_name(f".{final.name}.tmp")
        with failing_together():
            if rank() == 0:
                for old in (partial, final):
                    shutil.rmtree(old, ignore_errors=True)
                partial.mkdir(parents=True)
        save_weights(self.policy, partial)
        with failing_together():
            if rank() == 0:
                os.replace(partial, final)
                self._remove_unneeded()
        barrier()
        self.policy.memory.offload()

    def resume(self, step: int) -> None:
        """Loads the weights that the reference had after ``step`` updates; a collective.

        Raises:
            ConfigError: they belong to another model.
        RunError: they cannot be read.
        """
        moved = step // self._every * self._every if self._every else 0
        if moved:
            self.policy.memory.reload()
            load_checkpoint_weights(self.policy.model.chunks, self._folder / f"{_STEP}{moved:06d}")
            self.policy.memory.offload()

    def _remove_unneeded(self) -> None:
        """Removes weights that no checkpoint resumes with; a checkpoint that is being written is newer than all."""
        steps = [int(path.name.removeprefix(_STEP)) for path in self._checkpoints.glob(f"{_STEP}*")]
        oldest = min(steps, default=0) // self._every * self._every
        for path in self._folder.glob(f"{_STEP}*"):
            if int(path.name.removeprefix(_STEP)) < oldest:
                shutil.rmtree(path)
