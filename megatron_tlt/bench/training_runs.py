"""Training runs of several arms and seeds for a benchmark, by ``tlt train``: finished ones are reused, curves drawn."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_tlt.config.loader import compare_resolved, dump_resolved, load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.report_data import CONFIG_FILE, RunData, load_run
from megatron_tlt.observe.summary import SUMMARY_FILE
from megatron_tlt.platform.files import atomic_write_bytes, atomic_write_text

Runs = Mapping[tuple[str, int], RunData]
"""The finished runs by arm and seed."""

_PANELS = {"reward/mean": "reward (train)", "eval/pass_at_1": "held-out pass@1"}


def add_run_arguments(parser: argparse.ArgumentParser, folder: str) -> None:
    """The arguments that :func:`finished_runs` reads; ``folder`` is the default for the runs."""
    parser.add_argument("--config", type=Path, default=Path("launch/quickstart-cpu.yaml"), help="launch config")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the config")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds, one run per arm each")
    parser.add_argument("--folder", type=Path, default=Path(folder), help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no later run; run again for the rest")


def finished_runs(arguments: argparse.Namespace, arms: Mapping[str, Sequence[str]]) -> dict[tuple[str, int], RunData]:
    """Trains each arm (its overrides) with each seed unless that run is finished; the arms of a seed follow each other.

    No run starts later than ``--minutes`` after the call, so some may be missing. Interrupted runs are resumed.

    Raises:
        ConfigError: the config is unreadable, or an existing run has other settings.
        RunError: a run failed.
    """
    steps = load_config(arguments.config, arguments.set).trainer.steps
    began, found = time.monotonic(), {}
    for seed in arguments.seeds:
        for arm, overrides in arms.items():
            folder = arguments.folder / f"{arm}-{seed}"
            own = [f"run.name={arm}-{seed}", f"run.dir={folder}", f"run.seed={seed}"]
            chosen = [*arguments.set, *overrides, *own]
            if is_finished(folder, steps):
                if changed := compare_resolved(folder / CONFIG_FILE, load_config(arguments.config, chosen)):
                    raise ConfigError(
                        f"{folder}: a run with other settings: {'; '.join(changed)}; allowed: the same, or another "
                        "--folder"
                    )
            elif time.monotonic() - began > 60 * arguments.minutes:
                continue
            else:
                _train(arguments.config, chosen)
            found[arm, seed] = load_run(folder)
    return found


def kept_result(out: Path, inputs: Sequence[str], config: TltConfig | None = None) -> bool:
    """Whether ``out`` is there, made from these inputs, which are written beside it before it is made.

    Args:
        out: a JSON file.
        inputs: texts, such as the path of a config and its overrides.
        config: what they resolve to, as its file may have changed. It is written beside ``out`` too, and its values are
            compared where it is; results of earlier releases have only the inputs.

    Raises:
        ConfigError: it is there, made from others.
    """
    beside, resolved = out.with_suffix(".inputs.json"), out.with_suffix(".config.yaml")
    try:
        made_from = json.loads(beside.read_text(encoding="utf-8"))
    except FileNotFoundError:
        made_from = None
    if out.is_file():
        if made_from != list(inputs):
            raise ConfigError(f"{out}: made with other settings; allowed: the same, or another --folder")
        if config is not None and resolved.is_file() and (changed := compare_resolved(resolved, config)):
            raise ConfigError(
                f"{out}: made with other settings: {'; '.join(changed)}; allowed: the same, or another --folder"
            )
        return True
    out.parent.mkdir(parents=True, exist_ok=True)
    if config is not None:
        atomic_write_text(resolved, dump_resolved(config))
    atomic_write_text(beside, json.dumps(list(inputs)))
    return False


def is_finished(folder: Path, steps: int) -> bool:
    """Whether the run in this folder has ended with ``steps`` steps."""
    try:
        return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["steps"] == steps
    except (OSError, ValueError, KeyError):
        return False


def _train(config: Path, overrides: Sequence[str]) -> None:
    command = [sys.executable, "-m", "megatron_tlt", "train", str(config), *overrides]
    if subprocess.run(command, check=False).returncode:
        raise RunError(f"a run failed; to see its output, run: {' '.join(command[1:])}")


def running_mean(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """Means over each ``window`` values in a row, or over all if there are fewer; the last one ends with the values."""
    window = min(window, len(values))
    return np.convolve(values, np.ones(window) / window, mode="valid").astype(np.float64)


def write_curves(json_file: Path | None, found: Runs, labels: Mapping[str, str]) -> None:
    """Writes the plot of the runs' curves beside the benchmark's JSON, if there is one and a run is finished."""
    if json_file is not None and found:
        atomic_write_bytes(json_file.with_suffix(".svg"), plot_curves(found, labels))


def plot_curves(found: Runs, labels: Mapping[str, str]) -> bytes:
    """The SVG of the runs' curves: the mean of each arm in ``labels`` over seeds, between its minimum and maximum."""
    import matplotlib

    from megatron_tlt.observe.report_style import CURVE_COLORS, STANDALONE, new_figure, steps_axis

    buffer = io.BytesIO()
    with matplotlib.rc_context({**STANDALONE, "svg.hashsalt": "runs"}):
        figure = new_figure(height=3.0, width=9.0)
        for axes, (metric, title) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
            for (arm, label), color in zip(labels.items(), CURVE_COLORS, strict=False):
                curves = [data.series(metric) for (of, _), data in sorted(found.items()) if of == arm]
                if not curves:
                    continue
                shortest = min(len(steps) for steps, _ in curves)
                steps, values = curves[0][0][:shortest], np.array([each[:shortest] for _, each in curves])
                axes.plot(steps, values.mean(0), color=color, lw=1.8, label=label)
                axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.4 / len(labels), lw=0)
            axes.set_ylabel(title)
            steps_axis(axes)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=min(len(labels), 5))
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
