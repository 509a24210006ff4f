"""Plot of the effective training time ratio over the number of devices, by mechanism of recovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

from megatron_tlt.observe.report_style import BLUE, GREEN, INK, ORANGE, STANDALONE, legend, new_figure
from megatron_tlt.planning.failures import EttrRow


def plot(by_devices: Mapping[int, Sequence[EttrRow]], path: Path, title: str) -> None:
    """Writes the figure in the format of the file's extension; bars are two standard errors of the simulated runs."""
    sizes = sorted(by_devices)
    with matplotlib.rc_context(STANDALONE):
        figure = new_figure(4.0, 7.0)
        axes = figure.add_subplot()
        names = dict.fromkeys(row.recovery.name for row in by_devices[sizes[0]])
        colors = dict(zip(names, (BLUE, ORANGE, GREEN), strict=True))
        for index, row in enumerate(by_devices[sizes[0]]):
            found = [by_devices[size][index].now for size in sizes]
            shrinks = row.recovery.shrinks
            axes.errorbar(
                sizes,
                [one.mean for one in found],
                yerr=[2 * one.error for one in found],
                color=colors[row.recovery.name],
                ls="-" if shrinks else "--",
                marker="o" if shrinks else "s",
                ms=4,
                capsize=2,
                label=f"{row.recovery.name}, {'shrinks' if shrinks else 'waits'}",
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xlabel("devices")
        axes.set_ylabel("effective training time ratio")
        axes.set_ylim(top=1)
        legend(axes, 3)
        figure.suptitle(title, color=INK["text"], fontsize=10)
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)
