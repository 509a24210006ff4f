"""Who gets the bubble, which ranks stream together, and what they have streamed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.actor.scores import PolicyScores
from megatron_tlt.algorithms.registry import ALGORITHMS, WHOLE_BATCH, build_algorithm, is_per_problem
from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.errors import RanksLost, RunError
from megatron_tlt.platform import lost_ranks, phase_watch
from megatron_tlt.platform.phase_watch import PhaseWatch
from megatron_tlt.trainer.bubble import Bubble, RolloutHistory
from megatron_tlt.trainer.stream import RolloutArrivals, parts_of, units_of
from megatron_tlt.trainer.streamed import Streamed
from tests.helpers.samples import Sample, batch_of


@pytest.mark.parametrize(
    ("replicas", "engine", "units"),
    [
        ([0, 1, 2, 3], 1, [[0], [1], [2], [3]]),
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 0, 1, 1], 1, [[0, 1], [2, 3]]),
        # TP 2, PP 2, DP 2: the stages of a replica are apart
        ([0, 0, 1, 1, 0, 0, 1, 1], 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ([0, 0, 1, 1, 0, 0, 1, 1], 4, [[*range(8)]]),
        ([0, 1, 0, 1], 2, [[0, 1, 2, 3]]),
    ],
)
def test_a_unit_has_whole_replicas_and_whole_engines(replicas: list[int], engine: int, units: list[list[int]]) -> None:
    assert units_of(replicas, engine) == units


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_units_are_the_finest_partition(size: int, count: int, power: int, draw: random.Random) -> None:
    world = size * count * 2**power
    replicas = [at % (world // size) for at in range(world)]
    draw.shuffle(replicas)
    engine = draw.choice([n for n in range(1, world + 1) if world % n == 0])
    units = units_of(replicas, engine)
    assert sorted(itertools.chain(*units)) == list(range(world))
    for unit in units:
        together = {at for at in range(world) if replicas[at] in {replicas[own] for own in unit}}
        assert set(unit) == together == {at for own in unit for at in range(world) if at // engine == own // engine}


def test_parts_cover_all_samples() -> None:
    assert parts_of([3, 5, 8, 9, 11], 0.4) == [[3, 5], [8, 9], [11]]
    assert (
        parts_of([3, 5], 1.0) == [[3, 5]] and parts_of([3, 5, 7], 0.01) == [[3], [5], [7]] and parts_of([], 0.5) == []
    )


def test_a_wait_for_a_rank_that_never_comes_is_ended_by_the_limit_of_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, errors = dist.HashStore(), list[RanksLost]()
    arrivals = RolloutArrivals(store)

    def end_once(error: RanksLost, end: object) -> None:
        errors.append(error)
        arrivals.arrive("unit 0")  # where the process would have ended

    monkeypatch.setattr(lost_ranks, "end_once", end_once)
    monkeypatch.setattr(phase_watch, "_EVERY_S", 0.05)
    monkeypatch.setattr(phase_watch, "_LISTEN_S", 0.5)
    watch = PhaseWatch({"rollout": 0.3}, store, 0, 2, tmp_path)
    store.set("phase/1", "rollout")  # rank 1 stands still
    watch.begin("rollout")
    arrivals.arrive("unit 0")
    arrivals.wait("unit 0", 2)
    watch.close()
    (error,) = errors
    assert "in phase 'rollout' for longer than launcher.phase_timeouts_s allows, 0.3 s" in str(error)
    assert "megatron_tlt/trainer/stream.py:" in str(error) and "standing still: rank 1 in 'rollout'" in str(error)


def test_the_rest_of_a_rollout_is_the_mean_of_those_that_took_longer() -> None:
    history = RolloutHistory()
    assert history.remaining(1.0) is None
    for seconds in (10.0, 20.0, 60.0):
        history.add(seconds)
    assert history.remaining(0.0) == 30.0 and history.remaining(15.0) == 25.0 and history.remaining(60.0) is None
    for _ in range(8):
        history.add(5.0)
    assert history.remaining(1.0) == 4.0, "old rollouts are forgotten"


def test_the_drafter_comes_first_until_it_is_as_good_as_it_was() -> None:
    long = {"remaining_s": 10.0, "first_part_s": 1.0}
    assert Bubble(**long).use == "stream" and Bubble(None, 1.0).use == "stream"
    assert Bubble(0.5, 1.0).use == "nothing" and Bubble(0.5, 1.0, has_drafter=True).use == "drafter"
    young = Bubble(**long, has_drafter=True, drafter_steps=5)
    assert young.use == "drafter", "no drafts were made yet"
    good = {"has_drafter": True, "acceptance": 2.91, "best_acceptance": 3.0}
    assert Bubble(**long, **good).use == "stream"
    assert Bubble(**long, **{**good, "acceptance": 2.9}).use == "drafter", "a drafter that lost its way is trained"
    assert Bubble(**long, **good, drafter_steps=1, least_drafter_steps=2).use == "drafter"
    assert Bubble(**long, **good, drafter_steps=2, least_drafter_steps=2).use == "stream"
    owed = Bubble(**long, drafter_steps=0, least_drafter_steps=2)
    assert owed.use == "stream", "steps that no session can make here are made up after the update"


def test_the_names_that_stream_knows_are_the_classes_own() -> None:
    for name in ALGORITHMS:
        config = AlgorithmConfig.model_validate({"name": name})
        assert build_algorithm(config).per_problem == is_per_problem(config) == (name not in WHOLE_BATCH), name


@given(st.lists(st.floats(-2, 2, width=32), min_size=8, max_size=8), st.integers(1, 3))
def test_a_problems_advantages_do_not_depend_on_others(rewards: list[float], cut: int) -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    for name in set(ALGORITHMS) - WHOLE_BATCH:
        algorithm = build_algorithm(AlgorithmConfig.model_validate({"name": name, "group_size": 2}))
        parts = [slice(0, 2 * cut), slice(2 * cut, 8)]
        apart = [value for part in parts for value in algorithm.assign_credit(rewards[part], lengths[part])]
        assert apart == algorithm.assign_credit(rewards, lengths), name


def test_streamed_scores_join_those_of_the_rest() -> None:
    batch = batch_of([Sample((1, 2, 3, 4), 2), Sample((5, 6, 7), 1), Sample((8, 9), 1), Sample((1, 2, 3), 1)])
    streamed = Streamed()
    old = PolicyScores((0, 1), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    streamed.add([(7, 1), (4, 0)], [0.5, -0.5], old, {1: torch.ones(2, 3)}, [2, 1])
    assert streamed.keys == [(7, 1), (4, 0)] and list(streamed.states) == [(4, 0)]
    rest = PolicyScores((0, 1), torch.tensor([0.4, 0.5, 0.6, 0.7]), torch.tensor([3.0, 4.0], dtype=torch.float64))
    found = streamed.merged(rest, batch, [0, 3], {1: (7, 1), 2: (4, 0)})
    assert found is not None and found.samples == (0, 1, 2, 3)
    assert found.log_probs_G.tolist() == pytest.approx([0.4, 0.5, 0.1, 0.2, 0.3, 0.6, 0.7])
    assert found.entropy_sums_H.tolist() == [3, 1, 2, 4]
    assert streamed.merged(None, batch, [0, 3], {}) is None
    streamed.check("mine", {(7, 1): 0.5, (4, 0): -0.5, (0, 0): 1.0})
    with pytest.raises(RunError, match=r"mine is per_problem, but gave response 0 to problem 4 the advantage -0\.5"):
        streamed.check("mine", {(7, 1): 0.5, (4, 0): -0.25})
