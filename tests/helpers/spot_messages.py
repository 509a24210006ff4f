"""What passes between a run's ranks and its coordinator, as the senders write it down (``spot.fault_hooks``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_tlt.spot.fault_hooks import HOLD
from megatron_tlt.spot.types import Directive, Report


class SpotMessages:
    """Reports, with their frames, and directives that are sent after this object was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = {path: path.stat().st_size for path in folder.iterdir()}
        self._frames: list[tuple[Report, list[bytes]]] = []
        self._directives: list[Directive] = []

    def _update(self) -> None:
        for path in sorted(self._folder.glob("*-*")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                frames = [bytes.fromhex(frame) for frame in line.decode().split()]
                if path.name.startswith("report"):
                    self._frames.append((msgspec.msgpack.decode(frames[1], type=Report), frames))
                else:
                    self._directives.append(msgspec.msgpack.decode(frames[1], type=Directive))

    @property
    def frames(self) -> list[tuple[Report, list[bytes]]]:
        self._update()
        return self._frames

    @property
    def directives(self) -> list[Directive]:
        self._update()
        return self._directives

    def session(self, members: int, first: int) -> int | None:
        """The RL step, ``first`` or later, in whose session so many ranks each are at least one step in.

        A quick machine ends some rollouts without a session, so no test knows beforehand which step has one.
        """
        newest = {report.rank: report for report, _ in self.frames}.values()
        steps = [r.rl_step for r in newest if r.place is not None and r.place.step >= 1]
        return next((step for step in sorted(set(steps)) if step >= first and steps.count(step) == members), None)

    def leader(self) -> int | None:
        """Of the newest session."""
        return next((d.order.leader for d in reversed(self.directives) if d.order is not None), None)

    @contextlib.contextmanager
    def coordinator_held(self) -> Iterator[None]:
        """The coordinator's thread does nothing meanwhile; other threads of its process continue."""
        (self._folder / HOLD).touch()
        try:
            yield
        finally:
            (self._folder / HOLD).unlink()
