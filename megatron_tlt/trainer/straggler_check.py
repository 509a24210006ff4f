"""Finds ranks that are slower than the others for several steps in a row; plain numbers in, warnings out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from megatron_tlt.observe.lasting_causes import StepsCheck

Times = Mapping[str, Sequence[float | None]]
"""Seconds per token of each rank by phase; None: this rank was not measured."""


class StragglerCheck(StepsCheck):
    """Follows the ranks' times; warns once about a slow rank until it is no longer slow.

    The median is the lower one: of two ranks the slow one is compared with the other.

    Args:
        factor: a rank is slow if its time exceeds the median of all measured ranks by it.
        steps: so many steps in a row.
        hosts: of each rank.
    """

    def __init__(self, factor: float, steps: int, hosts: Sequence[str]) -> None:
        super().__init__(steps)
        self._factor, self._hosts = factor, hosts
        self.ratio = 1.0
        """The largest ratio of a rank's time to the median in the last step, of all phases."""

    @property
    def slow_ranks(self) -> list[int]:
        """Ranks that were reported in some phase and are still slow there, ascending."""
        return sorted({int(name.split()[-1]) for name in self._warned})

    def add_times(self, times: Times) -> list[str]:
        """Adds a step; returns the new warnings. A rank that was not measured in a phase keeps its count there."""
        messages, unknown = {}, set()
        self.ratio = 1.0
        for phase, seconds in times.items():
            measured = [each for each in seconds if each is not None]
            median = statistics.median_low(measured) if measured else 0.0
            for rank, own in enumerate(seconds):
                name = f"{phase} {rank}"
                if own is None or not median:
                    unknown.add(name)
                    continue
                ratio = own / median
                self.ratio = max(self.ratio, ratio)
                if ratio > self._factor:
                    messages[name] = (
                        f"rank {rank} ({self._hosts[rank]}) is slow in {phase}: {own * 1e3:.3g} ms per token, "
                        f"{ratio:.2f} times the median of {len(measured)} ranks (for {self.steps} steps)"
                    )
        return [messages[name] for name in self.count([*messages], unknown)]
