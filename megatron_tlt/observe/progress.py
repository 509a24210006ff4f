"""Progress output of a run: bars on a terminal, otherwise one short line per step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

# Contents of a step's line, in this order, if measured: metric name -> label, format.
STEP_LINE = {
    "reward/mean": ("reward", "{:.3f}"),
    "eval/pass_at_1": ("pass@1", "{:.3f}"),
    "length/median": ("len", "{:.0f}"),
    "length/max": ("max", "{:.0f}"),
    "speculation/acceptance_length": ("accept", "{:.2f}"),
    "speculation/gain": ("gain", "{:.2f}"),
    "mismatch/k3_kl": ("k3", "{:.1e}"),
    "actor/grad_norm": ("grad", "{:.2f}"),
    "time/total": ("s", "{:.1f}"),
}


def session_line(metrics: Mapping[str, float]) -> str | None:
    """Results of a drafter session, by position in the draft; None if nothing was trained."""
    depths = [depth for depth in range(1, 100) if f"drafter/loss_depth_{depth}" in metrics]
    if not depths or not metrics.get("drafter/steps"):
        return None
    losses = " ".join(f"{metrics[f'drafter/loss_depth_{depth}']:.2f}" for depth in depths)
    accepted = " ".join(f"{metrics[f'drafter/acceptance_depth_{depth}']:.2f}" for depth in depths)
    return (
        f"  drafter: {metrics['drafter/steps']:.0f} steps to version {metrics['drafter/version']:.0f}  loss {losses}  "
        f"accepted {accepted}  length {metrics['drafter/acceptance_length']:.2f}"
    )


OnPhase = Callable[[str, int | None], None]
"""Called with a phase's name and its number of units (None: unknown) as it starts."""


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Progress bars for the run and its current phase, on a terminal only; silent on all ranks except 0.

    ``done_steps`` are those of a resumed run; without ``enabled`` (``observe.progress``) nothing is printed.
    ``on_phase`` is called on every rank with each phase's name as it starts.
    """

    def __init__(
        self,
        rank: int,
        total_steps: int,
        *,
        done_steps: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._on_phase = on_phase
        self._stream = stream if stream is not None else sys.stdout
        self._shown = enabled and rank == 0
        self._total_steps = total_steps
        self._bars: RichProgress | None = None
        self._phase: TaskID | None = None
        if self._shown and self._stream.isatty():
            self._bars = RichProgress(
                TextColumn("{task.description:<12}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._run = self._bars.add_task("steps", total=total_steps, completed=done_steps)
            self._bars.start()

    def start(self, phase: str, total: int | None = None) -> None:
        """Starts the bar of ``phase`` with ``total`` units (None: unknown); removes the previous one."""
        self._on_phase(phase)
        if self._bars is None:
            return
        if self._phase is not None:
            self._bars.remove_task(self._phase)
        self._phase = self._bars.add_task(phase, total=total)

    def advance(self, amount: int = 1) -> None:
        """Advances the phase's bar."""
        if self._bars is not None and self._phase is not None:
            self._bars.advance(self._phase, amount)

    def message(self, text: str) -> None:
        """Prints one line above the bars."""
        if not self._shown:
            return
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)

    def step_done(self, step: int, values: Mapping[str, float]) -> None:
        """Reports step ``step`` (counted from 1) with the metrics of STEP_LINE that are in ``values``."""
        if not self._shown:
            return
        parts = [f"{label} {form.format(values[key])}" for key, (label, form) in STEP_LINE.items() if key in values]
        self.message(f"step {step}/{self._total_steps}  " + "  ".join(parts))
        if self._bars is not None:
            self._bars.update(self._run, completed=step)

    def close(self) -> None:
        """Removes the bars from the terminal; may be called again."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __exit__(self, *error: object) -> None:
        self.close()
