"""Accuracy of the engines' weights on held-out problems."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.config.evaluation import EvaluationSettings
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.observe.progress import Progress
from megatron_tlt.observe.samples import EVALUATION, GREEDY_EVALUATION, SampleRow
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.limit import PromptLimit
from megatron_tlt.tasks.mixture import build_sources, evaluation_problems
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.evaluation import Evaluation
from megatron_tlt.trainer.experience import ExperienceCollector
from megatron_tlt.trainer.requests import evaluation_sampling
from megatron_tlt.trainer.samples import SampleRows


class Evaluator:
    """Generates responses to held-out problems and judges them; the methods that evaluate are collectives.

    Args:
        config: of the run.
        collector: of responses.
        pool: that verifies them.
        samples: chooses those that are kept.
        tokenizer: of the policy.
        timeline: of this rank.
        limit: of a prompt's tokens.
    """

    def __init__(
        self,
        config: TltConfig,
        collector: ExperienceCollector,
        pool: RewardPool,
        samples: SampleRows,
        tokenizer: Tokenizer,
        timeline: Timeline,
        limit: PromptLimit,
    ) -> None:
        self._config = config
        self._collector = collector
        self._pool = pool
        self._samples = samples
        self._tokenizer = tokenizer
        self._timeline = timeline
        self._limit = limit
        self._held_out: list[Problem] | None = None
        self._set_problems: dict[str, list[Problem]] = {}

    def held_out(self) -> list[Problem]:
        """The held-out problems of the config's tasks; the same in every evaluation."""
        if self._held_out is None:
            mixture = build_sources(self._config.tasks, "held_out", self._config.run.seed, self._limit)
            self._held_out = mixture.held_out(self._config.evaluation.problems)
        return self._held_out

    def evaluate(self, progress: Progress, problems: Sequence[Problem]) -> tuple[Evaluation, list[SampleRow]]:
        """Accuracy on the problems, with the same seeds in every evaluation; on rank 0 also some of the responses."""
        settings = self._config.evaluation
        seeds = (self._config.run.seed, "held-out")
        responses = settings.samples + settings.greedy
        progress.start("evaluate", self._collector.num_own(len(problems), responses))
        with self._timeline.span("evaluate"), self._pool.full_time():
            return self._evaluated(problems, settings, seeds, progress)

    def evaluate_sets(self, progress: Progress) -> dict[str, dict[str, float]]:
        """The figures of each data set of ``evaluation.sets``, with the same seeds in every evaluation."""
        found = {}
        for settings in self._config.evaluation.sets:
            if settings.name not in self._set_problems:
                problems = evaluation_problems(settings.tasks, settings.problems, self._config.run.seed, self._limit)
                self._set_problems[settings.name] = problems
            problems = self._set_problems[settings.name]
            seeds = (self._config.run.seed, "evaluation set", settings.name)
            responses = settings.samples + settings.greedy
            progress.start("evaluate", self._collector.num_own(len(problems), responses))
            with self._timeline.span("evaluate"), self._pool.full_time():
                evaluation, _ = self._evaluated(problems, settings, seeds, progress)
            found[settings.name] = evaluation.figures
        return found

    def _evaluated(
        self, problems: Sequence[Problem], settings: EvaluationSettings, seeds: tuple[object, ...], progress: Progress
    ) -> tuple[Evaluation, list[SampleRow]]:
        rollout = self._config.rollout
        sampling = evaluation_sampling(settings, rollout, self._tokenizer)
        sampled, batch, _ = self._collector.collect(problems, settings.samples, sampling, seeds, progress.advance)
        samples = self._samples.rows(EVALUATION, problems, sampled, batch)
        greedy = None
        if settings.greedy:
            sampling = evaluation_sampling(settings, rollout, self._tokenizer, greedy=True)
            scored, batch, _ = self._collector.collect(problems, 1, sampling, seeds, progress.advance)
            greedy = [s.reward.correct for s in scored]
            samples += self._samples.rows(GREEDY_EVALUATION, problems, scored, batch)
        rewards: list[list[Reward]] = [[] for _ in problems]
        for s in sampled:
            rewards[s.problem].append(s.reward)
        return Evaluation.of(rewards, greedy, [problem.source for problem in problems]), samples
