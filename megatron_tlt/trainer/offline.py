"""What is done with a checkpoint without training: an evaluation, or the rollouts of some steps."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.progress import Progress
from megatron_tlt.platform.collectives import failing_together
from megatron_tlt.platform.device import rank, show
from megatron_tlt.rewards.verifiers import verifiers_of
from megatron_tlt.trainer.checkpoints import TrainerState
from megatron_tlt.trainer.evaluation import EvaluationReport, EvaluationRequest
from megatron_tlt.trainer.experience import StopRequested
from megatron_tlt.trainer.loop import Run
from megatron_tlt.trainer.step import StepResult
from megatron_tlt.trainer.stopping import Interrupted


@dataclass(frozen=True)
class RolloutRequest:
    """A request to ``tlt rollout``: ``steps`` steps with a checkpoint's weights, recorded in the folder ``out``.

    ``checkpoint`` None: the newest checkpoint of the run, otherwise its initial weights.
    """

    out: str
    steps: int
    checkpoint: str | None = None


class OfflineRun(Run):
    """One rank of a run that is not continued; its folder may belong to a live run and is not changed."""

    def _restored(self, checkpoint: str | None, purpose: str) -> tuple[Path | None, TrainerState]:
        """Loads a checkpoint, or the newest one of the run, if any; its folder and state.

        Raises:
            ConfigError: the engine cannot generate with a checkpoint's weights.
        """
        if not self.engine.capabilities.weights:
            raise ConfigError(
                f"rollout.engine: found {self._config.rollout.engine!r}, which takes no weights; allowed for "
                f"{purpose}: an engine that generates with the checkpoint's weights"
            )
        folder = self._checkpoints.find(None if checkpoint is None else Path(checkpoint))
        return folder, TrainerState() if folder is None else self._checkpoints.load(self.policy, folder)

    def _progress(self, steps: int) -> Progress:
        return Progress(rank(), steps, enabled=self._config.observe.progress, on_phase=self._watch.begin)

    def roll_out(self, request: RolloutRequest) -> None:
        """Generates and records the responses of some training steps with the weights of one checkpoint.

        Problems and seeds are those that a training run has in these steps.

        Raises:
            ConfigError: the engine cannot generate with a checkpoint's weights.
            Interrupted: a signal requested a stop.
        """
        _, state = self._restored(request.checkpoint, "a rollout")
        with (
            Progress(
                rank(), request.steps, enabled=self._config.observe.progress, on_phase=self._watch.begin
            ) as progress,
            self._pool,
        ):
            self.step.recording = Path(request.out)
            self.step.reshard(state.step, StepResult(), progress.start)
            for step in range(state.step, state.step + request.steps):
                result = StepResult()
                try:
                    self.step.roll_out(step, state.problems_drawn, result, progress.start, progress.advance)
                except StopRequested:
                    raise Interrupted(
                        self._stop.signum or signal.SIGTERM, f"in the rollout of step {step + 1}"
                    ) from None
                state.problems_drawn = result.next_problem
                found = result.metrics
                progress.message(
                    f"rollout of step {step + 1}: {len(result.lengths)} responses, reward {found['reward/mean']:.3f}, "
                    f"{found['length/mean']:.0f} tokens on average, {found['time/rollout']:.1f} s"
                )
        show(f"recorded: {request.out}")
        self._watch.close()
        self.engine.shutdown()

    def evaluate_checkpoint(self, request: EvaluationRequest) -> None:
        """Evaluates the checkpoint that ``request`` names and prints the report.

        Raises:
            ConfigError: the engine cannot generate with a checkpoint's weights.
            Interrupted: a signal requested a stop.
        """
        folder, state = self._restored(request.checkpoint, "an evaluation")
        seed = self._config.run.seed
        problems = request.problems(seed, self._limit) if request.data is not None else self.evaluator.held_out()
        with (
            self._progress(1) as progress,
            self._pool,
        ):
            self.step.reshard(state.step, StepResult(), progress.start)
            try:
                evaluation, samples = self.evaluator.evaluate(progress, problems)
            except StopRequested:
                raise Interrupted(self._stop.signum or signal.SIGTERM, "while evaluating") from None
            step = state.step if folder is None or state.step else None
            report = EvaluationReport.of(self._config, request, model_folder(self._config), folder, step, evaluation)
            with failing_together():
                if rank() == 0:
                    report.write(request.json)
                    report.write_samples(request.samples_file, samples)
            show(report.text)
        self._watch.close()
        self.engine.shutdown()


def roll_out(config: TltConfig, request: RolloutRequest) -> None:
    """Entry point of a worker of ``tlt rollout``."""
    OfflineRun(config, read_only=True).roll_out(request)


def evaluate(config: TltConfig, request: EvaluationRequest) -> None:
    """Entry point of a worker of ``tlt eval``."""
    OfflineRun(config, verifiers=verifiers_of(request.tasks), read_only=True).evaluate_checkpoint(request)
