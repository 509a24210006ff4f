"""The tuner benchmark: its traces say what they are taken for, and its measures what they are called."""

from __future__ import annotations

import argparse
from itertools import islice

import numpy as np
import pytest

from megatron_tlt.bench import tuner
from megatron_tlt.bench.tuner_traces import (
    BUDGETS,
    MAX_BATCH,
    SHIFTS,
    STRATEGIES,
    Drafter,
    Played,
    RecordedTimes,
    SyntheticTimes,
    Trace,
    Truth,
    long_tailed_lengths,
    recorded_files,
)
from megatron_tlt.speculation.strategy import OFF, BudgetMix, Strategy


def played(lost: list[float]) -> Played:
    return Played(np.ones(len(lost)), np.array(lost), ["off"] * len(lost))


def test_regret_and_recovery_are_what_they_say() -> None:
    run = played([0.0] * 100 + [0.5] * 50 + [0.0] * 250)
    assert run.regret(100, 150) == 0.5 and run.regret() == pytest.approx(25 / 400)
    assert tuner.recovery_steps(run, 100, window=20, limit=0.05) == 50 + 18
    assert tuner.recovery_steps(run, 100, window=20, limit=0.0) == 50 + 20
    assert tuner.recovery_steps(played([0.2] * 60), 30, window=20, limit=0.1) is None


@pytest.mark.parametrize("budgets", BUDGETS)
def test_truth_is_what_is_drawn(budgets: str) -> None:
    rng = np.random.default_rng(0)
    trace = Trace(SyntheticTimes(), SHIFTS[2], 10, budgets=budgets)
    truth, own = Truth(trace), rng.normal(size=16)
    _, shares = trace.draw(rng, 16)
    truth.look(SHIFTS[2].before, own, shares)
    for strategy in trace.strategies[1:]:
        drafter, expected = SHIFTS[2].before[strategy.drafter], truth.of(strategy)
        drawn = [drafter.draw(rng, own, strategy.num_tokens, expected.budgets)[1].sum(axis=1) for _ in range(3000)]
        may = expected.budgets > 0
        assert may.any() and expected.budgets.max() <= strategy.num_tokens
        assert 1 + np.mean([gained[may].mean() for gained in drawn]) == pytest.approx(expected.length, rel=0.05)
        assert not any(gained[~may].any() for gained in drawn)
    assert truth.of(OFF).length == 1
    assert truth.best_rate == max(truth.rate(strategy, 16) for strategy in trace.strategies)


def test_budgets_are_what_they_are_called() -> None:
    lengths, shares = Trace(SyntheticTimes(), SHIFTS[0], 10, 200, "by class").draw(np.random.default_rng(0))
    trace, seven = Trace(SyntheticTimes(), SHIFTS[0], 10, 200, "by class"), Strategy("eagle", 7, by_length=True)
    given = trace.request_budgets(seven, shares)
    assert set(given[lengths > np.quantile(lengths, 0.8)]) == {7}
    assert set(given[lengths <= np.median(lengths)]) == {0} and set(given) == {0, 4, 7}
    one = Trace(SyntheticTimes(), SHIFTS[0], 10, 200, "one each")
    assert set(one.request_budgets(seven, one.draw(np.random.default_rng(0))[1])) == {1}
    mixed = Trace(SyntheticTimes(), SHIFTS[0], 10, 200, "mixed")
    assert set(mixed.request_budgets(seven, mixed.draw(np.random.default_rng(0))[1])) == set(range(1, 8))


def test_fewer_drafts_take_less_time_and_all_of_them_the_same() -> None:
    for times in (SyntheticTimes(), *map(RecordedTimes, recorded_files())):
        arm = Strategy("eagle", 7, by_length=True)
        full, some, none = (BudgetMix.of([n] * 32) for n in (7, 2, 0))
        plain = times.mean(Strategy("eagle", 7), 32)
        assert times.mean(arm, 32, full) == pytest.approx(plain)
        assert times.mean(arm, 32, none) < times.mean(arm, 32, some) < plain


