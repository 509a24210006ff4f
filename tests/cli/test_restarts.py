"""Whether a launch restarts: launchers that have seen different things decide alike, whatever fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.cli.restarts import EndedStart, Restarts
from megatron_tlt.cli.worker import WorkerError
from megatron_tlt.platform.deaths import Death
from megatron_tlt.platform.membership import LaunchMember, LaunchRound, RoundEnd, with_history

CHANGE = WorkerError(0, "node 1 joins after step 2", 1, "", 0.0, nodes_change=True)
KILLED = EndedStart(1, Death(1, 9), None)
LOST = EndedStart(1, None, WorkerError(0, "rank 0 lost its connection", 1, "", 0.0, ranks_lost=True))
CHANGES = EndedStart(1, None, CHANGE)
OBSOLETE = EndedStart(1, None, None, obsolete=True)


@given(
    most=st.integers(1, 4),
    rounds=st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.integers(1, 2), st.integers(0, 1)),
        min_size=1,
        max_size=12,
    ),
)
def test_the_first_launcher_that_gives_up_ends_the_launch(
    most: int, rounds: list[tuple[int, bool, bool, int, int]]
) -> None:
    """In each round: steps done, whether nodes change, whether the first launcher has none of the history, members,
    and how many rows the second launcher has read less."""
    done, behind = [0], [0]  # what both have read; the second one may have read a row less

    def second() -> tuple[int, int]:
        return max(0, done[0] - behind[0]), 0

    nodes = tuple(LaunchMember(index, "", 8) for index in range(2))
    launchers = [Restarts(most, progress, None, True, True) for progress in (lambda: (done[0], 0), second)]
    current, count = LaunchRound(0, nodes), 0
    for steps, changes, anew, members, rows in rounds:
        if anew:  # its node was lost and has returned
            launchers[0] = Restarts(most, lambda: (done[0], 0), None, True, True)
        for one in launchers:
            one.adopt(current.restarts, current.failed_after)
        done[0] += steps
        behind[0] = rows
        # the second launcher may see no more of a change than that the first one has gone on
        ends = (CHANGES, OBSOLETE) if changes else (KILLED, LOST)
        allowed = [one.allow(end) for one, end in zip(launchers, ends, strict=True)]
        assert [one.refused for one in launchers] == [not each for each in allowed]
        assert rows or allowed[0] == allowed[1], "with the same figures"
        count += not changes
        if not all(allowed):
            assert count > most or steps <= 1
            return
        assert count <= most
        following = LaunchRound(current.number + 1, nodes[:members])
        current = with_history(following, current, [one.end for one in launchers])
        assert current.restarts == count


def test_a_launch_of_one_launcher_counts_for_itself() -> None:
    done = 0
    alone = Restarts(2, lambda: (done, 0), None, False, False)
    alone.adopt(None, None)
    assert alone.allow(KILLED) and not alone.allow(KILLED), "the same step"
    done = 1
    assert alone.allow(KILLED) and not alone.are_left
    done = 2
    assert not alone.allow(KILLED) and alone.end == RoundEnd(failed_after=2)
