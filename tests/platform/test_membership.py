"""Launchers agree on who takes part, whoever comes, goes or returns."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.membership import (
    Beat,
    BeatWatch,
    LaunchMember,
    LaunchRound,
    LaunchTimes,
    Membership,
    RoundChoice,
    RoundEnd,
    waiting_nodes,
    with_history,
)

TIMES = LaunchTimes(beat_s=0.05, poll_s=0.01, silent_s=1.0)


def member(index: int) -> LaunchMember:
    return LaunchMember(index, f"10.0.0.{index}", 8)


def everybody(came: Sequence[LaunchMember]) -> RoundChoice:
    return came, f"{len(came)} nodes"


def node(folder: Path, index: int, count: int, wait_s: float = 60.0) -> Membership:
    return Membership(folder, member(index), count, wait_s, times=TIMES)


def together(*calls: Callable[[], LaunchRound | None]) -> list[LaunchRound | None]:
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[LaunchRound | None]] = [pool.submit(call) for call in calls]
        return [future.result(60) for future in futures]


def test_all_read_the_same_round_and_one_chooses(tmp_path: Path) -> None:
    chose = []

    def choose(came: Sequence[LaunchMember]) -> RoundChoice:
        chose.append(threading.get_ident())
        return came, str(threading.get_ident())

    nodes = [node(tmp_path, index, 4) for index in range(4)]
    rounds = together(*(lambda one=one: one.gather(0, choose) for one in nodes))
    assert len(set(map(repr, rounds))) == 1
    first = rounds[0]
    assert first is not None and first.members == tuple(member(index) for index in range(4))
    assert first.config in map(str, chose), "what one of them chose, whole"
    for one in nodes:
        one.end(launch=True)


def test_a_launch_that_one_node_has_ended_begins_no_round(tmp_path: Path) -> None:
    nodes = [node(tmp_path, index, 2) for index in range(2)]
    together(*(lambda one=one: one.gather(0, everybody) for one in nodes))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(nodes[0].gather, 1, everybody)
        time.sleep(0.2)
        nodes[1].end(launch=True)  # it does not restart, whatever the other one has seen
        with pytest.raises(RunError, match="another node has ended the launch"):
            waits.result(20)
    nodes[0].end(launch=False)


def test_a_round_whose_history_is_lost_is_not_published(tmp_path: Path) -> None:
    alone = node(tmp_path, 0, 1)
    alone.gather(0, everybody)
    (file,) = tmp_path.glob("round-00000/published/*")
    file.write_bytes(b"")
    with pytest.raises(RunError, match=r"round-00000.*not readable any more"):
        alone.gather(1, everybody)
    alone.end(launch=True)


def test_a_node_that_does_not_come_is_left_out_after_the_wait(tmp_path: Path) -> None:
    own = node(tmp_path, 1, 2, wait_s=0.3)
    began = time.monotonic()
    found = own.gather(0, everybody)
    own.end(launch=True)
    assert found == LaunchRound(0, (member(1),), "1 nodes") and time.monotonic() - began >= 0.3
    assert found.position(1) == 0 and found.position(0) is None


def test_after_the_first_round_a_lost_node_is_not_waited_for_and_a_living_one_is(tmp_path: Path) -> None:
    nodes = [node(tmp_path, index, 3) for index in range(3)]
    together(*(lambda one=one: one.gather(0, everybody) for one in nodes))
    nodes[2].end(launch=False)  # its count stands still from here on
    began = time.monotonic()

    def late() -> LaunchRound | None:
        time.sleep(1.5)
        return nodes[1].gather(1, everybody)

    first, second = together(lambda: nodes[0].gather(1, everybody), late)
    assert first == second and first is not None
    assert [one.index for one in first.members] == [0, 1]
    assert 1.5 <= time.monotonic() - began < 30.0
    assert nodes[0].has_begun(1) and not nodes[0].has_begun(2)
    for one in nodes[:2]:
        one.end(launch=True)


def test_what_nobody_can_do_is_a_problem_of_all(tmp_path: Path) -> None:
    def refuse(came: Sequence[LaunchMember]) -> RoundChoice:
        raise ConfigError(f"elastic.min_devices: found {len(came)}")

    nodes = [node(tmp_path, index, 2) for index in range(2)]
    found = together(*(lambda one=one: one.gather(0, refuse) for one in nodes))
    assert found[0] == found[1] == LaunchRound(0, (), problem="elastic.min_devices: found 2")
    for one in nodes:
        one.end(launch=True)


def test_a_node_that_returns_is_noticed_and_joins_the_next_round(tmp_path: Path) -> None:
    first = node(tmp_path, 0, 2, wait_s=0.2)
    found = first.gather(0, everybody)
    assert found is not None and len(found.members) == 1
    watch = BeatWatch(tmp_path, times=TIMES)
    second = node(tmp_path, 1, 2)
    assert second.newest() == found
    with ThreadPoolExecutor(2) as pool:
        joins = pool.submit(second.wait_for_next, found, lambda: True)
        deadline = time.monotonic() + 30
        while waiting_nodes(watch) != [1]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        again = pool.submit(first.gather, 1, everybody)
        assert joins.result(30)
        joined = second.gather(1, everybody)
        assert joined == again.result(30) and joined is not None and len(joined.members) == 2
    time.sleep(0.3)
    assert waiting_nodes(watch) == [], "it has its place"
    first.end(launch=True)
    second.end(launch=True)


def test_waiting_ends_with_the_launch_or_when_nobody_is_left(tmp_path: Path) -> None:
    first = node(tmp_path, 0, 2, wait_s=0.1)
    found = first.gather(0, everybody)
    assert found is not None
    second = node(tmp_path, 1, 2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(second.wait_for_next, found, lambda: False)
        time.sleep(2.5)
        assert not waits.done(), "a living member is waited for"
        first.end(launch=True)
        assert waits.result(30) is False
    (tmp_path / "ended.json").unlink()
    with pytest.raises(RunError, match=r"no node of round 0 of this launch is alive; .* another TLT_JOB"):
        second.wait_for_next(found, lambda: False)
    second.end(launch=False)


def test_a_launcher_that_is_told_to_stop_waits_no_longer(tmp_path: Path) -> None:
    stopped = threading.Event()
    own = Membership(tmp_path, member(0), 2, 60.0, stopped.is_set, times=TIMES)
    stopped.set()
    assert own.gather(0, everybody) is None
    own.end(launch=True)


def test_a_count_that_stands_still_is_a_lost_node_whatever_the_nodes_clocks(tmp_path: Path) -> None:
    now = [0.0]
    watch = BeatWatch(tmp_path, lambda: now[0], TIMES)

    def write(index: int, count: int, *, wants_place: bool = False) -> None:
        (tmp_path / f"alive-{index}.json").write_bytes(msgspec.json.encode(Beat(count, wants_place)))

    write(0, 7)
    write(1, 3, wants_place=True)
    assert set(watch.look()) == {0, 1} and watch.proven() == {}, "they may be alive"
    now[0] = 0.6
    write(1, 4, wants_place=True)
    assert waiting_nodes(watch) == [1]
    now[0] = 1.1
    assert set(watch.look()) == {1}, "0 has stood still since the first look"
    now[0] = 1.7
    assert watch.look() == {}
    (tmp_path / "alive-1.json").write_text("{")
    assert watch.look() == {}


def test_no_hard_links_are_needed_and_a_folder_that_cannot_be_renamed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    own = node(tmp_path, 0, 1)
    assert own.gather(0, everybody) == LaunchRound(0, (member(0),), "1 nodes")
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(
        RunError, match=r"round-00001/published: not published: Operation not permitted; needed: a file"
    ):
        own.gather(1, everybody)
    assert [file.name for file in (tmp_path / "round-00001").iterdir()] == ["node-00000.json"]
    own.end(launch=True)


def test_restarts_are_counted_by_the_rounds_for_all_launchers_alike(tmp_path: Path) -> None:
    nodes = [node(tmp_path, index, 2) for index in range(2)]

    def gather(number: int, *ends: RoundEnd) -> LaunchRound:
        calls = [
            lambda one=one, end=end: one.gather(number, everybody, end) for one, end in zip(nodes, ends, strict=True)
        ]
        first, second = together(*calls)
        assert first == second and first is not None
        return first

    lost, late, changed, anew = RoundEnd(failed_after=4), RoundEnd(failed_after=3), RoundEnd(None, True), RoundEnd()
    found = [gather(0, anew, anew), gather(1, lost, late), gather(2, changed, lost), gather(3, lost, anew)]
    assert [(one.restarts, one.failed_after) for one in found] == [(0, None), (1, 4), (1, None), (2, 4)]
    for one in nodes:
        one.end(launch=True)


def test_a_step_that_failed_with_other_members_may_succeed() -> None:
    before = LaunchRound(4, (member(0), member(1)), restarts=2, failed_after=7)
    found = with_history(LaunchRound(5, (member(0),)), before, [RoundEnd(failed_after=7)])
    assert (found.restarts, found.failed_after) == (3, None)
