"""Checks that a resumed run finds the prompt files with which it was started.

A step's problems are a pure function of the files and the step. With changed files, a resumed run would not repeat the
steps that it lost, and would get other problems. This is an error until the user accepts it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from megatron_tlt.cli import runs
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.nodes import node_index

FILE = "prompt_files.json"


def check_prompt_files(config: TltConfig) -> None:
    """Compares the prompt files with those of the run's start; records the files of a new run.

    A run without a checkpoint starts anew, so it accepts the files as they are.

    Raises:
        ConfigError: a file's content has changed; one line per file.
        RunError: the run's folder cannot be read or written.
    """
    path, found = config.run.dir / FILE, _fingerprints(config)
    known = _read(path)
    if runs.progress(config.run.dir)[1]:
        changed = [key for key in found if key in known and known[key] != found[key]]
        if changed:
            raise ConfigError("\n".join(_line(key, known[key], found[key], path) for key in changed))
    if node_index() == 0 and known != found:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(path, json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise RunError(f"run.dir: cannot write {path}: {error.strerror}") from error


def _fingerprints(config: TltConfig) -> dict[str, dict[str, object]]:
    """Path, bytes and SHA-256 of each file by its key."""
    found: dict[str, dict[str, object]] = {}
    for position, task in enumerate(config.tasks):
        for name, path in (("path", task.path), ("held_out_path", task.held_out_path)):
            if path is None:
                continue
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    size = file.tell()
            except OSError as error:
                raise ConfigError(f"tasks.{position}.{name}: {path} cannot be read: {error.strerror}") from error
            found[f"tasks.{position}.{name}"] = {"path": str(path), "bytes": size, "sha256": digest}
    return found


def _read(path: Path) -> dict[str, dict[str, object]]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
    if not isinstance(known, dict):
        raise RunError(f"{path}: is not a JSON object")
    return known


def _line(key: str, known: dict[str, object], found: dict[str, object], path: Path) -> str:
    was, now = (f"{item.get('bytes')} bytes, SHA-256 {str(item.get('sha256'))[:12]}" for item in (known, found))
    return (
        f"{key}: {found['path']} has changed since this run started: {was} -> {now}; allowed: the same content, "
        f"another run.dir, --fresh, or remove {path} to continue with the new content (the order of problems changes)"
    )
