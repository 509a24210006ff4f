"""Recorded hidden states: whole responses only, prompts shared, memory bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.rollout import recorded_states
from megatron_tlt.rollout.recorded_states import LateCopies, RecordedStates

WIDTH = 4


def rows(request: int, begin: int, end: int) -> torch.Tensor:
    """States that say whose they are: (tokens, WIDTH)."""
    return torch.arange(begin, end)[:, None].repeat(1, WIDTH).bfloat16() + 100 * request


def recording(max_bytes: int = 1 << 20) -> RecordedStates:
    recorded = RecordedStates(max_bytes)
    recorded.begin()
    return recorded


@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=12), rejected=st.integers(0, 3))
def test_pieces_make_the_whole_whatever_their_cuts(cuts: list[int], rejected: int) -> None:
    """Rows of rejected drafts are not part of a span."""
    recorded, position = recording(), 0
    recorded.start("a", "first", range(3))
    for cut in cuts:
        states = torch.cat([rows(1, position, position + cut), torch.full((rejected, WIDTH), -1.0).bfloat16()])
        recorded.add(states, [("a", position, 0, cut)])
        position += cut
    recorded.finish("a", range(max(0, position + 1 - 3)))
    found = recorded.take()
    if position <= 3:  # no token of the response was computed
        assert not found
        return
    (one,) = found
    assert (one.request_id, one.prompt_length, len(one.token_ids)) == ("first", 3, position + 1)
    assert one.hidden.equal(rows(1, 0, position))


def test_pieces_are_given_back_one_response_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and joined states of all responses at once would be twice the bound of memory."""
    recorded = recording()
    for key in "abc":
        recorded.start(key, key, (1, 2))
        recorded.add(rows(1, 0, 5), [(key, 0, 0, 5)])
        recorded.finish(key, (3, 4, 5, 6))
    recordings = list(recorded._recordings.values())
    held: list[int] = []

    def joined(*arguments: Any) -> torch.Tensor | None:
        held.append(sum(len(one.pieces) for one in recordings))
        return upstream(*arguments)

    upstream = recorded_states.joined_rows
    monkeypatch.setattr(recorded_states, "joined_rows", joined)
    assert len(recorded.take()) == 3
    assert held[-3:] == [3, 2, 1]


class DelayedCopies(LateCopies):
    """A device whose copies arrive when the host waits for them, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[int] = []
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._marks = 0

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        source = super().copy(tensor, dtype)
        host = torch.full_like(source, -7)
        self._copied.append((host, source))
        return host

    def mark(self) -> Any:
        number, copied, self._copied = self._marks, self._copied, []
        self._marks += 1

        def synchronize() -> None:
            self.waited.append(number)
            for host, source in copied:
                host.copy_(source)

        return SimpleNamespace(synchronize=synchronize)


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> DelayedCopies:
    copies = DelayedCopies()
    monkeypatch.setattr(recorded_states, "LateCopies", lambda: copies)
    return copies


def test_a_step_waits_for_earlier_steps_alone(delayed: DelayedCopies) -> None:
    recorded = recording()
    recorded.start("a", "a", (7,))
    recorded.start("b", "b", (7,))
    for position in range(12):
        recorded.add(rows(1, position, position + 1), [("a", position, 0, 1)])
        if position < 6:
            recorded.add(rows(2, position, position + 1), [("b", position, 0, 1)])
        assert len(delayed.waited) == max(0, delayed._marks - recorded_states._STEPS_UNDER_WAY)
    recorded.finish("a", range(12))
    recorded.forget("b")
    (one,) = recorded.take()
    assert one.hidden.equal(rows(1, 0, 12)) and delayed.waited == list(range(18))


def test_a_prompts_states_do_not_pile_up(delayed: DelayedCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_states, "_BYTES_UNDER_WAY", 2 * WIDTH * 9)
    recorded = recording()
    recorded.start("a", "a", range(10))
    recorded.add(rows(1, 0, 9), [("a", 0, 0, 9)])
    assert delayed.waited == []
    recorded.add(rows(1, 9, 10), [("a", 9, 0, 1)])
    assert delayed.waited == [0]


def test_what_the_host_learns_late_counts(delayed: DelayedCopies) -> None:
    """Positions and rejected drafts of steps that were scheduled ahead; a request without a span has its own."""
    recorded, drafts, unused = recording(), 3, -1
    for key in "abc":
        recorded.start(key, key, (7,))
    recorded.forget("b")
    at = [0, 0, 0]
    for wrong in ([0, 3, 1], [2, 0, 3], [3, 3, 0], [0, 1, 2]):
        step = torch.cat([rows(number, first, first + drafts + 1) for number, first in enumerate(at)])
        spans = [(key, unused, (drafts + 1) * number, drafts + 1) for number, key in enumerate("abc")]
        recorded.add(step, spans, torch.tensor([at, wrong]).T)
        at = [first + drafts + 1 - less for first, less in zip(at, wrong, strict=True)]
    for key, end in zip("abc", at, strict=True):
        recorded.finish(key, range(end))
    found = {one.request_id: one.hidden for one in recorded.take()}
    assert found.keys() == {"a", "c"} and recorded.dropped == 0
    assert found["a"].equal(rows(0, 0, at[0])) and found["c"].equal(rows(2, 0, at[2]))


def test_a_common_beginning_comes_from_another_prompt() -> None:
    """A chat template or a task's wording: vLLM caches blocks, not prompts."""
    recorded = recording()
    for number in range(4):
        key = str(number)
        recorded.start(key, key, (5, 6, 7, 8, number, 9))
        begin = 4 if number else 0
        recorded.add(rows(number, begin, 8), [(key, begin, 0, 8 - begin)])
        recorded.finish(key, (1, 2, 3))
    found = {one.request_id: one.hidden for one in recorded.take()}
    assert len(found) == 4 and recorded.dropped == 0
    assert found["2"].equal(torch.cat([rows(0, 0, 4), rows(2, 4, 8)]))


