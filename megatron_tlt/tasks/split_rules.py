"""Which tasks of one generator may stand beside each other, so that no problem is both trained on and tested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_tlt.config.evaluation import EvaluationSetConfig
from megatron_tlt.config.task import TaskConfig


def split_violations(
    tasks: Sequence[TaskConfig], sets: Sequence[EvaluationSetConfig] = (), supervised: Sequence[Path] = ()
) -> list[str]:
    """One line per key by which the train and held-out problems of a generator or a file may overlap.

    A text of the problem decides whether it is held out; ``held_out`` says which text, so it is the same for all tasks
    of a generator. A problem that is held out at one fraction is held out at every larger one. A set of the evaluation
    may thus have a smaller fraction than the task that is trained on. A set has all rows of its file, so no split keeps
    it apart from a task that trains on that file.

    Args:
        tasks: to train on.
        sets: of the evaluation; generators and files that are not trained on are free.
        supervised: files of the supervised start.
    """
    first_tasks: dict[str, TaskConfig] = {}
    lines: list[str] = []
    for position, task in enumerate(tasks):
        if task.kind == "file":
            lines += _other_split(position, task, tasks[:position])
            continue
        first = first_tasks.setdefault(_generator(task), task)
        for name in ("held_out_fraction", "held_out"):
            if (own := getattr(task, name)) != (other := getattr(first, name)):
                lines.append(
                    f"tasks[{position}].{name}: {own}, but an earlier '{task.name}' task has {other}; they must be "
                    "equal, or their train and held-out sets overlap"
                )
    for position, task in enumerate(tasks):
        if task.kind == "file" and task.held_out_path is not None:
            lines += _trained_file(f"tasks[{position}]", task, tasks, supervised)
        elif task.kind == "file":
            lines += _learned_whole(position, task, supervised)
    for number, settings in enumerate(sets):
        for position, task in enumerate(settings.tasks):
            key = f"evaluation.sets[{number}].tasks[{position}]"
            if task.kind == "file":
                lines += _trained_file(key, task, tasks, supervised)
                continue
            trained = first_tasks.get(_generator(task))
            if trained is None:
                continue
            if task.held_out != trained.held_out:
                lines.append(_overlapping(f"{key}.held_out", task, task.held_out, trained.held_out, ""))
            if (own := task.held_out_fraction) > (other := trained.held_out_fraction):
                lines.append(_overlapping(f"{key}.held_out_fraction", task, own, other, "at most "))
    return lines


def _other_split(position: int, task: TaskConfig, earlier: Sequence[TaskConfig]) -> Iterator[str]:
    """A line if an earlier task splits the same file otherwise, so that one trains on what the other holds out."""
    for number, other in enumerate(earlier):
        if task.path is None or other.path is None or not _is_same_file(task.path, other.path):
            continue
        if _is_of_set(task) or _is_of_set(other):
            continue
        for name in ("held_out_path", "held_out_fraction"):
            if (own := getattr(task, name)) != (found := getattr(other, name)):
                yield (
                    f"tasks[{position}].{name}: found {own}; tasks[{number}] has {found} and the same file "
                    f"{task.path}, so one would train on what the other holds out; allowed: {found}"
                )
                return
            if own is not None and name == "held_out_path":
                break  # the fraction is not used


def _trained_file(key: str, task: TaskConfig, tasks: Sequence[TaskConfig], supervised: Sequence[Path]) -> Iterator[str]:
    """A line if the file that a task is evaluated on, the second one if it has two, is trained on."""
    name, tested = ("path", task.path) if task.held_out_path is None else ("held_out_path", task.held_out_path)
    of_tasks = ((i, each) for i, each in enumerate(tasks) if each is not task and not _is_of_set(each))
    trained = [(f"tasks[{i}].path", each.path) for i, each in of_tasks]
    trained += [("model.recipe.supervised.data", path) for path in supervised]
    for where, path in trained:
        if tested is not None and path is not None and _is_same_file(tested, path):
            yield (
                f"{key}.{name}: found {tested}, the file of {where}, which is trained on; all of its rows are "
                "evaluated on; allowed: another file; tasks[].held_out_fraction keeps rows of a file apart"
            )
            return


def _learned_whole(position: int, task: TaskConfig, supervised: Sequence[Path]) -> Iterator[str]:
    """A line if the supervised start trains on a file of which the task holds out a fraction."""
    if task.path is not None and any(_is_same_file(task.path, path) for path in supervised):
        yield (
            f"tasks[{position}].path: found {task.path}, a file of model.recipe.supervised.data, which trains on all "
            "of its rows, with those that held_out_fraction holds out; allowed: another file, or a held_out_path"
        )


def _is_of_set(task: TaskConfig) -> bool:
    """Whether a task's files are one: then it is a set's, which is checked in place of the tasks to train on."""
    return task.path == task.held_out_path


def _is_same_file(one: Path, other: Path) -> bool:
    """By whatever links; a file that does not exist is reported where it is read."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def _generator(task: TaskConfig) -> str:
    return f"{task.kind} {task.name}"


def _overlapping(key: str, task: TaskConfig, own: object, trained: object, allowed: str) -> str:
    return (
        f"{key}: found {own}; the '{task.name}' task to train on has {trained}, so the set could have problems of the "
        f"training; allowed: {allowed}{trained}"
    )
