"""The run: builds all components, then evaluates, steps, saves and reports; handles stop and resume."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_tlt.actor.megatron_rng import RngState
from megatron_tlt.actor.policy import Policy
from megatron_tlt.checkpoint.parts import CheckpointPart
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.strict import logical_shards
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.drafter.folder import NEWEST_DRAFTER
from megatron_tlt.environments.pool import EnvironmentPool
from megatron_tlt.errors import NodesChange
from megatron_tlt.models.hf_folder import side_files_of
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.progress import Progress
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.device import (
    initialize_distributed,
    log_once,
    prepare,
    rank,
    seed_everything,
    warn,
    world_size,
)
from megatron_tlt.platform.phase_watch import PhaseWatch
from megatron_tlt.platform.versions import check_versions
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.rewards.verifiers import verifiers_of
from megatron_tlt.rollout.engines import build_engine, libraries_not_needed
from megatron_tlt.rollout.types import Request
from megatron_tlt.tasks.curriculum import CurriculumMixture
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.checkpoints import Checkpoints, TrainerState
from megatron_tlt.trainer.coordination import Coordination, check_coordinator_host
from megatron_tlt.trainer.dealing import Dealing
from megatron_tlt.trainer.drafter_manager import DrafterManager
from megatron_tlt.trainer.evaluator import Evaluator
from megatron_tlt.trainer.experience import ExperienceCollector, StopRequested
from megatron_tlt.trainer.export import save_adapter_folder, save_hf_folder
from megatron_tlt.trainer.node_changes import NodeChanges
from megatron_tlt.trainer.rank_speeds import RankSpeeds
from megatron_tlt.trainer.record import RunRecord
from megatron_tlt.trainer.reference import ReferencePolicy
from megatron_tlt.trainer.requests import prompt_limit, training_sampling
from megatron_tlt.trainer.run_guard import RunGuard
from megatron_tlt.trainer.samples import SampleRows
from megatron_tlt.trainer.snapshots import Snapshots
from megatron_tlt.trainer.speculation_state import SpeculationState
from megatron_tlt.trainer.step import StepResult, TrainingStep
from megatron_tlt.trainer.stopping import Interrupted, StopFlag
from megatron_tlt.trainer.synchronization import policy_sync


class Run:
    """One rank of a run.

    Args:
        config: of the run.
        request_transform: replaces each request before it reaches the engine; benchmarks use it to fix lengths.
        verifiers: needed in addition to those of the config's tasks.
        read_only: do not change the run's folder, as another process may be training this run.
    """

    def __init__(
        self,
        config: TltConfig,
        request_transform: Callable[[Request], Request] = lambda request: request,
        *,
        verifiers: Sequence[str] = (),
        read_only: bool = False,
    ) -> None:
        if read_only:  # nothing is trained in a bubble
            config = config.model_copy(update={"spot": None, "stream": None})
        self._config = config
        self._stop = StopFlag()
        deterministic = config.run.deterministic or logical_shards(config) is not None
        prepare(config.actor.tensor_parallel_size, deterministic)
        check_versions(libraries_not_needed(config.rollout))
        initialize_distributed(*config.launcher.timeouts_s, config.run.dir / "logs")
        self._watch = PhaseWatch.of_this_rank(config.launcher.phase_limits_s, config.run.dir / "logs")
        self._watch.begin("start")
        if not read_only:
            check_coordinator_host(config)
        seed_everything(config.run.seed)
        self._folder = Path(config.run.dir)
        self.timeline = Timeline(rank(), None if read_only else self._folder)
        source = model_folder(config)
        self._side_files = side_files_of(source)
        self.tokenizer = load_tokenizer(self._side_files)
        if not config.model.verify:
            warn(f"model.verify is false: the weights in {source} are not verified")
        self._speeds = RankSpeeds.of(config)
        self.policy = self._build_policy(source, total_steps=config.trainer.updates, verify=config.model.verify)
        self._reference = self._build_reference(source)
        self.drafting = (
            DrafterManager(config, self._side_files, self._folder, self.policy, read_only=read_only)
            if config.drafter is not None
            else None
        )
        speculation = config.speculation
        if self.drafting is not None:
            speculation = speculation.model_copy(update={"path": self.drafting.first_folder})
        # an engine takes the device's free memory as it is built
        self.policy.memory.offload()
        if self.drafting is not None:
            self.drafting.leave_device()
        self.engine = build_engine(config, self._side_files, speculation)
        if self.drafting is not None:
            self.drafting.attach(self.engine)
        self.bubble = None
        if self.drafting and config.spot is not None:
            self.bubble = self.drafting.spot_trainer(self.engine, self.timeline)
        dealing = Dealing(world_size() // config.rollout.tensor_parallel_size, self._speeds.engines)
        self._speculation = SpeculationState(config, self.engine.token_drafters, dealing)
        self._limit = prompt_limit(config.rollout, self.tokenizer)
        problems = build_sources(config.tasks, "train", config.run.seed, self._limit)
        curriculum = config.trainer.curriculum
        self._curriculum = CurriculumMixture(problems, curriculum, config.run.seed) if curriculum else None
        needed = sorted({*verifiers_of(config.all_tasks), *verifiers})
        rewards = config.rewards
        self._pool = RewardPool(rewards.workers, rewards.timeout_s, needed, adaptive=rewards.adaptive_timeout)
        self._environments = EnvironmentPool(config.rewards.workers, config.rewards.timeout_s)
        self._collector = ExperienceCollector(
            self.engine,
            self.tokenizer,
            self._pool,
            environments=self._environments,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
            tensor_parallel_size=config.rollout.tensor_parallel_size,
            timeline=self.timeline,
            dealing=dealing,
            speculation=self._speculation.engine,
            has_routes=config.rollout.router_replay != "none",
            on_collected=self._speculation.end_rollout,
            should_stop=self._stop,
            request_transform=request_transform,
        )
        # only rank 0 writes samples, so only rank 0 chooses them
        per_task = config.observe.samples_per_task if rank() == 0 else 0
        samples = SampleRows(self.tokenizer, per_task, config.observe.sample_characters)
        self.evaluator = Evaluator(
            config, self._collector, self._pool, samples, self.tokenizer, self.timeline, self._limit
        )
        self._guard = RunGuard(config, self.policy, self._speeds) if config.guard is not None else None
        self.step = TrainingStep(
            config,
            self.policy,
            self._reference,
            self.engine,
            self._collector,
            self._curriculum or problems,
            policy_sync(config, self.policy, self.engine),
            self.timeline,
            training_sampling(config.rollout, self.tokenizer),
            self.drafting,
            self._speculation,
            self.bubble,
            samples,
            self._guard,
        )
        self._rng = RngState(self.policy.layout)
        parts: list[CheckpointPart] = [
            self._rng,
            self._speculation,
            *([self.drafting] if self.drafting is not None else []),
            *([self.step.rounds.carried] if self.step.rounds and self.step.rounds.carried else []),
        ]
        self._snapshots = Snapshots.of_launch(parts, config) if config.elastic and not read_only else None
        self._nodes = NodeChanges.of_launch(config.elastic) if not read_only else None
        self._checkpoints = Checkpoints(
            self._folder / "checkpoints",
            config.trainer.keep_checkpoints,
            parts,
            side_files=self._side_files,
            in_background=config.trainer.async_save,
            verify=config.integrity.checkpoints,
            read_only=read_only,
        )
        self._state = TrainerState()
        self._saved_step: int | None = None
        self.step.note_start()
        self.step.switch_to_actor()  # a checkpoint is loaded, or the first weights sent, from the device
        self._watch.pause()

    def _continue(self) -> None:
        if self._curriculum is not None and self._state.curriculum is not None:
            self._curriculum.restore(self._state.curriculum)
        if self._guard is not None:
            self._guard.restore(self._state.guard, self._state.step)

    def _build_policy(self, source: Path, **given: Any) -> Policy:
        config, shards = self._config, logical_shards(self._config)
        return Policy(source, config.actor, config.run.seed, logical_shards=shards, speeds=self._speeds.actor, **given)

    def _build_reference(self, initial: Path) -> ReferencePolicy | None:
        config, settings = self._config, self._config.algorithm.kl
        if not settings.coefficient:
            return None
        teacher = settings.reference
        verify = teacher is not None and config.model.verify  # the policy's own weights are verified already
        policy = self._build_policy(teacher or initial, trainable=False, verify=verify)
        return ReferencePolicy(policy, settings, self._folder / "reference", self._folder / "checkpoints")

    def train(self) -> None:
        """Trains from the newest checkpoint (or from the start) to the last step.

        Raises:
            Interrupted: a signal requested a stop; the state after the last complete step is saved.
        """
        config = self._config
        self._watch.begin("start")
        self._state = self._checkpoints.resume(self.policy, sweep=True, snapshots=self._snapshots)
        self._continue()
        if self._reference is not None:
            self._reference.resume(self._state.step)
        self._saved_step = self._checkpoints.newest_step() or None
        if self._guard is not None:
            self._guard.has_checkpoint = self._saved_step is not None
        again = self._other_evaluation_settings()
        if self.drafting is not None:
            self.drafting.load_newer_spot_checkpoint()
        with (
            RunRecord(self._folder, config, self._state.step, self.timeline) as record,
            Progress(
                rank(),
                config.trainer.steps,
                done_steps=self._state.step,
                enabled=config.observe.progress,
                on_phase=self._watch.begin,
            ) as progress,
            self.serving(),
        ):
            if record.memory_line is not None:
                progress.message(record.memory_line)
            try:
                self._loop(record, progress, again)
            except StopRequested:
                self.step.switch_to_actor()
                self._save()
                self._checkpoints.finish()
                record.finish_partial()
                where = f"after {self._state.step} steps, state saved; run again to continue"
                raise Interrupted(self._stop.signum or signal.SIGTERM, where) from None
            self._watch.begin("export")
            with self.timeline.span("export"):
                save_hf_folder(self.policy, self._side_files, self._folder / "hf")
                if self.policy.lora is not None:
                    save_adapter_folder(self.policy, model_folder(self._config), self._folder / "adapter")
                if self.drafting is not None:
                    self.drafting.write(self._folder / NEWEST_DRAFTER)
            record.finish(self._state, self.policy.layout)
        self._watch.pause()
        self._checkpoints.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self._watch.close()
        self.engine.shutdown()

    def _other_evaluation_settings(self) -> bool:
        """Whether a resumed run has other evaluation settings; its newest step is then evaluated again."""
        state, now = self._state, self._config.evaluation.model_dump(mode="json", exclude={"every"})
        changed = state.evaluation_settings not in ({}, now)
        if changed:
            state.evaluations.pop(str(state.step), None)
            warn("evaluation: the settings have changed; results before and after this step are not comparable")
        state.evaluation_settings = now
        return changed

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Runs the reward pool and the spot trainer's coordinator while steps execute."""
        with self._pool, self._environments:
            if self.bubble is None:
                yield
                return
            with Coordination(self._config) as coordination, contextlib.closing(self.bubble):
                self.bubble.attach(coordination.client, coordination.refused)
                yield

    def _loop(self, record: RunRecord, progress: Progress, evaluate: bool) -> None:
        self.timeline.begin_step(self._state.step)
        self.step.reshard(self._state.step, StepResult(), progress.start)
        self._evaluate(record, progress, evaluate)  # a lost rank may have cut that of the newest step short
        while self._state.step < self._config.trainer.steps:
            if self._snapshots is not None:
                self._snapshots.commit(self._state)
            unwanted = self._guard.unwanted_ranks if self._guard is not None else []
            if self._nodes is not None and (change := self._nodes.look(unwanted)):
                self._change_nodes(change, keep=bool(unwanted))
            step = self._state.step
            self.timeline.begin_step(step + 1)
            drawn = self._state.problems_drawn
            result = self.step.run(step, progress.start, progress.advance, self._updated, drawn, self._state.deferred)
            if self._guard is not None and self._guard.goes_back:
                self._go_back(self._guard, result, record, progress)
                continue
            record.step(self._state.step, result, progress)
            self._evaluate(record, progress)
        self.step.switch_to_actor()
        self._save()
        self._checkpoints.finish()

    def _go_back(self, guard: RunGuard, result: StepResult, record: RunRecord, progress: Progress) -> None:
        """Returns to the newest checkpoint; the problems drawn since are left out, so that they do no harm again."""
        progress.start("checkpoint")
        saved, now = self._checkpoints.go_back(self.policy, self._rng), self._state
        if self._snapshots is not None:
            self._snapshots.forget()
        self._state, step = saved.with_problems_after(now, result.next_problem, result.deferred), saved.step
        guard.go_back(saved.guard, step)
        self._state.guard, self._saved_step = guard.state, None  # saved again, as the checkpoint does not know of it
        record.go_back(step)
        self.timeline.begin_step(step)
        warn(f"guard: back at the checkpoint of step {step}; the run goes on with problem {result.next_problem}")
        self.step.reshard(step, StepResult(), progress.start)

    def _change_nodes(self, change: str, *, keep: bool) -> None:
        """Ends all ranks with the state kept, in a checkpoint too with ``keep``: the launch starts them elsewhere."""
        assert self._snapshots is not None
        self.step.switch_to_actor()
        if keep or self._snapshots.newest_step != self._state.step:
            self._save()
        self._checkpoints.finish()
        self._snapshots.close()
        raise NodesChange(f"{change} after step {self._state.step}")

    def _updated(self, result: StepResult) -> None:
        """Counts a finished update, and saves a checkpoint if one is due."""
        self._state.step += 1
        self._state.tokens_seen += result.tokens
        self._state.problems_drawn, self._state.deferred = result.next_problem, list(result.deferred)
        if self._curriculum is not None:
            result.metrics |= self._curriculum.end_step(result.next_problem, result.judged)
            self._state.curriculum = self._curriculum.state
        if self._guard is not None:
            self._state.guard = self._guard.state
        result.metrics["tokens/seen"] = float(self._state.tokens_seen)
        every = self._config.trainer.save_every
        if self._reference is not None:
            self._reference.follow(self.policy, self._state.step)
        with self._phase("checkpoint", result):
            self._checkpoints.poll()
            if every and self._state.step % every == 0:
                self._save()
        result.metrics |= self._checkpoints.metrics
        if self._nodes is not None:
            result.metrics["elastic/devices"] = float(world_size())
        if self._snapshots is not None:
            with self._phase("snapshot", result):
                self._snapshots.begin(self.policy, self._state.step)

    @contextlib.contextmanager
    def _phase(self, name: str, result: StepResult) -> Iterator[None]:
        began = time.perf_counter()
        self._watch.begin(name)
        with self.timeline.span(name):
            yield
        result.metrics[f"time/{name}"] = time.perf_counter() - began

    def _save(self) -> None:
        if self._state.step and self._saved_step != self._state.step:
            self._watch.begin("checkpoint")
            self.step.replicas.before_save(self._state.step)
            self._checkpoints.save(self.policy, self._state)
            self._saved_step = self._state.step
            if self._guard is not None:
                self._guard.has_checkpoint = True

    def _evaluate(self, record: RunRecord, progress: Progress, again: bool = False) -> None:
        """Held-out accuracy of the engines' weights, where due or wanted ``again``; kept, so no resume repeats it."""
        step, every = self._state.step, self._config.evaluation.every
        key, due = str(step), step == 0 or step >= self._config.trainer.steps or (every > 0 and step % every == 0)
        if not (due or again) or key in self._state.evaluations:
            return
        if not self.engine.capabilities.weights:
            log_once(f"note: evaluation skipped: rollout.engine {self._config.rollout.engine} takes no weights")
            return
        began = time.perf_counter()
        evaluation, samples = self.evaluator.evaluate(progress, self.evaluator.held_out())
        evaluation = replace(evaluation, sets=self.evaluator.evaluate_sets(progress))
        self._state.evaluations[key] = asdict(evaluation)
        self._saved_step = None
        record.evaluation(step, evaluation, time.perf_counter() - began, samples)
        progress.message(f"held-out after step {step}: {evaluation.line}")


def train(config: TltConfig) -> None:
    """Entry point of a worker of ``tlt train``."""
    Run(config).train()
