"""Config files and overrides to a validated ``TltConfig``, and back to YAML.

Paths in a config are relative to the working directory; only ``defaults:`` is relative to the file it stands in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_tlt.config import violations
from megatron_tlt.config.checks import check_fields_together
from megatron_tlt.config.passthrough import check_passthrough
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.source import apply_overrides, read_inherited, read_yaml
from megatron_tlt.errors import ConfigError

_LONGEST_NAME = 80
# What may differ when a run is resumed: how long, how often, what is shown. All else would make it another run.
_MAY_CHANGE = (
    "run.name",
    "run.dir",
    "trainer.steps",
    "trainer.save_every",
    "trainer.keep_checkpoints",
    "evaluation.every",
    "observe",
    "launcher.collective_timeout_s",
    "launcher.max_restarts",
)


def _run_name(name: str, overrides: Sequence[str]) -> str:
    """``name`` plus its overrides, in characters safe for a folder; hashed where that gets long or ambiguous."""
    if not overrides:
        return name
    plain = "+".join([name, *overrides])
    safe = re.sub(r"[^A-Za-z0-9._=+-]", "_", plain)
    if safe == plain and len(safe) <= _LONGEST_NAME:
        return safe
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return f"{safe[: _LONGEST_NAME - 9]}-{digest}"


def _place_run(values: dict[str, Any], path: Path, overrides: Sequence[str]) -> None:
    """Gives run.name and run.dir: the same command always finds the same folder, another one another folder."""
    run = values.setdefault("run", {})
    if not isinstance(run, dict):
        return
    given = {override.partition("=")[0].strip() for override in overrides}
    name = run.get("name") or path.stem
    if isinstance(name, str) and not given & {"run.dir", "run.name"}:
        name = _run_name(name, overrides)
        if overrides:
            run.pop("dir", None)
    run["name"] = name
    if run.get("dir") is None or ("run.name" in given and "run.dir" not in given):
        run["dir"] = f"runs/{name}"


def _validate(values: dict[str, Any], source: str, *, check_libraries: bool) -> TltConfig:
    try:
        config = TltConfig.model_validate(values)
    except ValidationError as error:
        problems = violations.lines(TltConfig, error)
    else:
        problems = check_fields_together(config)
        if check_libraries:
            problems += check_passthrough(config)
        if not problems:
            return config
    raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))


def load_config(path: Path | str, overrides: Sequence[str] = (), *, check_libraries: bool = True) -> TltConfig:
    """Loads a launch config.

    Args:
        path: the YAML file; its ``defaults:`` are read first.
        overrides: ``key.path=value`` strings, applied in order; a list takes an index, ``tasks.0.weight=2``.
        check_libraries: hold the pass-through dictionaries against the installed Megatron-Core and vLLM.

    Raises:
        ConfigError: with one line per violation, each naming file, key, what was found and what is allowed.
    """
    path = Path(path)
    values = read_inherited(path)
    apply_overrides(values, overrides)
    _place_run(values, path, overrides)
    return _validate(values, str(path), check_libraries=check_libraries)


def load_resolved(path: Path | str) -> TltConfig:
    """Loads a file that ``dump_resolved`` wrote: as it stands, checked by the schema and the rules between keys."""
    return _validate(read_yaml(Path(path)), str(path), check_libraries=False)


def dump_resolved(config: TltConfig) -> str:
    """The whole config as YAML, defaults included; ``load_resolved`` gives an equal config back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=1000)


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and value:
        items = {str(index): item for index, item in enumerate(value)}.items()
    else:
        return {path: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flatten(item, f"{path}.{key}" if path else str(key))
    return flat


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in _MAY_CHANGE)


def compare_resolved(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line, ``key: old -> new``, per key that differs and must not when a run is resumed."""
    before, after = _flatten(old), _flatten(new)
    return [
        f"{key}: {before.get(key, '(absent)')!r} -> {after.get(key, '(absent)')!r}"
        for key in sorted(before.keys() | after.keys())
        if not _may_change(key) and (key, before.get(key), key in before) != (key, after.get(key), key in after)
    ]
