"""The rollout's events: nothing is lost, nothing takes longer than it may, and decisions are the product's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.planning.devices import device
from megatron_tlt.planning.simulation.acceptance import OFF, Alignment, chain, tokens_per_round
from megatron_tlt.planning.simulation.constants import shipped
from megatron_tlt.planning.simulation.engine import EngineModel
from megatron_tlt.planning.simulation.phases import drafter_step_flops
from megatron_tlt.planning.simulation.rollout import Limits, Speculation, simulate_rollout
from tests.planning.jobs import MOE
from tests.planning.simulated import ARMS, MODEL, FreeDrafts, engine, random_lengths, scenario, step_by_step


def speculation(acceptance: float, threshold: int = 8, patience: int = 3, hysteresis: int = 2) -> Speculation:
    tokens = tuple(tokens_per_round(arm, acceptance, 0.4) for arm in ARMS)
    return Speculation(ARMS, tokens, threshold, patience, hysteresis)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    engines=st.integers(1, 6),
    requests=st.integers(1, 24),
    max_seqs=st.integers(1, 30),
    room=st.floats(1.02, 8.0),
    acceptance=st.floats(0.05, 0.98),
    threshold=st.integers(1, 30),
)
def test_every_token_is_decoded_once_and_no_second_is_lost(
    seed: int, engines: int, requests: int, max_seqs: int, room: float, acceptance: float, threshold: int
) -> None:
    lengths = random_lengths(seed, engines, requests)
    kv_tokens = room * (lengths.max() + 50.0) / 0.99
    found = simulate_rollout(
        engine(), lengths, 50.0, Limits(max_seqs, kv_tokens), speculation(acceptance, threshold), watched=(0,)
    )
    assert np.allclose(found.decoded_E, lengths.sum(axis=1), rtol=1e-9, atol=1e-3)
    assert (np.isnan(found.finished_ER) == (lengths == 0)).all()
    ends = np.where(np.isnan(found.finished_ER), 0.0, found.finished_ER).max(axis=1)
    assert np.allclose(ends, found.ends_E)
    # busy and idle are each engine's whole time: what was spent, by strategy, is what engines were busy
    assert np.isclose(sum(found.seconds.values()), found.ends_E.sum(), rtol=1e-9)
    assert all(count <= max_seqs for _, count in found.running[0])
    times = [time for time, _ in found.running[0]]
    assert times == sorted(times)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("acceptance", [0.4, 0.9])
def test_gate_and_choice_are_the_products_step_by_step(seed: int, acceptance: float) -> None:
    """Against an engine that asks ``ElasticGate`` and ``OracleTuner`` before every step."""
    lengths = random_lengths(seed, 1, 30, longest=900)
    lengths = lengths[:, lengths[0] > 0]
    limits = Limits(20, 1e9)
    rule = speculation(acceptance, threshold=10, patience=4, hysteresis=3)
    found = simulate_rollout(engine(), lengths, 64.0, limits, rule)
    wanted = step_by_step(engine(), lengths[0].tolist(), 64.0, limits, rule)
    # a request that ends within a step holds its place to the step's end there
    assert found.seconds_in_all == pytest.approx(wanted, rel=0.03)
    plain = simulate_rollout(engine(), lengths, 64.0, limits, Speculation())
    exact = step_by_step(engine(), lengths[0].tolist(), 64.0, limits, Speculation((OFF,), (1.0,), 1, 1, 0))
    # without speculation steps are whole tokens in both, and only the context's rounding within a step differs
    assert plain.seconds_in_all == pytest.approx(exact, rel=1e-3)
    assert found.seconds_in_all < plain.seconds_in_all


def test_the_gate_opens_after_patience_steps_and_closes_above_hysteresis() -> None:
    """Five requests of which one is longer: plain steps until four are left, and two of them more."""
    lengths = np.array([[10.0, 500.0, 500.0, 500.0, 500.0]])
    rule = Speculation((chain(1),), (1.5,), threshold=4, patience=3, hysteresis=0)
    found = simulate_rollout(engine(), lengths, 0.0, Limits(8, 1e9), rule)
    # 10 steps of five, 2 of four, and the other 488 tokens in rounds of 1.5
    assert found.rounds_E[0] == pytest.approx(10 + 2 + 488 / 1.5)
    held = Speculation((chain(1),), (1.5,), threshold=2, patience=1, hysteresis=2)
    # opens with the first request that runs by itself, and stays open with up to four
    queue = np.array([[100.0, 300.0, 300.0, 300.0, 300.0]])
    found = simulate_rollout(engine(), queue, 0.0, Limits(4, 1e9), held)
    assert found.rounds_E[0] > 300


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    low=st.floats(0.0, 1.0),
    high=st.floats(0.0, 1.0),
    max_seqs=st.integers(1, 30),
    room=st.floats(1.1, 6.0),
)
def test_more_acceptance_is_never_slower_where_drafts_are_free(
    seed: int, low: float, high: float, max_seqs: int, room: float
) -> None:
    low, high = sorted((low, high))
    free = FreeDrafts(MODEL, device("H100-80GB"), 2, shipped())
    lengths = random_lengths(seed, 3, 16)
    limits = Limits(max_seqs, room * (lengths.max() + 50.0) / 0.99)
    slow, fast = (simulate_rollout(free, lengths, 50.0, limits, speculation(p)) for p in (low, high))
    assert (fast.ends_E <= slow.ends_E * (1 + 1e-9)).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), max_seqs=st.integers(1, 30), room=st.floats(1.1, 4.0))
def test_an_engine_knows_nothing_of_the_others(seed: int, max_seqs: int, room: float) -> None:
    lengths = random_lengths(seed, 5, 12)
    limits = Limits(max_seqs, room * (lengths.max() + 50.0) / 0.99)
    together = simulate_rollout(engine(), lengths, 50.0, limits, speculation(0.7))
    again = simulate_rollout(engine(), lengths, 50.0, limits, speculation(0.7))
    assert (together.ends_E == again.ends_E).all()
    alone = [simulate_rollout(engine(), row[None], 50.0, limits, speculation(0.7)).ends_E[0] for row in lengths]
    assert np.allclose(together.ends_E, alone, rtol=1e-9)


def test_a_small_cache_costs_time_and_preempts() -> None:
    lengths = np.full((1, 8), 1000.0)
    roomy = simulate_rollout(engine(), lengths, 100.0, Limits(8, 1e6), Speculation())
    tight = simulate_rollout(engine(), lengths, 100.0, Limits(8, 3000.0), Speculation())
    assert roomy.preemptions == 0 < tight.preemptions
    assert tight.seconds_in_all > 2 * roomy.seconds_in_all
    with pytest.raises(ValueError, match="1100 tokens does not fit"):
        simulate_rollout(engine(), lengths, 100.0, Limits(8, 1000.0), Speculation())


def test_an_engine_without_requests_has_nothing_to_do() -> None:
    found = simulate_rollout(engine(), np.array([[0.0, 0.0], [5.0, 0.0]]), 10.0, Limits(4, 1e6), Speculation())
    assert found.ends_E[0] == 0.0 < found.ends_E[1]


def test_steps_cost_what_the_data_sheet_says() -> None:
    """One token of a 7B model on one device: its weights once, at four fifths of 3.35 TB/s, and the fixed overhead."""
    constants = shipped()
    one = EngineModel(MODEL, device("H100-80GB"), 1, constants)
    weights = 2 * (28 * MODEL.layer + 152064 * 3584)
    assert MODEL.parameters == pytest.approx(7.6e9, rel=0.01)
    moved = weights / (3350e9 * constants.memory_efficiency)
    computed = 2 * MODEL.multiplied / (989e12 * constants.compute_efficiency)
    assert float(one.plain(1, 0)) == pytest.approx(moved + computed + constants.step_overhead_s, rel=1e-9)
    # 57 KB of cache for each token of context
    assert 2 * MODEL.cached == 57344
    assert float(one.plain(1, 1e6) - one.plain(1, 0)) > 57344e6 / 3350e9
    # two devices halve what is moved, and pay for all-reduces
    assert 0.5 < float(engine(2).plain(1, 0) / one.plain(1, 0)) < 0.8
    assert float(engine().round(4, 1000, OFF)) == float(engine().plain(4, 1000))
    assert one.kv_tokens(0.5) == pytest.approx((40e9 - 2 * MODEL.parameters) / 57344)


def test_an_eagle3_head_of_a_few_tokens_drafts_faster_than_one_of_all_or_an_eagle_head() -> None:
    eagle, whole, few = scenario(), scenario(num_aux_layers=3), scenario(num_aux_layers=3, drafted=4096)
    seconds = [float(one.engine().round(4, 4000, chain(4))) for one in (eagle, whole, few)]
    assert seconds[1] > seconds[0] > seconds[2] > float(few.engine().plain(4, 4000))
    flops = [drafter_step_flops(one, 1000.0) for one in (whole, few)]
    assert flops[0] / flops[1] == MODEL.draft_head(3) / MODEL.draft_head(3, 4096)


def test_experts_are_read_as_far_as_tokens_reach_them() -> None:
    assert MOE.parameters == pytest.approx(30.5e9, rel=0.02)
    assert MOE.multiplied == pytest.approx(3.3e9, rel=0.15)
    few, many = (MOE.touched(tokens) for tokens in (1.0, 1e6))
    norms = MOE.layers * (2 * MOE.hidden + 2 * MOE.head_dim)
    assert few == pytest.approx(MOE.multiplied + norms) and many == pytest.approx(MOE.parameters, rel=0.02)


def test_training_aligns_the_drafter_and_updates_undo_it() -> None:
    alignment = Alignment(shipped())
    cold = alignment.tokens(chain(4))
    alignment.trained(1e6)
    aligned = alignment.tokens(chain(4))
    assert aligned > cold and alignment.level == pytest.approx(1.0)
    alignment.updated()
    assert cold < alignment.tokens(chain(4)) < aligned
    assert alignment.tokens(OFF) == 1.0
    # a drafter without a model has nothing to align
    assert alignment.tokens(chain(4, "ngram")) == Alignment(shipped()).tokens(chain(4, "ngram"))
