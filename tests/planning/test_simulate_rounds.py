"""Rounds in which responses race, and replicas that stream: the simulation against the product's own rules."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.config.schedule import ScheduleConfig
from megatron_tlt.config.tail import TailConfig
from megatron_tlt.planning.simulation.lengths import LongTail
from megatron_tlt.planning.simulation.phases import (
    bubble_steps,
    drafter_done_at,
    streamed_responses,
    training_seconds,
)
from megatron_tlt.planning.simulation.policies import Prompts
from megatron_tlt.planning.simulation.rollout import Speculation
from megatron_tlt.planning.simulation.rounds import RacingRounds, RoundKind, race
from megatron_tlt.planning.simulation.scenario import Actor
from megatron_tlt.planning.simulation.steps import simulate, summarize
from megatron_tlt.tasks.rounds import TailRound, TokenRace, select
from tests.planning.simulated import scenario


def test_tail_batching_puts_off_and_comes_back() -> None:
    one = scenario(prompts=8, group=4, tail=TailConfig(eta_prompts=1.5, eta_responses=1.25))
    prompts = Prompts(one, np.random.default_rng(0), "tail")
    assert prompts.racing is not None
    waiting = []
    for _ in range(6):
        found = prompts.round(Speculation())
        waiting.append(len(prompts.racing.state.deferred))
        assert len(found.kept) == 8 * 4
        assert found.seconds == found.rollout.seconds_in_all
    # four put off in each short round; a long one takes eight as soon as there are eight
    assert waiting == [4, 8, 0, 4, 8, 0]


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_responses_decode_what_the_products_race_lets_them(
    keep: int, group: int, more: int, extra: int, must: int, draw: random.Random
) -> None:
    """One engine, whose responses all gain a token in each step."""
    asked = TailRound(tuple(range(keep + more)), group + extra, keep, group, min(must, keep))
    left = np.array([[float(draw.randint(1, 9)) for _ in range(group + extra)] for _ in asked.problems])
    winners, decoded = race(asked, left)
    product = TokenRace(asked.samples, keep, group, asked.must)
    running = {(at, sample) for at in asked.problems for sample in range(asked.samples)}
    found, finished = np.zeros_like(left), {}
    while running and not asked.is_long:
        for key in sorted(running):
            found[key] += 1
        for key in sorted(key for key in running if found[key] == left[key]):
            running.remove(key)
            finished[key] = int(found[key])
            product.finished(key, finished[key])
        running -= set(product.lost({key: int(found[key]) for key in running}))
    if asked.is_long:
        assert (decoded == left).all() and len(winners) == keep
        return
    assert sorted({at for at, _ in select(asked, finished)}) == winners.tolist()
    # the product also aborts the rest of a problem that is out
    assert (found <= decoded).all() and all(found[key] == decoded[key] for key in select(asked, finished))


@pytest.mark.parametrize("kind", ["continue", "partial", "one_step_off"])
def test_continued_responses_lose_nothing_and_none_gets_too_old(kind: RoundKind) -> None:
    one = scenario(prompts=8, group=4, tail=TailConfig(eta_prompts=1.5), lengths=LongTail(60.0, 1.0))
    rounds = RacingRounds(one, kind, np.random.default_rng(1))
    decoded = kept = continued = 0.0
    for step in range(40):
        found = rounds.next()
        assert len(found.kept) == 32
        continued += (found.reached - found.decoded).sum()
        decoded, kept = decoded + found.decoded.sum(), kept + found.kept.sum()
        waiting = sum(rounds._problems[index].done.sum() for index in rounds.state.deferred)
        assert decoded == pytest.approx(kept + waiting), "what was decoded was trained on, or waits"
        assert all(step + 1 - rounds._problems[index].begun <= rounds._most for index in rounds.state.deferred)
    assert continued > 0


def test_replicas_stream_in_their_bubble_and_a_part_may_be_late() -> None:
    one = scenario(engine_devices=1, devices=4, per_node=4, actor=Actor(recompute=False), stream_part=0.5)
    load = one.model.parameters * 2 / one.constants.wake_bandwidth
    lengths, ends = np.full(8, 1000.0), np.array([100.0, 10.0, 0.0, 100.0 - load - 1e-3])
    streamed, late = streamed_responses(one, ends, lengths)
    # the second and third have time for both parts; the last begins one, and is late
    assert streamed.tolist() == [False, False, True, True, True, True, True, False]
    seconds = training_seconds(one, lengths)
    whole = seconds["log_probs"] + seconds["update"]
    assert 0 < late < 0.5 * whole
    off, row = summarize(simulate(scenario(), ("off", "stream"), (0, 1), 3))
    assert off["streamed"] == 0 < row["streamed"] < 1 and row["update_s"] < off["update_s"]
    # one replica of all devices has no bubble
    assert not streamed_responses(replace(one, actor=Actor(tensor=4)), ends, lengths)[0].any()


def test_the_drafter_has_the_bubble_first_and_the_stream_what_is_left() -> None:
    one = scenario(prompts=16, group=8)
    rows = {row["policy"]: row for row in summarize(simulate(one, ("off", "spot", "stream", "stream+spot"), (0, 1), 4))}
    both, spot = rows["stream+spot"], rows["spot"]
    assert both["streamed"] > 0 and both["update_s"] < spot["update_s"]
    assert both["drafter_steps"] < spot["drafter_steps"]
    # of a drafter that owes steps, the stream waits for them
    ends, responses = np.array([0.0, 10.0, 10.0, 40.0]), np.full(4, 8.0)
    small = scenario(engine_devices=4, spot=replace(one.spot, min_replicas=2, min_entries=8))
    assert drafter_done_at(small, ends, responses, 600.0) == 10.0
    whole = bubble_steps(small, ends, responses, 600.0)
    assert whole > 0, "two engines from 10 s and a third one, until 40 s"
    for share in (0.1, 0.5, 0.9):
        owed = replace(small, spot=replace(small.spot, min_steps=share * whole))
        assert drafter_done_at(owed, ends, responses, 600.0) == pytest.approx(10 + share * 30)
    owed = replace(small, spot=replace(small.spot, min_steps=1.1 * whole))
    assert drafter_done_at(owed, ends, responses, 600.0) == np.inf
    assert drafter_done_at(replace(small, spot=replace(small.spot, min_replicas=9)), ends, responses, 600.0) == 0


def test_of_tail_batching_long_rounds_alone_are_streamed() -> None:
    one = scenario(prompts=8, group=4, tail=TailConfig(eta_prompts=1.5))
    (steps,) = simulate(one, ("tail+stream",), (0,), 6)["tail+stream"].steps
    assert [step.streamed > 0 for step in steps] == [False, False, True] * 2


def test_what_is_too_old_does_not_win_before_what_becomes_too_old() -> None:
    settings = ScheduleConfig(kind="partial", eta_prompts=2.5, max_staleness=1)
    one = scenario(prompts=8, group=4, schedule=settings)
    rounds = RacingRounds(one, "partial", np.random.default_rng(0))
    found = [rounds.next() for _ in range(60)]
    decoded, kept = (sum(getattr(each, name).sum() for each in found) for name in ("decoded", "kept"))
    assert decoded / kept < 1.4, "expired problems that win are decoded anew, while others expire"
