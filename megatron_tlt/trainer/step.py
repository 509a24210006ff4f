"""One step of reinforcement learning, as in the paper's figure: rollout, reward, log-probs, update, reshard."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch.distributed import ProcessGroup

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.registry import build_algorithm
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.exchange import redistribute
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.progress import OnPhase
from megatron_tlt.observe.samples import TRAIN, SampleRow
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import current_device, world_size
from megatron_tlt.reshard.interface import SyncReport, WeightSync
from megatron_tlt.rollout.interface import RolloutEngine
from megatron_tlt.rollout.types import SamplingSpec
from megatron_tlt.tasks.curriculum import CurriculumMixture
from megatron_tlt.tasks.mixture import ProblemMixture
from megatron_tlt.tasks.rounds import TailState
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.carried import Carried, Key
from megatron_tlt.trainer.drafter_manager import OnlineDrafter
from megatron_tlt.trainer.dynamic_sampling import collect_problems
from megatron_tlt.trainer.experience import Answers, ExperienceCollector, Scored, StartRace, WhileIdle
from megatron_tlt.trainer.integrity import ReplicaCheck
from megatron_tlt.trainer.memory_ledger import START
from megatron_tlt.trainer.reference import ReferencePolicy
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.rollout_metrics import rollout_metrics
from megatron_tlt.trainer.run_guard import RunGuard
from megatron_tlt.trainer.samples import SampleRows
from megatron_tlt.trainer.scoring import BatchScorer
from megatron_tlt.trainer.speculation_state import SpeculationState
from megatron_tlt.trainer.spot_trainer import SpotTrainer
from megatron_tlt.trainer.stream import StreamTrainer
from megatron_tlt.trainer.synchronization import wake
from megatron_tlt.trainer.tail_rounds import build_rounds


@dataclass
class StepResult:
    """The results of a step for the run's record."""

    metrics: dict[str, float] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    acceptance: list[float] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    """The task of each response."""
    judged: list[tuple[str, bool]] = field(default_factory=list)  # problem of each response, whether it is correct
    next_problem: int = 0
    """Index of the first training problem that has not been drawn."""
    deferred: tuple[int, ...] = ()
    """Training problems that were drawn and left for later steps."""
    tokens: int = 0
    """Prompt and response tokens of all samples; a prompt counts once per response."""
    rollout_s: float = 0.0
    """Until this rank's engine had decoded its own responses."""
    memory: dict[str, int] = field(default_factory=dict)
    """Highest bytes of device memory in use on this rank during each phase."""
    reshard: SyncReport | None = None
    samples: list[SampleRow] = field(default_factory=list)


def _slowest_ms(seconds: float) -> float:
    """The maximum over all ranks, in milliseconds; a collective."""
    return 1e3 * max(all_gather_data(seconds, float))


