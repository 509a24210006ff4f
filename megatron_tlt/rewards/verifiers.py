"""The verifiers by name. Importing this is cheap; a verifier's library is imported when it is loaded or first used."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_tlt.config.schema import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards import library, maths
from megatron_tlt.rewards.types import Verifier

#: The name that ``Problem.verifier`` and ``tasks[].verifier`` give -> the function.
VERIFIERS: dict[str, Verifier] = {"reasoning_gym": library.verify, "math": maths.verify}

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
    """The names of the verifiers that the tasks need, sorted. Raises ConfigError for an unknown name, with its key."""
    names = set()
    for position, task in enumerate(tasks):
        name = task.verifier if task.kind == "file" else "reasoning_gym"
        if name not in VERIFIERS:
            raise ConfigError(
                f"tasks[{position}].verifier: unknown verifier '{name}'; allowed are {', '.join(sorted(VERIFIERS))}"
            )
        names.add(name)
    return sorted(names)
