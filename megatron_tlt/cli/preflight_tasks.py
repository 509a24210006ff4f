"""Checks of tasks and prompt files before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tlt.config.evaluation import EvaluationSetConfig
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.data.conversations import read_conversations
from megatron_tlt.data.tokenizer import has_chat_template
from megatron_tlt.environments.registry import environment_problems
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import recipe_folder
from megatron_tlt.rewards.verifiers import answer_problem, verifier_problems
from megatron_tlt.tasks.files import FileParams, read_rows
from megatron_tlt.tasks.limit import PromptLimit, allowed_prompts
from megatron_tlt.tasks.mixture import build_sources, evaluation_problems
from megatron_tlt.tasks.pool import PoolSource, calibrated_model
from megatron_tlt.tasks.sources import GeneratedSource, Split
from megatron_tlt.tasks.split_rules import split_violations
from megatron_tlt.tasks.types import Problem

_SPLITS: tuple[Split, ...] = ("train", "held_out")
_SHOWN = 10

Lengths = Callable[[Sequence[Problem]], list[int | str]]


@dataclass
class Findings:
    """Results of the checks: ``violations`` stop a run, ``notes`` say what was left out or not checked."""

    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, error: ConfigError | Sequence[str]) -> None:
        """Adds violations, each once: both splits of a task read the same file."""
        lines = str(error).splitlines() if isinstance(error, ConfigError) else error
        self.violations += [line for line in lines if line not in self.violations]

    def __iadd__(self, other: Findings) -> Findings:
        self.add(other.violations)
        self.notes += other.notes
        return self


def check_tasks(config: TltConfig, lengths: Lengths | None = None) -> Findings:
    """Checks names, parameters, verifiers, every file row and, given ``lengths``, every prompt's length in tokens."""
    found = Findings()
    rollout = config.rollout
    limit = None
    if lengths is not None:
        limit = PromptLimit(rollout.max_prompt_tokens, rollout.filter_overlong_prompts, lengths)
    compare_tiers = limit is not None or not rollout.filter_overlong_prompts
    for split in _SPLITS:
        try:
            mixture = build_sources(config.tasks, split, config.run.seed, limit, compare_tiers=compare_tiers)
        except ConfigError as error:
            found.add(error)
            continue
        for position, (task, source) in enumerate(zip(config.tasks, mixture.sources, strict=True)):
            source = source.source if isinstance(source, PoolSource) else source
            if not isinstance(source, GeneratedSource):
                continue
            key = f"tasks[{position}]"
            try:
                if task.kind == "python":
                    found.add(list(_drawn(config, key, task, source)))
                if limit is not None and split == "train":
                    found += _longest_generated(key, source, limit)
            except ConfigError as error:
                found.add(error)
    found.add(verifier_problems(config.tasks))
    found.add(environment_problems(config.tasks))
    for position, task in enumerate(config.tasks):
        if task.kind == "file":
            found.add(list(_rows(config, f"tasks[{position}]", task, has_tokenizer=lengths is not None)))
    supervised = config.model.recipe.supervised.data if config.model.recipe is not None else ()
    found.add(split_violations(config.tasks, config.evaluation.sets, supervised))
    for number, settings in enumerate(config.evaluation.sets):
        where = f"evaluation.sets[{number}]."
        lines = _set_violations(config, settings, limit, compare_tiers)
        found.add([f"{where}{line}" if line.startswith("tasks[") else line for line in lines])  # others name a file
    found.add(list(_conversation_violations(config)))
    found.notes += list(_tier_notes(config, compare_tiers))
    if limit is not None:
        found.notes += limit.notes
    return found


def _tier_notes(config: TltConfig, compared: bool) -> Iterator[str]:
    """What is not known about the tasks' files of tiers."""
    tasks = [(f"tasks[{position}]", task) for position, task in enumerate(config.tasks)]
    for number, settings in enumerate(config.evaluation.sets):
        tasks += [(f"evaluation.sets[{number}].tasks[{i}]", task) for i, task in enumerate(settings.tasks)]
    initial = config.model.path if config.model.recipe is None else recipe_folder(config)
    for key, task in tasks:
        if task.tier_file is None:
            continue
        measured = calibrated_model(task.tier_file)
        if measured is not None and initial is not None and Path(measured).resolve() != initial.resolve():
            yield f"{key}.tier_file: the pass rates in {task.tier_file} are those of {measured}, not of {initial}"
        if not compared:
            yield (
                f"not checked: whether the problems of {key}.tier_file are the task's, because "
                "rollout.filter_overlong_prompts leaves out some of them, and there is no tokenizer yet"
            )


