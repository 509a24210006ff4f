"""The run: build everything, evaluate, step, save, evaluate, report; stop and resume in between."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from megatron_tlt.actor.megatron_rng import RngState
from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.errors import TltError
from megatron_tlt.models.hf_folder import side_files_of
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.progress import Progress
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.device import (
    initialize_distributed,
    prepare,
    rank,
    seed_everything,
)
from megatron_tlt.platform.versions import check_versions
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.rewards.verifiers import verifiers_of
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.checkpoints import Checkpoints, TrainerState
from megatron_tlt.trainer.coordination import Coordination
from megatron_tlt.trainer.drafting import Drafting
from megatron_tlt.trainer.evaluation import Evaluation
from megatron_tlt.trainer.experience import ExperienceCollector, StopRequested, training_sampling
from megatron_tlt.trainer.export import save_hf_folder
from megatron_tlt.trainer.record import RunRecord
from megatron_tlt.trainer.speculation import Speculating
from megatron_tlt.trainer.step import StepResult, TrainingStep
from megatron_tlt.trainer.synchronization import policy_sync


class Interrupted(TltError):
    """The run was asked to stop, saved its state and left; the same command goes on from there."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signum).name} after {step} steps, state saved; run again to go on"
        )
        self.exit_status = 128 + signum


class StopFlag:
    """Remembers the first SIGINT or SIGTERM; asking it is cheap."""

    def __init__(self) -> None:
        self.signum: int | None = None
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum

    def __call__(self) -> bool:
        return self.signum is not None


