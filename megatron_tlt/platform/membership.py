"""Which nodes take part in a launch: their launchers agree through files, whichever nodes are lost.

A launch is a sequence of rounds; a round ends when ranks are lost or nodes join. For each round, every launcher writes
its node's file. When the nodes that are alive are there, or after a time limit, one launcher publishes who takes part
and with which settings: the name can be created only once, so all read the same. A node without a part in a round waits
for the next one. Each launcher counts in a file of its own once a second: one that stands still is lost. Counts are
compared with a launcher's own clock, so the clocks of nodes may differ.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.files import atomic_write_bytes, temporary_sibling

MEMBERSHIP = "TLT_MEMBERSHIP"
"""Environment variable that names the folder to the ranks of a launch."""
T = TypeVar("T")
_PUBLISHED, _ENDED, _LEFT_OUT = "members.json", "ended.json", "left-out-"


@dataclass(frozen=True)
class LaunchMember:
    """A node of a launch: its index, the address at which other nodes reach it, and its number of devices."""

    index: int
    address: str
    devices: int


@dataclass(frozen=True)
class LaunchTimes:
    """Seconds between two counts, between two looks at files, and until a count that stands still means a lost node.

    A network file system may show a count seconds late.
    """

    beat_s: float = 1.0
    poll_s: float = 0.2
    silent_s: float = 15.0


@dataclass(frozen=True)
class LaunchRound:
    """Who takes part in a round, the first of them as its host, and the ``settings`` that all of them use.

    ``problem``: why nobody can; then there are no members.
    """

    number: int
    members: tuple[LaunchMember, ...]
    settings: dict[str, str]
    problem: str = ""

    def position(self, index: int) -> int | None:
        """The position of the node with this index among the members."""
        return next((at for at, member in enumerate(self.members) if member.index == index), None)


@dataclass(frozen=True)
class Beat:
    """What a launcher says while it is alive: a count, whether it has a part in a round, or waits for one that pays."""

    count: int
    wants_place: bool
    takes_part: bool = False


class BeatWatch:
    """Tells which nodes are alive from counts that change; pure but for the reading of files.

    Args:
        folder: of the launch.
        clock: seconds, from any start.
        times: of the launch.
    """

    def __init__(
        self, folder: Path, clock: Callable[[], float] = time.monotonic, times: LaunchTimes = LaunchTimes()
    ) -> None:
        self._folder, self._clock, self._silent_s = folder, clock, times.silent_s
        self._began = clock()
        self._seen: dict[int, tuple[int, float]] = {}
        self._changed: set[int] = set()

    def look(self) -> dict[int, Beat]:
        """Reads all counts; returns the newest of every node that may be alive.

        A node may be alive until its count has stood still for ``silent_s`` since the first look at it.
        """
        alive, now = {}, self._clock()
        for file in self._folder.glob("alive-*.json"):
            beat = _read(file, Beat)
            if beat is None:
                continue
            node = int(file.stem.removeprefix("alive-"))
            count, since = self._seen.get(node, (None, now))
            if count is None:
                self._seen[node] = beat.count, now
            elif beat.count != count:
                self._seen[node], since = (beat.count, now), now
                self._changed.add(node)
            if now - since < self._silent_s:
                alive[node] = beat
        return alive

    def proven(self) -> dict[int, Beat]:
        """As ``look``, but only nodes whose count was seen to change."""
        return {node: beat for node, beat in self.look().items() if node in self._changed}


class Membership:
    """One launcher's view of its launch.

    Args:
        folder: shared by all nodes, and of this launch alone.
        own: this node.
        count: number of nodes that the config asks for.
        wait_s: longest wait for nodes that have not come.
        first_wait_s: the same in the first round, when nodes start; by default ``wait_s``.
        times: the same for all nodes.
        stopped: whether this launcher was told to stop.
    """

    def __init__(
        self,
        folder: Path,
        own: LaunchMember,
        count: int,
        wait_s: float,
        stopped: Callable[[], bool] = lambda: False,
        first_wait_s: float | None = None,
        times: LaunchTimes = LaunchTimes(),
    ) -> None:
        self._times = times
        self._folder, self._own, self._count, self._stopped = folder, own, count, stopped
        self._wait_s, self._first_wait_s = wait_s, wait_s if first_wait_s is None else first_wait_s
        self._wants_place = self._takes_part = False
        self._ends = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._watch = BeatWatch(folder, times=times)
        self._thread = threading.Thread(target=self._count_up, name="membership", daemon=True)
        self._thread.start()

    def _count_up(self) -> None:
        count = 0
        while True:
            beat = Beat(count := count + 1, self._wants_place, self._takes_part)
            file = self._folder / f"alive-{self._own.index}.json"
            with contextlib.suppress(RunError):  # other nodes see the count stand still, as they must
                atomic_write_bytes(file, msgspec.json.encode(beat), durable=False)
            if self._ends.wait(self._times.beat_s):
                return

    def newest(self) -> LaunchRound | None:
        """The newest round that was published; None before the first."""
        return newest_round(self._folder)

    def has_ended(self) -> bool:
        """Whether the launch has ended, so its folder cannot be used again."""
        return (self._folder / _ENDED).exists()

    def has_begun(self, number: int) -> bool:
        """Whether some node has entered round ``number``, so the rounds before it cannot succeed any more."""
        return self._round(number).is_dir()

    def gather(
        self, number: int, choose: Callable[[Sequence[LaunchMember]], tuple[Sequence[LaunchMember], dict[str, str]]]
    ) -> LaunchRound | None:
        """Enters round ``number`` and waits until it is published; None if this launcher was told to stop.

        Args:
            choose: of the nodes that came, ascending, those that take part and their settings. One launcher calls it.
                A ConfigError becomes the round's ``problem``.
        """
        place = self._round(number)
        atomic_write_bytes(place / f"node-{self._own.index:05d}.json", msgspec.json.encode(self._own), durable=False)
        began, wait_s = time.monotonic(), self._wait_s if number else self._first_wait_s
        while not self._stopped():
            found = _read(place / _PUBLISHED, LaunchRound)
            if found is not None:
                self._takes_part = found.position(self._own.index) is not None
                return found
            came = [one for file in sorted(place.glob("node-*.json")) if (one := _read(file, LaunchMember))]
            if self._is_complete(came, number) or time.monotonic() - began > wait_s:
                self._publish(place / _PUBLISHED, _chosen(number, came, choose))
            else:
                time.sleep(self._times.poll_s)
        return None

    def _is_complete(self, came: Sequence[LaunchMember], number: int) -> bool:
        """Whether all have come; after the first round, all that are alive."""
        indices = {member.index for member in came}
        if len(indices) >= self._count:
            return True
        return number > 0 and indices >= set(self._watch.look())

    def _publish(self, path: Path, found: LaunchRound) -> None:
        temporary = temporary_sibling(path)
        temporary.write_bytes(msgspec.json.encode(found))
        try:
            os.link(temporary, path)  # unlike a rename, fails if another launcher was first
        except FileExistsError:
            pass
        finally:
            temporary.unlink(missing_ok=True)

    def wait_for_next(self, after: LaunchRound, pays: Callable[[], bool]) -> bool:
        """Waits without a part in round ``after`` until the next one begins; False if the launch ends before.

        Args:
            pays: whether a place for this node pays; asked again every ``silent_s``.

        Raises:
            RunError: no member of the round is alive, so the name of the launch was used before, or all are lost.
        """
        silent_s = self._times.silent_s
        asked, self._takes_part = -silent_s, False
        watch, began = BeatWatch(self._folder, times=self._times), time.monotonic()
        try:
            while not self._stopped() and not self.has_ended():
                if self.has_begun(after.number + 1):
                    return True
                now, alive = time.monotonic(), watch.look()
                if now - asked >= silent_s:
                    self._wants_place, asked = pays(), now
                if now - began > 2 * silent_s and not any(beat.takes_part for beat in alive.values()):
                    raise RunError(
                        f"{self._folder}: no node of round {after.number} of this launch is alive; start the launch "
                        "again, with another TLT_JOB"
                    )
                time.sleep(self._times.poll_s)
            return False
        finally:
            self._wants_place = False

    def end(self, *, launch: bool) -> None:
        """Ends the counting, and with ``launch`` the waiting of nodes without a part."""
        self._ends.set()
        self._thread.join()
        if launch:
            atomic_write_bytes(self._folder / _ENDED, b"{}", durable=False)

    def _round(self, number: int) -> Path:
        return self._folder / f"round-{number:05d}"


def newest_round(folder: Path) -> LaunchRound | None:
    """The newest round of a launch that was published; None before the first."""
    rounds = sorted(folder.glob(f"round-*/{_PUBLISHED}"))
    return _read(rounds[-1], LaunchRound) if rounds else None


def leave_out(folder: Path, nodes: Iterable[int]) -> None:
    """Takes from these nodes of a launch their part in all later rounds."""
    for node in nodes:
        atomic_write_bytes(folder / f"{_LEFT_OUT}{node}", b"", durable=False)


def left_out_nodes(folder: Path) -> set[int]:
    """The nodes of a launch that have no part in later rounds if the others suffice."""
    return {int(file.name.removeprefix(_LEFT_OUT)) for file in folder.glob(f"{_LEFT_OUT}*")}


def waiting_nodes(watch: BeatWatch) -> list[int]:
    """Nodes that wait for a place which would pay."""
    return sorted(node for node, beat in watch.proven().items() if beat.wants_place)


def _chosen(
    number: int,
    came: Sequence[LaunchMember],
    choose: Callable[[Sequence[LaunchMember]], tuple[Iterable[LaunchMember], dict[str, str]]],
) -> LaunchRound:
    try:
        members, settings = choose(came)
    except ConfigError as error:
        return LaunchRound(number, (), {}, str(error))
    return LaunchRound(number, tuple(members), settings)


def _read(file: Path, kind: type[T]) -> T | None:
    """The file's content; None if it is absent or not of this kind."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
