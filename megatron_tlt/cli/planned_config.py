"""Launch configs written by a plan: they inherit from the original and contain only the changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.files import atomic_write_text


def parent_of(path: Path, base: Path) -> str:
    """The entry for ``base`` in ``defaults`` of a config at ``path``; raises ConfigError if they are the same file."""
    if path.resolve() == base.resolve():
        raise ConfigError(f"--write: found {path}, which is the config itself; allowed: another file")
    return os.path.relpath(base.resolve(), path.resolve().parent)


def fitting_spot(config: TltConfig, engines: int) -> dict[str, Any]:
    """The ``spot`` section for ``engines`` engines: the last one ends the rollout, all others may train."""
    if config.spot is None or (engines > 1 and (config.spot.min_replicas or 1) < engines):
        return {}
    return {"spot": {"min_replicas": engines - 1} if engines > 1 else None}


def write_config(path: Path, comments: Sequence[str], values: Mapping[str, Any]) -> None:
    """Writes a launch config if it loads; an invalid one leaves nothing at ``path``.

    Raises:
        ConfigError: it is not valid.
    """
    text = "\n".join([*(f"# {line}" for line in comments), yaml.safe_dump(dict(values), sort_keys=False, width=120)])
    draft = path.with_name(f".{path.name}.draft.yaml")
    try:
        atomic_write_text(draft, text)
        load_config(draft, check_libraries=False)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
