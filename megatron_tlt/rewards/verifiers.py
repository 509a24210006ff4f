"""The verifiers, by name or import path. Their libraries are imported when a verifier is loaded or first used."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_tlt.config.import_path import is_import_path
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards import code, library, maths, procedural
from megatron_tlt.rewards.functions import load_function
from megatron_tlt.rewards.sandbox import sandbox_problem
from megatron_tlt.rewards.types import Verifier

#: Name in ``Problem.verifier`` and ``tasks[].verifier`` -> function.
VERIFIERS: dict[str, Verifier] = {
    "reasoning_gym": library.verify,
    "math": maths.verify,
    "code": code.verify,
    "procedural": procedural.verify,
}

#: Verifier -> the only kinds of tasks whose problems have what it reads.
_KINDS = {"reasoning_gym": ("generated", "reasoning_gym"), "procedural": ("procedural",)}
_OR_PATH = "or a function's import path such as mypackage.rewards.score"
_SYMBOLS = "\\∅∞π"  # an answer may consist of one of them
_SHOWN_CHARACTERS = 60

_LOADERS = {"reasoning_gym": library.load, "math": maths.load}


def load_verifier(name: str) -> Verifier:
    """Loads a verifier with its library or module; raises ConfigError for an unknown name or a wrong import path."""
    check_verifier(name)
    if name not in VERIFIERS:
        return load_function(name, "verifier")
    _LOADERS.get(name, lambda: None)()
    return VERIFIERS[name]


def check_verifier(name: str) -> None:
    """Raises ConfigError unless ``name`` is a verifier or the import path of a valid function."""
    if name in VERIFIERS:
        return
    if not is_import_path(name):
        raise ConfigError(f"unknown verifier '{name}'; allowed are {', '.join(sorted(VERIFIERS))}, {_OR_PATH}")
    load_function(name, "verifier")


def verifiers_of(tasks: Iterable[TaskConfig]) -> list[str]:
    """The verifiers that the tasks need, sorted; raises ConfigError with the keys of invalid ones."""
    tasks = list(tasks)
    if lines := verifier_problems(tasks):
        raise ConfigError("\n".join(lines))
    return sorted({task.verifier for task in tasks})


def verifier_problems(tasks: Iterable[TaskConfig]) -> list[str]:
    """One line per task whose verifier is unknown, cannot be imported, or supports generated problems only."""
    lines = []
    for position, task in enumerate(tasks):
        key = f"tasks[{position}].verifier"
        allowed = ", ".join(name for name in sorted(VERIFIERS) if task.kind in _KINDS.get(name, (task.kind,)))
        where = f"allowed for kind {task.kind}: {allowed}, {_OR_PATH}"
        if task.kind not in (kinds := _KINDS.get(task.verifier, (task.kind,))):
            lines.append(f"{key}: '{task.verifier}' verifies {kinds[0]} problems only; {where}")
        elif is_import_path(task.verifier):
            try:
                load_function(task.verifier, key)
            except ConfigError as error:
                lines.append(str(error))
        elif task.verifier not in VERIFIERS:
            lines.append(f"{key}: unknown verifier '{task.verifier}'; {where}")
        elif task.verifier == "code" and (reason := sandbox_problem()):
            lines.append(f"{key}: found 'code', which runs programs in a sandbox; {reason}")
    return lines


def answer_problem(verifier: str, answer: str) -> str | None:
    """Why this verifier can judge no response correct; None if it can read the answer."""
    if verifier == "code":
        return code.tests_problem(answer)
    if verifier != "math":
        return None
    shown = answer if len(answer) <= _SHOWN_CHARACTERS else answer[:_SHOWN_CHARACTERS] + "..."
    depth = 0
    for character in answer.replace("\\{", "").replace("\\}", ""):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    if depth:
        return f"the answer {shown!r} has unbalanced braces; verifier math cannot read it"
    if not any(character.isalnum() or character in _SYMBOLS for character in answer):
        return f"the answer {shown!r} has no letter, digit or symbol; verifier math cannot read it"
    return None