def _conversation_violations(config: TltConfig) -> Iterator[str]:
    """What is wrong with the files of conversations, or missing for them in the recipe's base."""
    recipe = config.model.recipe
    if recipe is None or not recipe.supervised.data:
        return
    for path in recipe.supervised.data:
        try:
            read_conversations([path])
        except ConfigError as error:
            yield f"model.recipe.supervised.data: {error}"
    assert recipe.base is not None  # refused by the section
    if recipe.base.is_dir() and not has_chat_template(recipe.base):
        yield (
            f"model.recipe.base: {recipe.base} has no chat template, which model.recipe.supervised.data needs; "
            "allowed: a folder with chat_template.jinja, or chat_template in its tokenizer_config.json"
        )


def _set_violations(
    config: TltConfig, settings: EvaluationSetConfig, limit: PromptLimit | None, compare_tiers: bool
) -> list[str]:
    """What is wrong with a data set of the evaluation, by keys from its tasks on."""
    lines = verifier_problems(settings.tasks) + environment_problems(settings.tasks)
    try:
        evaluation_problems(settings.tasks, settings.problems, config.run.seed, limit, compare_tiers=compare_tiers)
    except ConfigError as error:
        lines += str(error).splitlines()
    for position, task in enumerate(settings.tasks):
        if task.kind == "file":
            lines += _rows(config, f"tasks[{position}]", task, has_tokenizer=limit is not None, trained=False)
    return lines


def _longest_generated(key: str, source: GeneratedSource, limit: PromptLimit) -> Findings:
    """Checks the longest prompts of a generator by draws: of its largest size, or a sample."""
    problems = source.probe()
    tokenized = limit.lengths(problems)
    if refused := [length for length in tokenized if isinstance(length, str)]:
        return Findings([f"{key}: {refused[0]}"])
    lengths = [length for length in tokenized if isinstance(length, int)]
    longest, over = max(lengths), sum(length > limit.max_tokens for length in lengths)
    where = f"{key}.{source.probed}, where prompts have up to {longest} tokens"
    if over and not limit.leave_out:
        return Findings([f"{where}; {allowed_prompts(limit.max_tokens)}"])
    if over:
        drawn = f"{over} of {len(problems)} such draws"
        return Findings(notes=[f"{where}; rollout.filter_overlong_prompts leaves out {drawn}"])
    return Findings()


def _drawn(config: TltConfig, key: str, task: TaskConfig, source: GeneratedSource) -> Iterator[str]:
    """What draws of a user's task lack for its verifier and for the model's recipe.

    Raises:
        ConfigError: a draw fails, or no draw falls into the split.
    """
    problems = [source.problem(0), *source.probe()]
    reasons = [reason for problem in problems if (reason := answer_problem(task.verifier, problem.answer))]
    if reasons:
        yield f"{key}.name: '{task.name}', {len(reasons)} of {len(problems)} draws: {reasons[0]}"
    if _learns_from_tasks(config) and any(problem.solution is None for problem in problems):
        yield (
            f"{key}.name: '{task.name}' drew a problem without 'solution', which the supervised warm-up of "
            "model.recipe learns from; allowed: a task whose problems all have one"
        )


def _rows(config: TltConfig, key: str, task: TaskConfig, *, has_tokenizer: bool, trained: bool = True) -> Iterator[str]:
    """What the rows of a file lack for the task's verifier and for the model's recipe."""
    try:
        params = FileParams.model_validate(task.params)
        files = [(path, read_rows(path, params)) for path in (task.path, task.held_out_path) if path is not None]
    except (ValueError, ConfigError):
        return  # reported by build_sources
    for path, rows in files:
        yield from _first_of(f"{path}", [(row.number, answer_problem(task.verifier, row.answer)) for row in rows])
        if config.model.recipe is None:
            continue
        if _learns_from_tasks(config) and trained and path == task.path:
            why = "no worked solution, which the supervised warm-up of model.recipe learns from"
            yield from _first_of(f"{path}", [(row.number, why if row.solution is None else None) for row in rows])
        if not has_tokenizer and config.model.recipe.base is None:
            why = f"chat messages ({key}), but the tokenizer of model.recipe has no chat template"
            yield from _first_of(f"{path}", [(row.number, why if task.chat or row.messages else None) for row in rows])


def _learns_from_tasks(config: TltConfig) -> bool:
    """Whether a supervised warm-up needs the tasks' worked solutions."""
    return config.model.recipe is not None and not config.model.recipe.supervised.data


def _first_of(where: str, reasons: Sequence[tuple[int, str | None]]) -> Iterator[str]:
    bad = [(number, reason) for number, reason in reasons if reason is not None]
    yield from (f"{where}:{number}: {reason}" for number, reason in bad[:_SHOWN])
    if len(bad) > _SHOWN:
        yield f"{where}: {len(bad)} such rows in all"
