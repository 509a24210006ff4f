"""A run's folder for the commands: started, resumed, or cleared for a fresh start."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from megatron_tlt.checkpoint.files import latest_step
from megatron_tlt.cli.elastic_launch import ElasticNodes
from megatron_tlt.cli.launch import launch, under_torchrun
from megatron_tlt.cli.worker import LOG_FOLDER
from megatron_tlt.config.loader import RESOLVED, compare_resolved, dump_resolved
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.jsonl import finite
from megatron_tlt.observe.metrics import recorded_steps
from megatron_tlt.observe.summary import SUMMARY_FILE, read_summary
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.memory_folder import memory_folder
from megatron_tlt.platform.nodes import node_index, node_name

# Files that a run writes. --fresh removes only these, so that a mistyped run.dir loses no other files.
_RUN_FILES = (
    RESOLVED,
    "prompt_files.json",
    "metrics.jsonl",
    "lengths.jsonl",
    "samples.jsonl",
    "timeline.json",
    "report.html",
    "summary.json",
)
_RUN_FOLDERS = ("checkpoints", "drafter", "hf", "tensorboard", "logs", "slurm")


def add_config_arguments(parser: ArgumentParser, *, required: bool = True) -> None:
    """Adds CONFIG and overrides, common to every command that runs a config."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        nargs=None if required else "?",
        help="a launch config: a file, or a name of `tlt models`",
    )
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", default=[], help="overrides of the config's values"
    )


def clear_run(folder: Path) -> None:
    """Removes a run's files from ``folder``; a folder without a run is left unchanged."""
    if not (folder / RESOLVED).is_file():
        return
    for name in _RUN_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for file in (*(folder / name for name in _RUN_FILES), *folder.glob("timeline.rank*.jsonl")):
        file.unlink(missing_ok=True)


def is_run_file(folder: Path, file: Path) -> bool:
    """Whether the run in ``folder`` writes ``file`` itself."""
    return file.name in _RUN_FILES and file.resolve().parent == folder.resolve()


def write_resolved(config: TltConfig) -> Path:
    """Writes the resolved config into the run's folder; an existing run there must have the same config.

    With several nodes, the first writes it; each other node writes its own file and returns that path.

    Raises:
        ConfigError: the folder holds a run with another config; one line per key.
        RunError: the folder is not writable.
    """
    path = config.run.dir / RESOLVED
    if path.is_file():
        changed = compare_resolved(path, config)
        if changed:
            raise ConfigError(
                "\n".join(
                    f"{path}: this folder holds a run of another config: {line}; allowed: the same value, "
                    "another run.dir, or --fresh"
                    for line in changed
                )
            )
    if config.launcher.nnodes > 1 and node_index():
        path = config.run.dir / "logs" / f"config.node{node_index()}.yaml"
    write_in_run(path, dump_resolved(config))
    return path


def write_in_run(path: Path, text: str) -> None:
    """Writes a file of a run's folder, which is created if missing; raises RunError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"run.dir: cannot write {path}: {error.strerror or error}") from error
    atomic_write_text(path, text)


def write_json(path: Path | None, figures: Any) -> None:
    """Writes what ``--json`` asks for, if it is given."""
    if path is not None:
        atomic_write_text(path, json.dumps(finite(figures), indent=1) + "\n")


def is_finished(config: TltConfig) -> bool:
    """Whether the folder's run has done all requested steps; its summary is written last but one."""
    summary = config.run.dir / SUMMARY_FILE
    done = summary.is_file() and (config.run.dir / "report.html").is_file()
    return done and int(read_summary(summary).get("steps", 0)) >= config.trainer.steps


def progress(folder: Path) -> tuple[int, int]:
    """Steps that the folder's run has done, and the step of its newest checkpoint; 0 if there is none."""
    done = 0
    with contextlib.suppress(RunError):
        done = recorded_steps(folder)
    return done, latest_step(folder / "checkpoints")


def start(module: str, config: TltConfig, resolved: Path, *more: str, show: bool, resumes: bool = False) -> int:
    """Runs a worker module on all devices: replaces this process under torchrun, else starts a launch.

    The module receives the path of the resolved config and ``more`` as arguments. ``resumes``: it resumes from the
    run's newest checkpoint, so the launch may restart after a rank was killed.
    """
    if under_torchrun():
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, str(resolved), *more])
    folder = os.environ.get(LOG_FOLDER)
    file = Path(folder, f"{node_name()}.log") if folder else config.run.dir / "logs" / "workers.log"
    log = None if show else file
    newest = functools.partial(progress, config.run.dir) if resumes else None
    with contextlib.ExitStack() as stack:
        memory = nodes = None
        if resumes and config.elastic is not None:
            memory = stack.enter_context(memory_folder(config.elastic.memory_dir, config.run.dir, node_index()))
            if config.elastic.min_devices is not None:
                nodes = stack.enter_context(ElasticNodes(config, more, lambda: is_finished(config)).open())
        return launch(
            module,
            [str(resolved), *more],
            config.launcher,
            log=log,
            progress=newest,
            memory=memory,
            elastic=nodes,
            preload=_imports(config) if resumes and config.launcher.preloads else (),
        )


def _imports(config: TltConfig) -> list[str]:
    """What ranks of a training run import."""
    names = ["training", *(["vllm"] if config.rollout.engine == "vllm" else [])]
    return [f"megatron_tlt.cli.workers.imports_{name}" for name in names]


def ensure_model(config: TltConfig, resolved: Path, *, show: bool) -> int:
    """Builds the recipe's model first, if the config has a recipe and the cache does not have its model."""
    if config.model.recipe is None or under_torchrun():
        return 0
    from megatron_tlt.models.recipe import recipe_folder

    if (recipe_folder(config) / "recipe.json").is_file():
        return 0
    if node_index() == 0:
        print("Building the model of model.recipe (once; it is cached).", flush=True)
    return start("megatron_tlt.cli.workers.supervised", config, resolved, show=show)


def start_beside(command: str, worker: str, config: TltConfig, request: dict[str, Any], *, show: bool) -> int:
    """Start ranks that leave the run as it is, and return their status.

    Their config is not config.resolved.yaml: that file belongs to the run, and a resumed run is compared with it.

    Args:
        command: names the file of the config.
        worker: module in ``cli.workers``.
        config: as the ranks get it.
        request: of JSON types, the worker's other argument.
        show: tracebacks and the workers' own messages.
    """
    own = f".node{node_index()}" if config.launcher.nnodes > 1 else ""
    resolved = config.run.dir / "logs" / f"config.{command}{own}.yaml"
    write_in_run(resolved, dump_resolved(config))
    status = ensure_model(config, resolved, show=show)
    if status == 0:
        status = start(f"megatron_tlt.cli.workers.{worker}", config, resolved, json.dumps(request), show=show)
    return status


def check_run_folder(folder: Path) -> None:
    """Raises ConfigError if ``folder`` exists and holds no run; a folder that is absent is a RunError of its reader."""
    from megatron_tlt.observe.report_data import RUN_FILES

    if folder.is_dir() and not any((folder / name).is_file() for name in RUN_FILES):
        raise ConfigError(f"RUN_DIR: {folder} holds no run; allowed: a folder with one of {', '.join(RUN_FILES)}")
