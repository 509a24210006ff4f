"""Accuracy from counts of correct samples; request and report of ``tlt eval``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from pathlib import Path

from megatron_tlt.config.schema import TaskConfig, TltConfig
from megatron_tlt.observe.jsonl import dumps
from megatron_tlt.observe.samples import SampleRow
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.tasks.limit import PromptLimit
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.tasks.sources import FileSource
from megatron_tlt.tasks.types import Problem


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` samples is correct (Chen 2107.03374, eq. 1).

    Raises:
        ValueError: ``k`` is not between 1 and ``samples``.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} of {samples} samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on problems: mean over problems of pass@1 and pass@k over samples, and of greedy decoding.

    ``pass_at_1_by_task`` has the mean over each task's problems.
    """

    pass_at_1: float
    pass_at_k: float
    greedy: float | None
    problems: int
    samples: int
    pass_at_1_by_task: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def from_counts(
        correct: Sequence[int], samples: int, greedy: Sequence[bool] | None, tasks: Sequence[str] = ()
    ) -> Evaluation:
        """``correct[i]`` of ``samples`` samples of problem i, and its greedy response if ``greedy[i]``, are correct.

        ``tasks[i]`` is the task of problem i; empty without accuracy by task.
        """
        count = len(correct)
        by_task: dict[str, list[float]] = {}
        for task, c in zip(tasks, correct, strict=bool(tasks)):
            by_task.setdefault(task, []).append(pass_at_k(samples, c, 1))
        return Evaluation(
            pass_at_1=sum(pass_at_k(samples, c, 1) for c in correct) / count,
            pass_at_k=sum(pass_at_k(samples, c, samples) for c in correct) / count,
            greedy=None if greedy is None else sum(greedy) / count,
            problems=count,
            samples=samples,
            pass_at_1_by_task={task: sum(values) / len(values) for task, values in sorted(by_task.items())},
        )

    @property
    def line(self) -> str:
        """The metrics as one line of text."""
        greedy = f"  greedy {self.greedy:.3f}" if self.greedy is not None else ""
        return f"pass@1 {self.pass_at_1:.3f}  pass@{self.samples} {self.pass_at_k:.3f}{greedy}"


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
        (source,) = build_sources(self.tasks, "held_out", seed, limit).sources
        assert isinstance(source, FileSource)
        return [source.problem(index) for index in range(len(source))]


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
