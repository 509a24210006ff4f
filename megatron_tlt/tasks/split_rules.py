"""Which tasks of one generator may stand beside each other, so that no problem is both trained on and tested."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.config.evaluation import EvaluationSetConfig
from megatron_tlt.config.task import TaskConfig


def split_violations(tasks: Sequence[TaskConfig], sets: Sequence[EvaluationSetConfig] = ()) -> list[str]:
    """One line per key by which the train and held-out problems of a generator may overlap.

    A text of the problem decides whether it is held out; ``held_out`` says which text, so it is the same for all tasks
    of a generator. A problem that is held out at one fraction is held out at every larger one. A set of the evaluation
    may thus have a smaller fraction than the task that is trained on. Tasks of kind file are left out.

    Args:
        tasks: to train on.
        sets: of the evaluation; generators that are not trained on are free.
    """
    first_tasks: dict[str, TaskConfig] = {}
    lines = []
    for position, task in enumerate(tasks):
        if task.kind == "file":
            continue
        first = first_tasks.setdefault(_generator(task), task)
        for name in ("held_out_fraction", "held_out"):
            if (own := getattr(task, name)) != (other := getattr(first, name)):
                lines.append(
                    f"tasks[{position}].{name}: {own}, but an earlier '{task.name}' task has {other}; they must be "
                    "equal, or their train and held-out sets overlap"
                )
    for number, settings in enumerate(sets):
        for position, task in enumerate(settings.tasks):
            trained = first_tasks.get(_generator(task))
            if trained is None or task.kind == "file":
                continue
            key = f"evaluation.sets[{number}].tasks[{position}]"
            if task.held_out != trained.held_out:
                lines.append(_overlapping(f"{key}.held_out", task, task.held_out, trained.held_out, ""))
            if (own := task.held_out_fraction) > (other := trained.held_out_fraction):
                lines.append(_overlapping(f"{key}.held_out_fraction", task, own, other, "at most "))
    return lines


def _generator(task: TaskConfig) -> str:
    return f"{task.kind} {task.name}"


def _overlapping(key: str, task: TaskConfig, own: object, trained: object, allowed: str) -> str:
    return (
        f"{key}: found {own}; the '{task.name}' task to train on has {trained}, so the set could have problems of the "
        f"training; allowed: {allowed}{trained}"
    )
