"""``tlt replay RUN [key.path=value ...] --step N``: repeats a step of a recorded run without vLLM, for debugging."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_tlt.checkpoint.files import set_latest
from megatron_tlt.cli import runs, train
from megatron_tlt.config.loader import RESOLVED
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.metrics import METRICS_FILE, read_metrics

_CHECKPOINTS = "checkpoints"
_RECORDING = "recording"
_GUARD = "guard"  # as in trainer/guard_batch.py, which imports torch
_COMPARED = (
    "reward/mean",
    "length/mean",
    "mismatch/mean_abs",
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/clip_fraction",
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("replay", help="repeat a step of a recorded run without vLLM")
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's folder with `recording` (observe.recording)")
    parser.add_argument("--step", type=int, required=True, help="the step to repeat, counted from 1")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="of the repetition (default: RUN+step-N)")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", default=[], help="overrides of the config")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    source, step = arguments.run_dir, arguments.step
    out = arguments.out or source.with_name(f"{source.name}+step-{step}")
    begun = _newest_before(source, step)
    recording = _check(source, step, out, begun)
    try:
        if begun is not None:
            _link_tree(begun, out / _CHECKPOINTS / begun.name)
            set_latest(out / _CHECKPOINTS, begun.name)
        arguments.config, arguments.fresh = source / RESOLVED, False
        given = arguments.overrides
        arguments.overrides = [*_without_engine(recording), *given, f"run.dir={out}", f"trainer.steps={step}"]
        status = train.run(arguments)
    except (ConfigError, OSError) as error:
        shutil.rmtree(out, ignore_errors=True)  # nothing has run
        if isinstance(error, OSError):
            raise RunError(f"{out}: cannot be written: {error.strerror or error}") from error
        raise
    if status == 0 and recording.name == _RECORDING:
        _show(source, out, step)
    return status


def _check(source: Path, step: int, out: Path, begun: Path | None) -> Path:
    """Checks what a repetition needs; returns the folder with the step's responses.

    That is the run's ``recording``, or what its guard kept of a bad step, which the checkpoint ``begun`` must precede.

    Raises:
        ConfigError: the run is not recorded or has not done this step, or ``out`` holds files.
    """
    runs.check_run_folder(source)
    if not (source / RESOLVED).exists():
        raise ConfigError(f"RUN: no {source / RESOLVED}, because no run has started; allowed: a run that has")
    recording, kept = source / _RECORDING, source / _GUARD / f"step_{step:06d}"
    if not recording.exists() and kept.exists():
        before = 0 if begun is None else _step_of(begun)
        if before != step - 1:
            raise ConfigError(
                f"--step: found {step}; the guard kept this step alone, and the newest checkpoint before it is of step "
                f"{before}; allowed: a step after a checkpoint, or a run with observe.recording: true"
            )
        recording = kept
    if not recording.exists():
        raise ConfigError(
            f"RUN: no {recording}, because its config had observe.recording: false; allowed: a run with "
            "observe.recording: true, or a step that its guard kept"
        )
    done = runs.progress(source)[0]
    if recording != kept and not 1 <= step <= done:
        raise ConfigError(f"--step: found {step}; allowed: 1 to {done}, the steps that {source} has done")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {out} is not an empty folder; allowed: a new or empty folder")
    return recording


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def _newest_before(source: Path, step: int) -> Path | None:
    """The newest checkpoint of a step before ``step``; None: the repetition starts from the initial model."""
    found = {_step_of(path): path for path in (source / _CHECKPOINTS).glob("step_*[0-9]")}
    earlier = [number for number in found if number < step]
    return found[max(earlier)] if earlier else None


def _link_tree(source: Path, target: Path) -> None:
    """Copies a folder by hard links, or by contents to another file system."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    shutil.copytree(source, target, copy_function=link)


def _without_engine(recording: Path) -> list[str]:
    """Overrides that replay the recording; the drafter, which changes no response, is left out.

    So is the guard: a bad update is applied, or stops the repetition.
    """
    return [
        "rollout.engine=replay",
        f"rollout.engine_arguments={json.dumps({'path': str(recording)})}",
        "rollout.vllm=null",
        "speculation.enabled=false",
        "spot=null",
        "drafter=null",
        "guard=null",
        "reshard.method=none",
        "observe.recording=false",
    ]


def _row(folder: Path, step: int) -> dict[str, float | None]:
    return next(row for row in read_metrics(folder / METRICS_FILE) if row["step"] == step)


def _show(source: Path, out: Path, step: int) -> None:
    """Prints the step's figures beside those of the run."""
    recorded, repeated = _row(source, step), _row(out, step)
    table = Table(title=f"step {step}")
    for column in ("metric", "recorded", "repeated", ""):
        table.add_column(column, justify="left" if column in ("metric", "") else "right")
    for name in _COMPARED:
        if name in recorded and name in repeated:
            values = recorded[name], repeated[name]
            shown = ("nan" if value is None else f"{value:.7g}" for value in values)
            table.add_row(name, *shown, "equal" if values[0] == values[1] else "differs")
    Console().print(table)