class TrainingStep:
    """The five phases over one actor and one engine per rank; all ranks run them together.

    Args:
        reference: the policy of the KL penalty; None without one.
        drafter: the trained drafter, if any.
        speculation: state of the model-free drafters and the tuner, if any.
        spot_trainer: trains the drafter on ranks whose engine has finished early, if configured.
        samples: chooses the responses for ``samples.jsonl``, if any.
        guard: judges the updates, if any.
    """

    def __init__(
        self,
        config: TltConfig,
        policy: Policy,
        reference: ReferencePolicy | None,
        engine: RolloutEngine,
        collector: ExperienceCollector,
        problems: ProblemMixture | CurriculumMixture,
        weight_sync: WeightSync,
        timeline: Timeline,
        sampling: SamplingSpec,
        drafter: OnlineDrafter | None = None,
        speculation: SpeculationState | None = None,
        spot_trainer: SpotTrainer | None = None,
        samples: SampleRows | None = None,
        guard: RunGuard | None = None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._reference = reference
        self._engine = engine
        self._collector = collector
        self._problems = problems
        self._weight_sync = weight_sync
        self._timeline = timeline
        self._sampling = sampling
        self._temperature = sampling.temperature or 1.0
        self._drafter = drafter
        self._speculation = speculation
        self._spot_trainer = spot_trainer
        self._samples = samples
        self._guard = guard
        self._start_memory: dict[str, int] = {}
        self.replicas = ReplicaCheck(config.integrity, policy)
        #: folder that training responses are recorded in, or None
        self.recording = config.run.dir / "recording" if config.observe.recording else None
        algorithm = build_algorithm(config.algorithm)
        self._loss = algorithm.loss()
        self._scorer = BatchScorer(config, policy, reference, drafter, algorithm, self._temperature)
        self.stream = self._build_stream() if config.stream is not None else None
        #: rounds of tail batching or bounded asynchrony; None: a step waits for all that it began
        self.rounds = build_rounds(config, collector.owns, lambda: engine.versions.get("policy") or 0, speculation)
        if self.rounds is not None and self.rounds.carried is not None and "policy" not in engine.versions:
            kind = type(engine).__name__
            raise ConfigError(
                f"rollout.engine: found {kind}, which does not tell the version of its policy; allowed with schedule "
                "or tail.deferred: continue: an engine whose versions have 'policy'"
            )

    def _build_stream(self) -> StreamTrainer:
        config, spot = self._config, self._config.spot
        assert config.stream is not None
        return StreamTrainer(
            config.stream,
            self._policy,
            self._loss,
            self._scorer,
            self._timeline,
            temperature=self._temperature,
            engine_size=config.rollout.tensor_parallel_size,
            take_device=self._take_device_for_stream,
            least_drafter_steps=spot.min_steps if spot is not None else 0,
        )

    def _take_device_for_stream(self) -> None:
        if self._drafter is not None:  # which was trained in the same bubble
            self._drafter.leave_device()
        self.switch_to_actor()

    def run(
        self,
        step: int,
        on_phase: OnPhase,
        on_responses: Callable[[int], None],
        on_updated: Callable[[StepResult], None],
        first_problem: int | None = None,
        deferred: Sequence[int] = (),
    ) -> StepResult:
        """Runs step number ``step`` (from 0); its problems are drawn from index ``first_problem`` on.

        Without ``first_problem`` each step before has drawn ``trainer.prompts_per_step``. ``deferred`` problems were
        drawn, and no step has trained on them. ``on_responses`` receives the numbers of responses that a phase deals
        with. ``on_updated`` is called after the policy's update, while it is still on the device, so that it can be
        saved. Neither it nor the reshard follows if the guard sends the run back to a checkpoint.

        Raises:
            StopRequested: on every rank, during decoding; the policy is unchanged.
            RunRefused: on every rank: an update is bad and the run must stop.
        """
        result, self._start_memory = StepResult(memory=self._start_memory, deferred=tuple(deferred)), {}
        began = time.perf_counter()
        for policy in [self._policy, *([self._reference.policy] if self._reference else [])]:
            policy.on_forward = on_responses
        scored, batch = self.roll_out(step, first_problem, result, on_phase, on_responses)
        if self._guard is not None:
            self._guard.begin_step(step, scored, batch, result.rollout_s)
        batch = self._log_probs(step, scored, batch, result, on_phase)
        self._update(step, batch, result, on_phase)
        self._train_drafter(step, result, on_phase)
        if self._guard is not None and self._guard.goes_back:
            return result
        result.metrics |= self.replicas.after_update(step + 1)
        on_updated(result)
        self.reshard(step + 1, result, on_phase)
        seconds = time.perf_counter() - began
        result.metrics |= {
            "time/total": seconds,
            "tokens/step": float(result.tokens),
            "tokens/per_s_per_device": result.tokens / seconds / world_size(),
        }
        return result

    @contextmanager
    def _timed(self, phase: str, result: StepResult) -> Iterator[None]:
        began = time.perf_counter()
        with self._timeline.span(phase):
            yield
        result.metrics[f"time/{phase}"] = time.perf_counter() - began
        self._note_memory(phase, result)

    def note_start(self) -> None:
        """Notes the memory that building models and engine took; part of the first step's ``memory``."""
        self._start_memory = {START: current_device().peak_memory_bytes()}

    def _note_memory(self, phase: str, result: StepResult) -> None:
        result.memory[phase] = current_device().peak_memory_bytes()
        self._timeline.counter("memory (GiB)", result.memory[phase] / 2**30)

    def roll_out(
        self,
        step: int,
        first_problem: int | None,
        result: StepResult,
        on_phase: OnPhase,
        on_response: Callable[[int], None],
    ) -> tuple[list[ScoredResponse], RolloutBatch]:
        """The first two phases: responses and rewards, with their metrics in ``result``; see :meth:`run`."""
        config = self._config
        count, group = config.trainer.prompts_per_step, config.algorithm.group_size
        if first_problem is None:
            first_problem = step * count
        tail = TailState(first_problem, result.deferred)
        generations_vary = config.algorithm.dynamic_sampling.enabled
        asked = self.rounds.size(tail) if self.rounds is not None else (count, group)
        on_phase("rollout", None if generations_vary else self._collector.num_own(*asked))
        if self._drafter is not None:
            self._drafter.check(self._engine)
        drafter_version = self._engine.versions.get("drafter")  # a sleeping engine has none
        if self._speculation is not None:
            self._speculation.begin_step(drafter_version)
        while_idle = self._while_idle(step)
        seed = (config.run.seed, "train", step)

        def collect(problems: list[Problem], generation: int) -> Answers:
            # a step has one session of the spot trainer
            idle = while_idle if generation == 0 else None
            parts = (*seed, *([generation] if generation else []))
            return self._collector.collect(problems, group, self._sampling, parts, on_response, idle, self.recording)

        if self.rounds is None:
            dynamic = config.algorithm.dynamic_sampling
            collected = collect_problems(self._problems.problem, first_problem, count, group, dynamic, collect)
            result.next_problem = first_problem + collected.drawn
        else:

            def run_round(
                problems: list[Problem], samples: int, race: StartRace | None, carried: Mapping[Key, Carried] | None
            ) -> Answers:
                return self._collector.collect(
                    problems, samples, self._sampling, seed, on_response, while_idle, race=race, carried=carried
                )

            one = self.rounds.collect(tail, self._problems.problem, run_round)
            collected, result.next_problem, result.deferred = one.collected, one.state.next_problem, one.state.deferred
            result.metrics |= one.metrics
        problems, scored, batch, times = collected.problems, collected.scored, collected.batch, collected.times
        self._note_memory("rollout", result)
        result.rollout_s = times.rollout
        ranks = all_gather_data((times.rollout, times.idle, times.reward), tuple[float, float, float])
        if self._samples is not None:
            result.samples = self._samples.rows(TRAIN, problems, scored, batch)
        result.lengths = [s.length for s in scored]
        result.acceptance = [s.draft.acceptance_length for s in scored]
        result.judged = [(problems[s.problem].uid, s.reward.correct) for s in scored]
        result.tasks = [problems[s.problem].source for s in scored]
        result.tokens = sum(s.prompt_length + s.length for s in scored)
        result.finish_reasons = dict(Counter(s.finish_reason for s in scored))
        result.metrics |= rollout_metrics(scored, result.tasks, group, ranks, collected.tokens, drafter_version)
        if config.algorithm.dynamic_sampling.enabled:
            result.metrics |= {
                "sampling/generations": float(collected.generations),
                "sampling/problems_drawn": float(collected.drawn),
            }
        if self._speculation is not None:
            result.metrics.update(self._speculation.metrics())
        if self.stream is not None:
            found = result.metrics
            seconds = found["time/rollout"] if found.get("tail/long_round", 1.0) else None
            trained = config.drafter.kind if config.drafter is not None else ""
            acceptance = found.get(f"speculation/acceptance_length_{trained}")
            result.metrics |= self.stream.end_rollout(seconds, acceptance)
        return scored, batch

    def _while_idle(self, step: int) -> WhileIdle | None:
        spot_trainer, stream = self._spot_trainer, self.stream
        if spot_trainer is not None:
            spot_trainer.begin(step)
        if stream is None:
            return None if spot_trainer is None else lambda answers: spot_trainer.train_until_rollout_ends(step)
        stream.begin()

        def idle(answers: Callable[[ProcessGroup], Scored] | None) -> None:
            def is_due() -> bool:
                spot = (spot_trainer.steps, spot_trainer.may_train) if spot_trainer is not None else (0, False)
                return answers is not None and stream.bubble(*spot).use == "stream"

            stream.engine_ended()
            if spot_trainer is not None:
                spot_trainer.train_until_rollout_ends(step, is_due)
            stream.run(answers if is_due() else None)

        return idle

    def _log_probs(
        self,
        step: int,
        scored: Sequence[ScoredResponse],
        batch: RolloutBatch,
        result: StepResult,
        on_phase: OnPhase,
    ) -> RolloutBatch:
        """The batch that the update trains on, with this rank's share and the columns that the loss reads."""
        streamed = self.stream.streamed if self.stream is not None else None
        rest, share = self._scorer.rest(scored, batch, streamed)
        on_phase("log-probs", self._scorer.passes * len(share))
        began = time.perf_counter()
        self.switch_to_actor()
        result.metrics["transition/to_actor_ms"] = _slowest_ms(time.perf_counter() - began)
        with self._timed("log_probs", result):
            return self._scorer.score(step, scored, batch, rest, share, result.tasks, result.metrics, streamed)

    def _update(self, step: int, batch: RolloutBatch, result: StepResult, on_phase: OnPhase) -> None:
        config, guard = self._config, self._guard
        judge = guard.judge if guard is not None else None
        rows: list[dict[str, float]] = []
        with self._timed("update", result):
            order = np.random.default_rng((config.run.seed, step)).permutation(batch.num_samples)
            if config.trainer.mini_batches == 1:
                order = np.arange(batch.num_samples)
            parts = [part.tolist() for part in np.array_split(order, config.trainer.mini_batches)]
            shares = [self._policy.share([batch.lengths[i] for i in part]) for part in parts]
            on_phase("update", sum(len(share) for share in shares))
            # a rank's share of a mini-batch may contain samples that it has not scored
            batch = redistribute(batch, [part[i] for part, share in zip(parts, shares, strict=True) for i in share])
            for part in parts:
                rows.append(self._policy.update(batch.select(part), self._loss, self._temperature, judge))
                if guard is not None:
                    guard.settle()
                    if guard.goes_back:
                        break
        if guard is not None:
            rows, own = guard.end_step(rows)
            result.metrics |= own
        for name in dict.fromkeys(name for row in rows for name in row if name != "tokens"):
            result.metrics[f"actor/{name}"] = float(np.mean([row[name] for row in rows if name in row]))

    def _train_drafter(self, step: int, result: StepResult, on_phase: OnPhase) -> None:
        if self._drafter is None:
            return
        on_phase("drafter", None)
        with self._timed("drafter", result):
            result.metrics.update(self._drafter.train(step, self._policy))

    def switch_to_actor(self) -> None:
        """Puts the engine to sleep and reloads the actor onto the device."""
        self._engine.sleep(level=2)
        self._policy.memory.reload()

    def reshard(self, version: int, result: StepResult, on_phase: OnPhase) -> None:
        """Transfers the actor's weights to the engines.

        The engine's weights wake first; then the actor is offloaded and the KV cache wakes. ``version`` is the number
        of updates of the weights.

        Raises:
            RunError: an engine's weights differ from those that the actor sent.
        """
        on_phase("reshard", None)
        every = self._config.reshard.verify_every
        with self._timed("reshard", result):
            current_device().empty_cache()
            wake_s = wake(self._engine, "weights")
            verify = bool(every) and version % every == 0
            result.reshard = self._weight_sync.sync(version=version, verify=verify)
            if self._drafter is not None:
                self._drafter.synchronize(verify)
            else:
                self._engine.restore_drafter()
            self._policy.memory.offload()
            wake_s += wake(self._engine, "kv_cache")
        result.metrics |= {
            "transition/to_engines_ms": _slowest_ms(result.metrics["time/reshard"]),  # includes verification
            "reshard/wake_s": wake_s,
            "reshard/transfer_s": result.reshard.seconds,
        }