def test_a_recording_says_nothing_beyond_its_largest_batch() -> None:
    times = {name: RecordedTimes(name) for name in recorded_files()}
    assert times["cpu-1m-256.json"].max_batch == 256
    with pytest.raises(ValueError, match="recorded are up to 32"):
        times["cpu-1m.json"].mean(OFF, 33)


def test_lengths_have_a_long_tail() -> None:
    lengths = np.concatenate([long_tailed_lengths(np.random.default_rng(seed)) for seed in range(50)])
    assert len(lengths) == 50 * MAX_BATCH and lengths.max() == 768
    assert 60 < np.median(lengths) < 100 and lengths.mean() > 1.4 * np.median(lengths)


@pytest.mark.parametrize("times", [SyntheticTimes(), *map(RecordedTimes, recorded_files())], ids=lambda t: t.name)
def test_step_times_have_every_strategy_and_noise_around_one(times: tuner.Times) -> None:
    for strategy in STRATEGIES:
        row = [times.mean(strategy, batch) for batch in range(1, MAX_BATCH + 1)]
        assert min(row) > 0 and row[-1] > row[0]
    assert times.mean(Strategy("eagle", 7), 32) > 1.5 * times.mean(OFF, 32), "verification costs at large batches"
    noise = list(islice(times.noise(np.random.default_rng(0)), 4000))
    assert 0.7 < np.median(noise) < 1.3 and np.std(np.log(noise)) > 0.05


def test_recordings_are_shipped() -> None:
    assert recorded_files()


def test_an_oracle_loses_next_to_nothing_and_a_wrong_static_choice_much() -> None:
    drafters = {"ngram": Drafter(0.8, match=0.3), "eagle": Drafter(0.8)}
    trace = Trace(SyntheticTimes(), tuner.Shift("none", drafters, drafters), 400)
    oracle = tuner.run_tuner(trace, tuner.TUNERS["oracle"], 0).regret()
    off = tuner.run_tuner(trace, tuner.TUNERS["static off"], 0).regret()
    assert 0 <= oracle < 0.02 < 0.4 < off
    assert oracle < tuner.run_tuner(trace, tuner.TUNERS[tuner.DEFAULT], 0).regret() < off


def test_the_same_seed_plays_the_same() -> None:
    trace = Trace(SyntheticTimes(), SHIFTS[0], 300)
    first, second, other = (tuner.run_tuner(trace, tuner.TUNERS[tuner.DEFAULT], seed) for seed in (1, 1, 2))
    assert first.chosen == second.chosen and (first.lost == second.lost).all()
    assert first.chosen != other.chosen


def test_it_runs() -> None:
    parser = argparse.ArgumentParser()
    tuner.add_arguments(parser)
    arguments = parser.parse_args(
        ["--steps", "120", "--seeds", "1", "--times", "synthetic", "--batches", "4", "64", "--budgets", "all", "mixed"]
    )
    result = tuner.run(arguments)
    played_only_once = len(tuner.FIRST_CASE_ONLY)
    assert len(result.rows) == 4 * len(SHIFTS) * (len(tuner.TUNERS) + 1 - played_only_once) + (
        len(SHIFTS) * played_only_once + 2 * 2 * 2
    )
    assert {row["tuner"] for row in result.rows} == {*tuner.TUNERS, "static, best in hindsight"}
    for row in result.rows:
        assert row["regret_settled"]["low"] <= row["regret_settled"]["median"] <= row["regret_settled"]["high"]
    # of each batch size and budgets
    assert len(result.targets) == 6 * 2 * 2
    assert {"batch 256, budgets mixed", "batch 32, budgets all"} <= {
        name.split(", ", 1)[1] for name in result.targets if name.startswith("solver_regret")
    }


def test_unknown_step_times_are_refused() -> None:
    with pytest.raises(tuner.ConfigError, match=r"--times abacus: allowed are .*synthetic"):
        tuner.run(argparse.Namespace(times=["abacus"], steps=10, seeds=1, batches=[1]))
