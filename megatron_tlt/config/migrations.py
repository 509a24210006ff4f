"""Reads ``config.resolved.yaml`` of earlier releases.

An added key needs no migration: if it is absent, its default applies. A release that renames or removes a key, or
changes its meaning, appends a migration to ``MIGRATIONS``; the length of that list is the file's version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_tlt.errors import ConfigError

VERSION_KEY = "config_version"
LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value; the actor would then score at a different temperature."""

Migration = Callable[[dict[str, Any]], None]
"""Converts the values of one version to the next, in place."""


def _section(values: Any, path: str) -> dict[str, Any]:
    """The section at ``path``, or an empty one if it is absent."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _drop_ignored(values: dict[str, Any]) -> None:
    """Replaces values that had no effect, or a different one, and that later releases refuse.

    ``fp16`` was ignored. vLLM sampled at 0.01 for any temperature between 0 and 0.01.
    """
    for path in ("actor.megatron", "actor.optimizer", "model.recipe.supervised.optimizer"):
        _section(values, path).pop("fp16", None)
    for path in ("rollout.sampling", "evaluation"):
        section = _section(values, path)
        found = section.get("temperature")
        if isinstance(found, (int, float)) and 0 < found < LOWEST_TEMPERATURE:
            section["temperature"] = LOWEST_TEMPERATURE


def _move_chat(values: dict[str, Any]) -> None:
    """Moves ``tasks[].params.chat`` of prompt files to ``tasks[].chat``, which every kind of task has."""
    tasks = values.get("tasks")
    for task in tasks if isinstance(tasks, list) else []:
        params = _section(task, "params")
        if isinstance(task, dict) and task.get("kind") == "file" and "chat" in params:
            task["chat"] = params.pop("chat")


def _drop_unread_verifier(values: dict[str, Any]) -> None:
    """Drops ``tasks[].verifier`` of generated tasks, which was ignored in favor of the task's own verifier."""
    tasks = values.get("tasks")
    for task in tasks if isinstance(tasks, list) else []:
        if isinstance(task, dict) and task.get("kind") != "file":
            task.pop("verifier", None)


def _drop_reshard_method(values: dict[str, Any]) -> None:
    """Drops ``reshard.method: export``, a slower transfer of the same weights."""
    _section(values, "reshard").pop("method", None)


def _keep_unrolled_drafts(values: dict[str, Any]) -> None:
    """``drafter.unroll_steps: null`` meant four drafts for EAGLE-3; the default is three since."""
    drafter = _section(values, "drafter")
    if drafter.get("kind") == "eagle3" and drafter.get("unroll_steps", 0) is None:
        drafter["unroll_steps"] = 4


def _move_correction(values: dict[str, Any]) -> None:
    """``algorithm.mismatch.action: correct`` has a section of its own."""
    mismatch = _section(values, "algorithm.mismatch")
    if mismatch.get("action") == "correct":
        mismatch["action"] = "log"
        values["algorithm"].setdefault("correction", {})["weights"] = "token"


def _drop_unread_staleness(values: dict[str, Any]) -> None:
    """Drops ``schedule.max_staleness`` of ``one_step_off``, whose tokens were one step old whatever it was."""
    schedule = _section(values, "schedule")
    if schedule.get("kind") == "one_step_off":
        schedule.pop("max_staleness", None)


RENAMED = {
    "spot.least_steps": "spot.min_steps",
    "drafter.taps": "drafter.aux_hidden_state_layer_ids",
    "algorithm.kl_coefficient": "algorithm.kl.coefficient",
    "algorithm.mismatch.truncation": "algorithm.correction.truncation",
}
"""Old key to new key. A launch config with an old key is refused with the new name; a resolved config is migrated."""


def _renamed(old: str) -> Migration:
    """The migration that moves ``old`` to its new key; one per rename."""
    section, _, name = old.rpartition(".")
    *sections, new = RENAMED[old].split(".")

    def rename(values: dict[str, Any]) -> None:
        found = _section(values, section)
        if name in found:
            target = values
            for part in sections:
                target = target.setdefault(part, {})
            target[new] = found.pop(name)

    return rename


MIGRATIONS: tuple[Migration, ...] = (
    _drop_ignored,
    _move_chat,
    _drop_unread_verifier,
    _drop_reshard_method,
    _renamed("spot.least_steps"),
    _renamed("drafter.taps"),
    _keep_unrolled_drafts,
    _renamed("algorithm.kl_coefficient"),
    _renamed("algorithm.mismatch.truncation"),
    _move_correction,
    _drop_unread_staleness,
)


def migrate(values: dict[str, Any], where: str, migrations: Sequence[Migration] = MIGRATIONS) -> dict[str, Any]:
    """Converts the values of a resolved config of any earlier version (0 if it has none) to the current version.

    Raises:
        ConfigError: the version in ``where`` is not a number, or is newer than this release.
    """
    values = dict(values)
    version = values.pop(VERSION_KEY, 0)
    if not isinstance(version, int) or not 0 <= version <= len(migrations):
        raise ConfigError(
            f"{where}: {VERSION_KEY} is {version!r}; this release reads 0 to {len(migrations)}, "
            "a newer one may have written it"
        )
    for migration in migrations[version:]:
        migration(values)
    return values
