"""What a round of tail batching keeps: a function of the responses, whatever the engines know of each other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.config.schedule import ScheduleConfig
from megatron_tlt.config.tail import TailConfig
from megatron_tlt.tasks.rounds import AheadScheduler, Key, TailRound, TailScheduler, TailState, TokenRace, select


@st.composite
def rounds(draw: st.DrawFn) -> TailRound:
    keep_problems, keep_samples = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    problems = tuple(range(keep_problems + draw(st.integers(0, 3))))
    must = draw(st.integers(0, keep_problems))
    return TailRound(
        problems, keep_samples + (0 if must else draw(st.integers(0, 3))), keep_problems, keep_samples, must
    )


def all_keys(asked: TailRound) -> list[Key]:
    return [(at, sample) for at in range(len(asked.problems)) for sample in range(asked.samples)]


@given(st.data())
def test_races_that_know_little_of_each_other_keep_what_full_responses_would(data: st.DataObject) -> None:
    """Engines make steps of 1 to 3 tokens, in any order, and hear of each other late or never."""
    asked = data.draw(rounds())
    keys = all_keys(asked)
    lengths = dict(
        zip(keys, data.draw(st.lists(st.integers(1, 9), min_size=len(keys), max_size=len(keys))), strict=True)
    )
    engines = data.draw(st.integers(1, 4))
    races = [TokenRace(asked.samples, asked.keep_problems, asked.keep_samples, asked.must) for _ in range(engines)]
    unfinished = [{key: 0 for key in keys if key[0] % engines == engine} for engine in range(engines)]
    finished: dict[Key, int] = {}
    aborted: dict[Key, int] = {}
    while any(unfinished):
        at = data.draw(st.sampled_from([i for i in range(engines) if unfinished[i]]))
        race, mine = races[at], unfinished[at]
        seats = data.draw(st.integers(1, len(mine)))
        for key in list(mine)[:seats]:  # the others wait
            mine[key] += data.draw(st.integers(1, 3))
        ended = [key for key, tokens in mine.items() if tokens >= lengths[key]]
        for key in ended:
            del mine[key]
        for key in race.lost(mine):
            aborted[key] = mine.pop(key)
        for key in ended:
            finished[key] = lengths[key]
            race.finished(key, lengths[key])
        if data.draw(st.booleans()):
            race.learn(data.draw(st.sampled_from(races)).finishes)
    assert select(asked, finished) == select(asked, lengths)
    assert all(tokens < lengths[key] for key, tokens in aborted.items())
    if asked.is_long:
        assert not aborted


def test_the_fewest_tokens_win_and_earlier_problems_among_equals() -> None:
    asked = TailRound((7, 8, 9), 2, 2, 2)
    lengths = {(0, 0): 5, (0, 1): 9, (1, 0): 4, (1, 1): 4, (2, 0): 1, (2, 1): 9}
    assert select(asked, lengths) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    del lengths[0, 1]
    assert select(asked, lengths) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    del lengths[2, 0]
    with pytest.raises(ValueError, match="1 problems have 2 responses; needed: 2"):
        select(asked, lengths)


def test_of_more_responses_the_shortest_are_kept() -> None:
    asked = TailRound((7, 8), 3, 1, 2)
    lengths = {(0, 0): 3, (0, 1): 9, (0, 2): 3, (1, 0): 2, (1, 1): 2, (1, 2): 2}
    assert select(asked, lengths) == [(1, 0), (1, 1)]


def test_a_problem_that_cannot_win_is_ended_as_a_whole() -> None:
    race = TokenRace(samples=2, keep_problems=1, keep_samples=2)
    assert race.limit == math.inf and race.lost({(1, 0): 100, (1, 1): 0}) == []
    assert not race.finished((0, 0), 3) and race.finished((0, 1), 5) and race.limit == 5
    assert race.lost({(1, 0): 4, (1, 1): 0}) == []
    assert race.lost({(1, 0): 5, (1, 1): 0, (2, 0): 4}) == [(1, 0), (1, 1)], "the second one has not begun"
    assert race.lost({(1, 0): 6, (2, 0): 4}) == [], "each once"
    assert race.learn({2: 4}) and not race.learn({2: 4}) and race.limit == 4
    assert race.lost({(2, 1): 4}) == [(2, 1)]


def test_deferred_problems_fill_a_long_round_in_their_order() -> None:
    scheduler = TailScheduler(TailConfig(eta_prompts=1.5, eta_responses=1.5), prompts=4, group=3)
    state, kinds = TailState(10), []
    trained: list[int] = []
    for _ in range(12):
        asked = scheduler.round(state)
        kinds.append(asked.is_long)
        assert asked.size == ((4, 3) if asked.is_long else (6, 5))
        kept = [0, 1, 2, 3] if asked.is_long else [0, 2, 3, 5]
        trained += [asked.problems[at] for at in kept]
        state = scheduler.after(state, asked, kept)
    assert kinds == [False, False, True] * 4
    assert sorted([*trained, *state.deferred]) == list(range(10, state.next_problem)), "each once"
    assert trained[8:12] == [11, 14, 17, 20]


def test_a_round_of_deferred_problems_is_not_taken_for_new_ones() -> None:
    scheduler = TailScheduler(TailConfig(eta_prompts=1.0, eta_responses=2.0), prompts=2, group=1)
    state = TailState(0)
    asked = scheduler.round(state)
    assert asked.size == (2, 2) and not asked.is_long
    assert scheduler.after(state, asked, [0, 1]) == TailState(2, ())


def test_partial_steps_ask_first_for_what_was_left() -> None:
    scheduler = AheadScheduler(ScheduleConfig(kind="partial", eta_prompts=1.5), prompts=4, group=2)
    state, used, asked = TailState(), [], scheduler.round(TailState())
    assert (asked.problems, asked.samples, asked.must) == ((0, 1, 2, 3, 4, 5), 2, 0)
    for kept in ([0, 2, 3, 5], [0, 1, 2, 3], [2, 3, 4, 5]):
        asked = scheduler.round(state)
        used += [asked.problems[at] for at in kept]
        state = scheduler.after(state, asked, kept)
    # the first step left 1 and 4, the second 8 and 9 of 1 4 6 7 8 9, the third 8 and 9 again of 8 9 10 11 12 13
    assert used == [0, 2, 3, 5, 1, 4, 6, 7, 10, 11, 12, 13]
    assert sorted([*used, *state.deferred]) == list(range(state.next_problem)), "each problem is used once or waits"


def test_one_step_off_trains_on_what_the_step_before_began() -> None:
    scheduler = AheadScheduler(ScheduleConfig(kind="one_step_off"), prompts=3, group=2)
    state = TailState()
    for step in range(4):
        asked = scheduler.round(state)
        assert asked.problems == tuple(range(3 * step, 3 * step + 6)) and asked.must == 3
        lengths = {(at, sample): 9 - at for at in range(6) for sample in range(2)}
        kept = select(asked, lengths)
        assert {at for at, _ in kept} == {0, 1, 2}, "however short the others are"
        state = scheduler.after(state, asked, [0, 1, 2])
        assert state == TailState(3 * step + 6, tuple(range(3 * step + 3, 3 * step + 6)))


def test_one_step_off_ends_everything_once_its_problems_have_ended() -> None:
    race = TokenRace(samples=1, keep_problems=2, keep_samples=1, must=2)
    assert not race.finished((2, 0), 1) or race.lost({(0, 0): 5, (1, 0): 5, (3, 0): 5}) == []
    race.finished((0, 0), 7)
    assert race.lost({(1, 0): 7, (3, 0): 7}) == []
    race.learn({1: 20})
    assert race.lost({(3, 0): 8}) == [(3, 0)]


def test_what_would_get_too_old_comes_first_and_wins() -> None:
    scheduler = AheadScheduler(ScheduleConfig(kind="partial", eta_prompts=1.5), prompts=4, group=1)
    state = TailState(next_problem=9, deferred=(3, 5, 7))
    asked = scheduler.round(state, due={5, 7})
    assert asked.problems == (5, 7, 3, 9, 10, 11) and asked.must == 2
    lengths = {(0, 0): 90, (1, 0): 80, (2, 0): 7, (3, 0): 6, (4, 0): 5, (5, 0): 4}
    assert [at for at, _ in select(asked, lengths)] == [0, 1, 4, 5], "however long they take"
    assert scheduler.after(state, asked, [0, 1, 4, 5]) == TailState(12, (3, 9))
    with pytest.raises(ValueError, match="0 problems have 1 responses; needed: 4"):
        select(asked, {key: tokens for key, tokens in lengths.items() if key != (1, 0)})
    race = TokenRace(samples=1, keep_problems=4, keep_samples=1, must=2)
    for at in (2, 3, 4, 5):
        race.finished((at, 0), lengths[at, 0])
    race.finished((1, 0), 80)
    assert race.lost({(0, 0): 85}) == [] and math.isinf(race.limit), "what must win is waited for"
    race.finished((0, 0), 90)
    assert race.limit == 5
