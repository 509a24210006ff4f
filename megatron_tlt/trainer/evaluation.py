"""Accuracy from counts of correct samples; request and report of ``tlt eval``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from pathlib import Path

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.observe.jsonl import dumps
from megatron_tlt.observe.samples import SampleRow
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.limit import PromptLimit
from megatron_tlt.tasks.mixture import evaluation_problems
from megatron_tlt.tasks.types import Problem


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` samples is correct (Chen 2107.03374, eq. 1).

    Raises:
        ValueError: ``k`` is not between 1 and ``samples``.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} of {samples} samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def majority_is_correct(rewards: Sequence[Reward]) -> bool:
    """Whether the answer that most of a problem's responses give is correct; of equally frequent ones, the first.

    Wang et al., 2203.11171 (self-consistency). Responses without an extracted answer have no vote.
    """
    votes = Counter(reward.extracted for reward in rewards if reward.extracted is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]  # of equals the first that was counted
    return next(reward.correct for reward in rewards if reward.extracted == winner)


@dataclass(frozen=True)
class Evaluation:
    """Means over problems: pass@1, pass@k and maj@k over k samples, the best reward of k, and of greedy decoding.

    ``maj_at_k`` is None if the verifiers extract no answers. ``pass_at_1_by_task`` has the mean over each task's
    problems. ``sets`` has the figures of the data sets of ``evaluation.sets`` by name.
    """

    pass_at_1: float
    pass_at_k: float
    maj_at_k: float | None
    best_of_k: float
    greedy: float | None
    problems: int
    samples: int
    pass_at_1_by_task: dict[str, float] = field(default_factory=dict)
    sets: dict[str, dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def of(rewards: Sequence[Sequence[Reward]], greedy: Sequence[bool] | None, tasks: Sequence[str] = ()) -> Evaluation:
        """``rewards[i]`` are those of problem i's samples, of which all have as many; ``greedy[i]``: correct or not.

        ``tasks[i]`` is the task of problem i; empty without accuracy by task.
        """
        count, samples = len(rewards), len(rewards[0])
        correct = [sum(reward.correct for reward in each) for each in rewards]
        by_task: dict[str, list[float]] = {}
        for task, c in zip(tasks, correct, strict=bool(tasks)):
            by_task.setdefault(task, []).append(pass_at_k(samples, c, 1))
        votes = any(reward.extracted is not None for each in rewards for reward in each)
        return Evaluation(
            pass_at_1=sum(pass_at_k(samples, c, 1) for c in correct) / count,
            pass_at_k=sum(pass_at_k(samples, c, samples) for c in correct) / count,
            maj_at_k=sum(map(majority_is_correct, rewards)) / count if votes else None,
            best_of_k=sum(max(reward.value for reward in each) for each in rewards) / count,
            greedy=None if greedy is None else sum(greedy) / count,
            problems=count,
            samples=samples,
            pass_at_1_by_task={task: sum(values) / len(values) for task, values in sorted(by_task.items())},
        )

    @property
    def figures(self) -> dict[str, float]:
        """The means that were measured, by name."""
        names = ("pass_at_1", "pass_at_k", "maj_at_k", "best_of_k", "greedy")
        return {name: float(value) for name in names if (value := getattr(self, name)) is not None}

    @property
    def line(self) -> str:
        """The metrics as one line of text."""
        greedy = f"  greedy {self.greedy:.3f}" if self.greedy is not None else ""
        majority = f"  maj@{self.samples} {self.maj_at_k:.3f}" if self.maj_at_k is not None else ""
        sets = "".join(f"; {name}: pass@1 {found['pass_at_1']:.3f}" for name, found in self.sets.items())
        return f"pass@1 {self.pass_at_1:.3f}  pass@{self.samples} {self.pass_at_k:.3f}{majority}{greedy}{sets}"


@dataclass(frozen=True)
class EvaluationRequest:
    """A request to ``tlt eval``.

    Attributes:
        checkpoint: folder of the checkpoint. None: the newest checkpoint of the run.
        data: a prompt file; all its problems are evaluated. None: the held-out problems of the config's tasks.
        verifier: for the problems of ``data``.
        json: file for the result, in addition to the terminal.
        samples_file: file for some of the responses.
    """

    checkpoint: str | None = None
    data: str | None = None
    verifier: str = "math"
    json: str | None = None
    samples_file: str | None = None

    @property
    def tasks(self) -> list[TaskConfig]:
        """The file as a task; none without ``data``."""
        if self.data is None:
            return []
        file = Path(self.data)
        return [TaskConfig(kind="file", name=file.stem, path=file, held_out_path=file, verifier=self.verifier)]

    def problems(self, seed: int, limit: PromptLimit | None = None) -> list[Problem]:
        """All problems of ``data``.

        Raises:
            ConfigError: the file is missing, or has bad rows.
        """
        return evaluation_problems(self.tasks, None, seed, limit)


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation, with its model and data.

    Attributes:
        checkpoint: folder of the checkpoint; None for the initial model of the run.
        step: number of updates of the weights; None if the checkpoint does not record it.
        model: the initial model of the run.
        data: a prompt file, or the names of the tasks.
    """

    checkpoint: str | None
    step: int | None
    model: str
    data: str
    evaluation: Evaluation

    @staticmethod
    def of(
        config: TltConfig,
        request: EvaluationRequest,
        model: Path,
        checkpoint: Path | None,
        step: int | None,
        evaluation: Evaluation,
    ) -> EvaluationReport:
        data = request.data or f"held-out problems of {', '.join(task.name for task in config.tasks)}"
        return EvaluationReport(None if checkpoint is None else str(checkpoint), step, str(model), data, evaluation)

    @property
    def text(self) -> str:
        """Two lines for the terminal."""
        after = "" if self.step is None else f" (after step {self.step})"
        what = f"the start model {self.model}: the run has no checkpoint"
        if self.checkpoint is not None:
            what = f"{self.checkpoint}{after}"
        return f"evaluated {what}\non {self.evaluation.problems} problems, {self.data}: {self.evaluation.line}"

    def write(self, path: str | None) -> None:
        """Writes the report as JSON if a path is given.

        Raises:
            RunError: the file cannot be written.
        """
        if path is not None:
            values = {**asdict(self), **asdict(self.evaluation)}
            del values["evaluation"]
            atomic_write_text(Path(path), json.dumps(values, indent=1) + "\n")

    def write_samples(self, path: str | None, rows: Sequence[SampleRow]) -> None:
        """Writes the rows in the format of a run's ``samples.jsonl`` if a path is given.

        Raises:
            RunError: the file cannot be written.
        """
        if path is not None:
            atomic_write_text(Path(path), "".join(dumps({"step": self.step, **row}) + "\n" for row in rows))
