"""The report's plot of reward, held-out accuracy and length by task."""

from __future__ import annotations

from typing import Any

import matplotlib

from megatron_tlt.observe.report_data import RunData
from megatron_tlt.observe.report_style import PHASE_COLORS, STYLE, legend, new_figure, steps_axis, to_svg

_PREFIX = "task/"
_COLORS = tuple(PHASE_COLORS[n] for n in ("rollout", "log_probs", "update", "reshard", "reward", "evaluate", "drafter"))
MAX_TASKS = len(_COLORS)
"""Maximum number of tasks drawn: those with the most responses."""


def tasks_of(run: RunData) -> list[str]:
    """The tasks in a run's metrics, those with the most responses first."""
    responses: dict[str, float] = {}
    for row in run.metrics:
        for key in row:
            if key.startswith(_PREFIX) and key.endswith("/responses"):
                task = key.removeprefix(_PREFIX).removesuffix("/responses")
                responses[task] = responses.get(task, 0.0) + float(row[key] or 0.0)
    return sorted(responses, key=lambda task: (-responses[task], task))


def plot_tasks(run: RunData) -> str | None:
    """Left: reward (lines) and held-out pass@1 (dots) over steps. Right: mean response length."""
    with matplotlib.rc_context(STYLE):
        figure = new_figure(width=13.0)
        left, right = figure.subplots(1, 2)
        for task, color in zip(tasks_of(run), _COLORS, strict=False):
            name = f"{_PREFIX}{task}"
            _plot(left, run, f"{name}/reward", color=color, label=_shown(task))
            _plot(left, run, f"{name}/eval_pass_at_1", color=color, marker="o", ms=4.5, ls="--", lw=1.2)
            _plot(right, run, f"{name}/length_mean", color=color, label=_shown(task))
        if not left.lines and not right.lines:
            return None
        left.set_ylabel("reward; dots: held-out pass@1")
        right.set_ylabel("tokens per response")
        for axes in (left, right):
            steps_axis(axes)
            if axes.lines:
                legend(axes)
        return to_svg(figure, "tasks")


def _plot(axes: Any, run: RunData, metric: str, **style: Any) -> None:
    steps, values = run.series(metric)
    if steps:
        axes.plot(steps, values, **style)


def _shown(task: str) -> str:
    # matplotlib reads $ as a formula, and hides a label with a leading _ from the legend
    return task.replace("$", r"\$").removeprefix("_")
