"""Loads config files and overrides into a validated ``TltConfig``, and writes it back as YAML.

A file to read is looked up beside the config that names it, then in the working folder; outputs are in the latter.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_tlt.config import violations
from megatron_tlt.config.checks import check_fields_together
from megatron_tlt.config.identity import identifies_run, identifying
from megatron_tlt.config.migrations import MIGRATIONS, VERSION_KEY, migrate
from megatron_tlt.config.passthrough import check_passthrough
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.shipped import find_config
from megatron_tlt.config.source import apply_overrides, parse_yaml, read_inherited, read_text
from megatron_tlt.errors import ConfigError

_LONGEST_NAME = 80
RESOLVED = "config.resolved.yaml"
"""File with a run's complete config, in its folder."""


def _run_name(name: str, overrides: Sequence[str]) -> str:
    """``name`` plus its overrides, in characters safe for a folder; hashed if it would be long or ambiguous."""
    if not overrides:
        return name
    plain = "+".join([name, *overrides])
    safe = re.sub(r"[^A-Za-z0-9._=+-]", "_", plain)
    if safe == plain and len(safe) <= _LONGEST_NAME:
        return safe
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return f"{safe[: _LONGEST_NAME - 9]}-{digest}"


def _place_run(values: dict[str, Any], path: Path, overrides: Sequence[str]) -> str | None:
    """Sets run.name and run.dir, so that the same run always gets the same folder and other runs other folders.

    Returns:
        The name without overrides if the folder follows from it; None if the caller chose name or folder.
    """
    run = values.setdefault("run", {})
    if not isinstance(run, dict):
        return None
    given = {override.partition("=")[0].strip() for override in overrides}
    name, plain = run.get("name") or path.stem, None
    if isinstance(name, str) and not given & {"run.dir", "run.name"}:
        own = identifying(overrides)
        plain, name = name, _run_name(name, own)
        if own:
            run.pop("dir", None)
    run["name"] = name
    if run.get("dir") is None or ("run.name" in given and "run.dir" not in given):
        run["dir"] = f"runs/{name}"
    return plain


def _in_former_folder(config: TltConfig, plain: str, overrides: Sequence[str]) -> TltConfig:
    """The config with the existing folder of its run, if an earlier release named that folder.

    Earlier releases put every override into the name, in the given order. The order of preference is the folder that
    they would name for this command, then the current name, then a folder of another command.

    Raises:
        ConfigError: several folders hold such a run.
    """
    same = Path("runs", _run_name(plain, overrides))
    if same != config.run.dir and _holds(same, config):
        return _moved(config, same)
    if (config.run.dir / RESOLVED).is_file():
        return config
    found = [file.parent for file in sorted(Path("runs").glob(f"{glob.escape(plain)}+*/{RESOLVED}"))]
    found = [folder for folder in found if _holds(folder, config)]
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise ConfigError(f"run.dir: not given, and this run is in several folders: {names}; allowed: one of them")
    return _moved(config, found[0]) if found else config


def _holds(folder: Path, config: TltConfig) -> bool:
    """Whether the folder contains a run with the same identifying keys as the config."""
    with contextlib.suppress(ConfigError):
        return (folder / RESOLVED).is_file() and not compare_resolved(folder / RESOLVED, config)
    return False


def _moved(config: TltConfig, folder: Path) -> TltConfig:
    run = config.run.model_copy(update={"name": folder.name, "dir": folder})
    return config.model_copy(update={"run": run})


def _validate(
    values: dict[str, Any],
    source: str,
    *,
    check_libraries: bool,
    further: Callable[[TltConfig], Sequence[str]] = lambda config: (),
) -> TltConfig:
    try:
        config = TltConfig.model_validate(values)
    except ValidationError as error:
        problems = violations.lines(TltConfig, error)
    else:
        problems = check_fields_together(config)
        if check_libraries:
            problems += check_passthrough(config)
        problems += further(config)
        if not problems:
            return config
    raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))


def load_config(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    check_libraries: bool = True,
    further: Callable[[TltConfig], Sequence[str]] = lambda config: (),
) -> TltConfig:
    """Loads a launch config.

    Args:
        path: the YAML file, or the name of a shipped one; its ``defaults:`` are read first.
        overrides: ``key.path=value`` strings, applied in order; a list takes an index, ``tasks.0.weight=2``.
        check_libraries: check the pass-through dictionaries against the installed Megatron-Core and vLLM.
        further: additional checks; each line that it returns is a violation.

    Raises:
        ConfigError: with one line per violation, each naming file, key, what was found and what is allowed.
    """
    path = find_config(Path(path))
    values = read_inherited(path)
    if VERSION_KEY in values:  # a resolved config, taken as a launch config
        values = migrate(values, str(path))
    apply_overrides(values, overrides)
    plain = _place_run(values, path, overrides)
    config = _validate(values, str(path), check_libraries=check_libraries, further=further)
    return config if plain is None else _in_former_folder(config, plain, overrides)


def load_resolved(path: Path | str) -> TltConfig:
    """Loads a file that ``dump_resolved`` wrote; checks it against the schema and the rules between keys only.

    Raises:
        ConfigError: with one line per violation.
    """
    return _validate(read_resolved(Path(path)), str(path), check_libraries=False)


def read_resolved(path: Path) -> dict[str, Any]:
    """The values of a file that ``dump_resolved`` of this or an earlier release wrote, migrated to this one.

    Raises:
        ConfigError: the file is not one, or it is cut off: it then begins as a YAML document and does not end as one.
            Files of earlier releases begin without ``---``; in them the keys that are cut off look like later keys.
    """
    text = read_text(path)
    values = migrate(parse_yaml(text, path), str(path))
    if text.startswith("---\n") and text.splitlines()[-1] != "...":
        raise ConfigError(f"{path}: is cut off; its last line is {text.splitlines()[-1]!r}, allowed: '...'")
    return values


def dump_resolved(config: TltConfig) -> str:
    """The complete config as one YAML document, including defaults; ``load_resolved`` returns an equal config."""
    values = {VERSION_KEY: len(MIGRATIONS), **config.model_dump(mode="json")}
    form: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 1000}
    return yaml.safe_dump(values, explicit_start=True, explicit_end=True, **form)


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and value:
        items = {str(index): item for index, item in enumerate(value)}.items()
    else:
        return {path: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flatten(item, f"{path}.{key}" if path else str(key))
    return flat


def compare_resolved(path: Path, config: TltConfig) -> list[str]:
    """One line, ``key: old -> new``, per identifying key whose value in ``config`` differs from that in the file.

    A key that the file lacks was added by a later release; its default applies.

    Raises:
        ConfigError: the file is not a resolved config of this or an earlier release.
    """
    values = read_resolved(path)
    try:
        old = TltConfig.model_validate(values)
    except ValidationError as error:
        lines = violations.lines(TltConfig, error)
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from error
    before, after = (_flatten(each.model_dump(mode="json")) for each in (old, config))
    return [
        f"{key}: {before.get(key, '(absent)')!r} -> {after.get(key, '(absent)')!r}"
        for key in sorted(before.keys() | after.keys())
        if identifies_run(key) and (key, before.get(key), key in before) != (key, after.get(key), key in after)
    ]
