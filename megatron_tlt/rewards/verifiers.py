"""The verifiers by name. Importing this is cheap; a verifier's library is imported when it is loaded or first used."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_tlt.config.schema import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards import library, maths
from megatron_tlt.rewards.types import Verifier

#: The name that ``Problem.verifier`` and ``tasks[].verifier`` give -> the function.
VERIFIERS: dict[str, Verifier] = {"reasoning_gym": library.verify, "math": maths.verify}

_GENERATED = "reasoning_gym"
_SYMBOLS = "\\∅∞π"  # answers may be one of them alone
_SHOWN_CHARACTERS = 60

_LOADERS = {"reasoning_gym": library.load, "math": maths.load}


def load_verifier(name: str) -> Verifier:
    """The verifier, its library imported. Raises ConfigError for an unknown name."""
    check_verifier(name)
    _LOADERS[name]()
    return VERIFIERS[name]


def check_verifier(name: str) -> None:
    """Raises ConfigError unless ``name`` is a verifier."""
    if name not in VERIFIERS:
        raise ConfigError(f"unknown verifier '{name}'; allowed are {', '.join(sorted(VERIFIERS))}")


def verifiers_of(tasks: Iterable[TaskConfig]) -> list[str]:
    """The names of the verifiers that the tasks need, sorted. Raises ConfigError for wrong names, with their keys."""
    tasks = list(tasks)
    if lines := verifier_problems(tasks):
        raise ConfigError("\n".join(lines))
    return sorted({task.verifier if task.kind == "file" else _GENERATED for task in tasks})


def verifier_problems(tasks: Iterable[TaskConfig]) -> list[str]:
    """One line per file task whose verifier is unknown, or needs what only generated problems have."""
    allowed = ", ".join(sorted(VERIFIERS.keys() - {_GENERATED}))
    lines = []
    for position, task in enumerate(tasks):
        key = f"tasks[{position}].verifier"
        if task.kind != "file":
            continue
        if task.verifier not in VERIFIERS:
            lines.append(f"{key}: unknown verifier '{task.verifier}'; allowed for a file: {allowed}")
        elif task.verifier == _GENERATED:
            lines.append(f"{key}: '{_GENERATED}' verifies generated problems only; allowed for a file: {allowed}")
    return lines


def answer_problem(verifier: str, answer: str) -> str | None:
    """Why no response could ever be right by this verifier; None where the answer has a form that it reads."""
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