def test_a_cached_prompt_has_the_states_of_who_computed_it() -> None:
    recorded = recording()
    for key in "ab":
        recorded.start(key, key, (7, 8, 9))
    recorded.start("c", "c", (1, 2, 3))
    recorded.add(rows(1, 0, 3), [("a", 0, 0, 3)])
    recorded.add(
        torch.cat([rows(1, 3, 5), rows(2, 2, 5), rows(3, 2, 5)]), [("a", 3, 0, 2), ("b", 2, 2, 3), ("c", 2, 5, 3)]
    )
    for key in "abc":
        recorded.finish(key, (4, 5, 6))
    found = {one.request_id: one.hidden for one in recorded.take()}
    assert found.keys() == {"a", "b"} and recorded.dropped == 1  # nobody computed the beginning of c
    assert found["b"].equal(torch.cat([rows(1, 0, 2), rows(2, 2, 5)]))
    assert recorded.take() == []


def test_what_is_computed_again_counts() -> None:
    """As after a request was preempted."""
    recorded = recording()
    recorded.start("a", "a", (7,))
    recorded.add(rows(1, 0, 3), [("a", 0, 0, 3)])
    recorded.add(rows(2, 0, 4), [("a", 0, 0, 4)])
    recorded.finish("a", (1, 2, 3, 4))
    assert recorded.take()[0].hidden[1:].equal(rows(2, 1, 4))


def test_memory_is_bounded_and_some_responses_are_whole_at_any_length() -> None:
    """Long responses side by side: giving half of them up again and again leaves the first to come."""
    tokens, requests = 200, 16
    recorded = recording(max_bytes=2 * WIDTH * 3 * tokens)
    for number in range(requests):
        recorded.start(str(number), str(number), (7,))
    held = 0
    for position in range(tokens):
        step = torch.cat([rows(number, position, position + 1) for number in range(requests)])
        recorded.add(step, [(str(number), position, number, 1) for number in range(requests)])
        held = max(held, recorded._held)
    for number in range(requests):
        recorded.finish(str(number), range(tokens))
    assert held <= 2 * WIDTH * (3 * tokens)
    found = recorded.take()
    assert [one.request_id for one in found] == ["0", "1"] and recorded.dropped == requests - 2
    assert all(one.hidden.equal(rows(int(one.request_id), 0, tokens)) for one in found)


def test_nothing_is_recorded_but_between_begin_and_end() -> None:
    recorded = RecordedStates(1 << 20)
    for begun in (False, True, False):
        if begun:
            recorded.begin()
        recorded.start("a", "a", (7,))
        recorded.add(rows(1, 0, 2), [("a", 0, 0, 2)])
        recorded.finish("a", (1, 2))
        assert recorded.num_finished == begun and len(recorded.take()) == begun
    recorded.begin()
    recorded.start("a", "a", (7,))
    recorded.end()
    assert not recorded.records and recorded.num_finished == 0


def test_ranks_of_an_engine_share_the_responses() -> None:
    found = []
    for rank in range(2):
        recorded = recording()
        for number in range(5):
            recorded.start(str(number), str(number), (7,))
            recorded.add(rows(number, 0, 2), [(str(number), 0, 0, 2)])
            recorded.finish(str(number), (1, 2))
        found.append([one.request_id for one in recorded.take(rank, 2)])
    assert found == [["0", "2", "4"], ["1", "3"]]


def test_a_response_that_was_given_up_is_none() -> None:
    recorded = recording()
    recorded.start("a", "a", (7,))
    recorded.add(rows(1, 0, 2), [("a", 0, 0, 2)])
    recorded.forget("a")
    assert recorded.take() == []
