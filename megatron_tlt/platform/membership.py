"""Which nodes take part in a launch: their launchers agree through files, whichever nodes are lost.

A launch is a sequence of rounds; a round ends when ranks are lost or nodes join. For each round, every launcher writes
its node's file. When the nodes that are alive are there, or after a time limit, one launcher publishes who takes part
and with which config: the name can be created only once, so all read the same. They also read how many restarts there
were; the first one that gives up ends the launch for all. A node without a part in a round waits for the next one. Each
launcher counts in a file of its own once a second: one that stands still is lost. Counts are compared with a launcher's
own clock, so the clocks of nodes may differ.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.files import atomic_write_bytes, temporary_sibling

MEMBERSHIP = "TLT_MEMBERSHIP"
"""Environment variable that names the folder to the ranks of a launch."""
T = TypeVar("T")
_PUBLISHED, _MEMBERS, _ENDED, _LEFT_OUT = "published", "members.json", "ended.json", "left-out-"


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
    """Who takes part in a round, the first of them as its host, and what all of them know.

    Attributes:
        number: from 0.
        members: ascending.
        config: that all members use, a resolved one as text.
        problem: why nobody can take part; then there are no members.
        restarts: rounds so far that began because ranks were lost.
        failed_after: steps that were done when the same members lost ranks in the round before; None if they did not.
    """

    number: int
    members: tuple[LaunchMember, ...]
    config: str = ""
    problem: str = ""
    restarts: int = 0
    failed_after: int | None = None

    def position(self, index: int) -> int | None:
        """The position of the node with this index among the members."""
        return next((at for at, member in enumerate(self.members) if member.index == index), None)


@dataclass(frozen=True)
class RoundEnd:
    """Why a launcher has left its round: ranks were lost after so many steps, or nodes change; neither: it had none."""

    failed_after: int | None = None
    nodes_change: bool = False


@dataclass(frozen=True)
class Arrival:
    """A node that enters a round, and why its launcher has left the one before."""

    member: LaunchMember
    end: RoundEnd


RoundChoice = tuple[Sequence[LaunchMember], str]
"""Who takes part in a round, and the config of all of them."""


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
        self, number: int, choose: Callable[[Sequence[LaunchMember]], RoundChoice], end: RoundEnd = RoundEnd()
    ) -> LaunchRound | None:
        """Enters round ``number`` and waits until it is published; None if this launcher was told to stop.

        Args:
            choose: of the nodes that came, ascending, those that take part and their config. One launcher calls it.
                A ConfigError becomes the round's ``problem``.
            end: of the round before, as this launcher saw it.

        Raises:
            RunError: the file system does not let a round be published, or another launcher has ended the launch.
        """
        place = self._round(number)
        own = msgspec.json.encode(Arrival(self._own, end))
        atomic_write_bytes(place / f"node-{self._own.index:05d}.json", own, durable=False)
        began, wait_s = time.monotonic(), self._wait_s if number else self._first_wait_s
        before = self._before(number)
        while not self._stopped():
            found = _read(place / _PUBLISHED / _MEMBERS, LaunchRound)
            if found is not None:
                self._takes_part = found.position(self._own.index) is not None
                return found
            if self.has_ended():
                raise RunError(f"{self._folder}: another node has ended the launch; its output says why")
            came = [one for file in sorted(place.glob("node-*.json")) if (one := _read(file, Arrival))]
            members = [one.member for one in came]
            if self._is_complete(members, number) or time.monotonic() - began > wait_s:
                ends = [one.end for one in came]
                self._publish(place / _PUBLISHED, with_history(_chosen(number, members, choose), before, ends))
            time.sleep(self._times.poll_s)
        return None

    def _before(self, number: int) -> LaunchRound | None:
        """The round before ``number``, which its launchers have read; None for the first.

        Raises:
            RunError: it cannot be read, so nobody could say how many restarts there were.
        """
        if not number:
            return None
        file = self._round(number - 1) / _PUBLISHED / _MEMBERS
        found = _read(file, LaunchRound)
        if found is None:
            raise RunError(f"{file}: not readable any more")
        return found

    def _is_complete(self, came: Sequence[LaunchMember], number: int) -> bool:
        """Whether all have come; after the first round, all that are alive."""
        indices = {member.index for member in came}
        if len(indices) >= self._count:
            return True
        return number > 0 and indices >= set(self._watch.look())

    def _publish(self, folder: Path, found: LaunchRound) -> None:
        temporary = temporary_sibling(folder)
        try:
            temporary.mkdir()
            (temporary / _MEMBERS).write_bytes(msgspec.json.encode(found))
            # unlike that of a file, fails if another launcher was first; hard links, which would too, may be missing
            os.rename(temporary, folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another launcher was first
                raise RunError(
                    f"{folder}: not published: {error.strerror or error}; needed: a file system that all nodes can "
                    "write to and that renames folders"
                ) from error

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
    rounds = sorted(folder.glob(f"round-*/{_PUBLISHED}/{_MEMBERS}"))
    return _read(rounds[-1], LaunchRound) if rounds else None


def with_history(found: LaunchRound, before: LaunchRound | None, ends: Sequence[RoundEnd]) -> LaunchRound:
    """A round with the restarts up to it; pure.

    It counts as a restart unless a launcher has left the round before for a change of nodes: the others may then have
    seen no more than lost ranks. A step that failed before may succeed with other members.

    Args:
        found: the round.
        before: the one before; None for the first.
        ends: of that one, as the launchers that came saw it.
    """
    if before is None:
        return found
    if any(end.nodes_change for end in ends):
        return replace(found, restarts=before.restarts)
    done = [end.failed_after for end in ends if end.failed_after is not None]
    again = max(done) if done and found.members == before.members else None
    return replace(found, restarts=before.restarts + 1, failed_after=again)


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
    choose: Callable[[Sequence[LaunchMember]], RoundChoice],
) -> LaunchRound:
    try:
        members, config = choose(came)
    except ConfigError as error:
        return LaunchRound(number, (), problem=str(error))
    return LaunchRound(number, tuple(members), config)


def _read(file: Path, kind: type[T]) -> T | None:
    """The file's content; None if it is absent or not of this kind."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