class Run:
    """One rank of a run.

    Args:
        config: of the run.
        as_asked: what the engine is asked in place of a request; a measurement fixes lengths so.
    """

    def __init__(self, config: TltConfig, as_asked: Callable[[Request], Request] = lambda request: request) -> None:
        self._config = config
        self._stop = StopFlag()
        prepare()
        check_versions()
        initialize_distributed(config.launcher.collective_timeout_s)
        seed_everything(config.run.seed, config.run.deterministic)
        self._folder = Path(config.run.dir)
        self._timeline = Timeline(rank(), self._folder)
        source = model_folder(config)
        self._side_files = side_files_of(source)
        self.tokenizer = load_tokenizer(self._side_files)
        self.policy = Policy(source, config.actor, config.run.seed, total_steps=config.trainer.steps)
        needs_reference = config.algorithm.kl_coefficient > 0
        self._reference = Policy(source, config.actor, config.run.seed, trainable=False) if needs_reference else None
        if self._reference:
            self._reference.memory.offload()
        # the first reshard brings the weights
        rollout = config.rollout.model_copy(update={"vllm": {"load_format": "dummy", **config.rollout.vllm}})
        self.drafting = (
            Drafting(config, self._side_files, self._folder, self.policy) if config.drafter is not None else None
        )
        speculation = config.speculation
        if self.drafting is not None:
            speculation = speculation.model_copy(update={"path": self.drafting.first_folder})
        self.engine = VllmEngine(self._side_files, rollout, speculation, config.run.seed)
        if self.drafting is not None:
            self.drafting.attach(self.engine)
        self.bubble = (
            self.drafting.bubble(self.engine, self._timeline) if self.drafting and config.spot is not None else None
        )
        self._speculating = Speculating(config, self.engine.token_drafters)
        self._pool = RewardPool(config.rewards.workers, config.rewards.timeout_s, verifiers_of(config.tasks))
        self._collector = ExperienceCollector(
            self.engine,
            self.tokenizer,
            self._pool,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
            tensor_parallel_size=config.rollout.tensor_parallel_size,
            timeline=self._timeline,
            chooser=self._speculating.chooser,
            should_stop=self._stop,
            as_asked=as_asked,
        )
        self.step = TrainingStep(
            config,
            self.policy,
            self._reference,
            self.engine,
            self._collector,
            build_sources(config.tasks, "train", config.run.seed),
            policy_sync(config, self.policy, self.engine),
            self._timeline,
            training_sampling(config.rollout, self.tokenizer.eos_id),
            self.drafting,
            self._speculating,
            self.bubble,
        )
        self._checkpoints = Checkpoints(
            self._folder / "checkpoints",
            config.trainer.keep_checkpoints,
            [
                RngState(self.policy.layout),
                self._speculating,
                *([self.drafting] if self.drafting is not None else []),
            ],
            side_files=self._side_files,
            in_background=config.trainer.async_save,
        )
        self._state = TrainerState()
        self._saved_step: int | None = None

    def _sampling(self, temperature: float) -> SamplingSpec:
        """How held-out problems are answered."""
        rollout = self._config.rollout
        return SamplingSpec(
            temperature=temperature,
            top_k=rollout.sampling.top_k if temperature == rollout.sampling.temperature else -1,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=(self.tokenizer.eos_id,),
        )

    def train(self) -> None:
        """Trains from the newest checkpoint (or from the start) to the last step.

        Raises:
            Interrupted: a signal asked to stop; everything up to the last whole step is saved.
        """
        config = self._config
        self._state = self._checkpoints.resume(self.policy)
        self._saved_step = self._state.step or None
        if self.drafting is not None:
            self.drafting.take_newest_over()
        with (
            RunRecord(self._folder, config, self._state.step, self._timeline) as record,
            Progress(
                rank(), config.trainer.steps, done_steps=self._state.step, enabled=config.observe.progress
            ) as progress,
            self.serving(),
        ):
            try:
                self._loop(record, progress)
            except StopRequested:
                self.step.take_device_back()
                self._save()
                self._checkpoints.finish()
                record.finish_partial()
                raise Interrupted(self._stop.signum or signal.SIGTERM, self._state.step) from None
            with self._timeline.span("export"):
                save_hf_folder(self.policy, self._side_files, self._folder / "hf")
                if self.drafting is not None:
                    self.drafting.write(self._folder / "drafter" / "newest")
            record.finish(self._state, self.policy.layout)
        self.engine.shutdown()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """What steps need beside this process, while they go on: verifiers, and the spot trainer's coordinator."""
        with self._pool:
            if self.bubble is None:
                yield
                return
            with Coordination(self._config) as coordination, contextlib.closing(self.bubble):
                self.bubble.attach(coordination.client, coordination.refused)
                yield

    def evaluate_newest(self) -> None:
        """Evaluates the newest checkpoint (the initial model where there is none) and prints the result."""
        state = self._checkpoints.resume(self.policy)
        with Progress(rank(), 1, enabled=self._config.observe.progress) as progress, self._pool:
            self.step.reshard(state.step, StepResult(), progress.start)
            progress.message(self._line(state.step, self.evaluate(progress)))
        self.engine.shutdown()

    @staticmethod
    def _line(step: int, evaluation: Evaluation) -> str:
        greedy = f"  greedy {evaluation.greedy:.3f}" if evaluation.greedy is not None else ""
        return (
            f"held-out after step {step}: pass@1 {evaluation.pass_at_1:.3f}  "
            f"pass@{evaluation.samples} {evaluation.pass_at_k:.3f}{greedy}"
        )

    def _loop(self, record: RunRecord, progress: Progress) -> None:
        config = self._config
        self._timeline.begin_step(self._state.step)
        self.step.reshard(self._state.step, StepResult(), progress.start)
        self._evaluate(record, progress)
        while self._state.step < config.trainer.steps:
            step = self._state.step
            self._timeline.begin_step(step + 1)
            result = self.step.run(step, progress.start, progress.advance, self._updated)
            every = config.evaluation.every
            evaluated = None
            with self._phase("evaluate", result):
                if self._state.step == config.trainer.steps or (every and self._state.step % every == 0):
                    evaluated = self._evaluate(record, progress)
            record.step(self._state.step, result, evaluated, progress)
        self.step.take_device_back()
        self._save()
        self._checkpoints.finish()

    def _updated(self, result: StepResult) -> None:
        """A step's update is done: counts it, and saves where one is due."""
        self._state.step += 1
        every = self._config.trainer.save_every
        with self._phase("checkpoint", result):
            self._checkpoints.poll()
            if every and self._state.step % every == 0:
                self._save()
        if self._checkpoints.published_s is not None:
            result.metrics["checkpoint/background_s"] = self._checkpoints.published_s

    @contextlib.contextmanager
    def _phase(self, name: str, result: StepResult) -> Iterator[None]:
        began = time.perf_counter()
        with self._timeline.span(name):
            yield
        result.metrics[f"time/{name}"] = time.perf_counter() - began

    def _save(self) -> None:
        if self._state.step and self._saved_step != self._state.step:
            self._checkpoints.save(self.policy, self._state)
            self._saved_step = self._state.step

    def _evaluate(self, record: RunRecord, progress: Progress) -> Evaluation:
        """Held-out accuracy of the weights the engines hold; kept in the state, so that a resumed run asks once."""
        key = str(self._state.step)
        if key in self._state.evaluations:
            return Evaluation(**self._state.evaluations[key])
        evaluation = self.evaluate(progress)
        self._state.evaluations[key] = asdict(evaluation)
        self._saved_step = None
        record.evaluation(self._state.step, evaluation)
        progress.message(self._line(self._state.step, evaluation))
        return evaluation

    def evaluate(self, progress: Progress) -> Evaluation:
        """Samples the held-out problems; the same problems and seeds every time."""
        settings = self._config.evaluation
        problems = build_sources(self._config.tasks, "held_out", self._config.run.seed).held_out(settings.problems)
        seeds = (self._config.run.seed, "held-out")
        progress.start("evaluate", None)
        with self._timeline.span("evaluate"):
            sampled, _ = self._collector.collect(
                problems, settings.samples, self._sampling(settings.temperature), seeds, progress.advance
            )
            greedy = None
            if settings.greedy:
                scored, _ = self._collector.collect(problems, 1, self._sampling(0.0), seeds, progress.advance)
                greedy = [s.reward.correct for s in scored]
        correct = [0] * len(problems)
        for s in sampled:
            correct[s.problem] += s.reward.correct
        return Evaluation.from_counts(correct, settings.samples, greedy)


def train(config: TltConfig) -> None:
    """A worker's whole life under ``tlt train``."""
    Run(config).train()


def evaluate(config: TltConfig) -> None:
    """A worker's whole life under ``tlt eval``: prints the accuracy of the run's newest policy."""
    Run(config).evaluate_newest()
