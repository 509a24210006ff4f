"""The estimate of a rollout's time without speculation, and the probing of steps without drafts."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_tlt.speculation.gain import GainMeter, RolloutGain, running_batches, slowest
from megatron_tlt.speculation.plain_times import SETTLING, PlainStepProbe, StepSeconds, cell_of
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy

EAGLE = Strategy("eagle", 3)
PROMPT_S, BETWEEN_S, CHOOSING_S, DRAFTING_S = 0.005, 0.002, 0.001, 0.02


def plain_s(batch: int) -> float:
    return 0.01 + 0.0005 * batch


def drafted_s(batch: int) -> float:
    return 0.016 + 0.0012 * batch


class Engine:
    """Decodes requests of fixed lengths in virtual time; ``choose`` returns the strategy of each step."""

    def __init__(self, slots: int, seed: int = 0, noise: float = 0.0, gain: int = 2) -> None:
        self.slots, self.noise, self.gain = slots, noise, gain
        self.random = random.Random(seed)
        self.disturbed: Strategy | None = None
        self.disturbed_share = 0.0
        self.unsettled = [0.0] * SETTLING

    def rollout(
        self,
        lengths: list[int],
        choose: Callable[[int], Strategy],
        meter: GainMeter,
        measured: Callable[[int], None] = lambda batch: None,
    ) -> float:
        """Seconds from the first step to the end of the last; ``measured`` receives the batches of plain steps."""
        meter.begin_rollout()
        waiting, running = list(lengths), list[int]()
        now, first, verified, plain_in_a_row = 0.0, None, OFF, SETTLING
        while waiting or running:
            new = waiting[: self.slots - len(running)]
            del waiting[: len(new)]
            running += new
            drafted = choose(len(running))
            choosing = 0.0 if choose is never else CHOOSING_S
            meter.used(choosing)
            now += choosing + BETWEEN_S
            first = now if first is None else first
            batch = len(running)
            seconds = plain_s(batch) if verified == OFF else drafted_s(batch)
            if plain_in_a_row < SETTLING:
                seconds *= 1 + self.unsettled[plain_in_a_row]
            drafting = DRAFTING_S if drafted != OFF else 0.0
            seconds += PROMPT_S * len(new) + (drafting if verified == OFF else 0.0)
            plain_in_a_row = plain_in_a_row + 1 if verified == OFF else 0
            seconds *= self.random.lognormvariate(0.0, self.noise)
            if verified == self.disturbed and not new and self.random.random() < self.disturbed_share:
                seconds *= 20
            gained = [
                min(left, 1 if verified == OFF or i >= batch - len(new) else 1 + self.random.randint(0, self.gain))
                for i, left in enumerate(running)
            ]
            running = [left - tokens for left, tokens in zip(running, gained, strict=True) if left > tokens]
            step = StepRecord(
                verified,
                batch,
                seconds,
                sum(gained),
                next_strategy=drafted,
                had_prefill=bool(new),
                start=now,
                drafting_s=drafting,
            )
            if meter.observe(step):
                measured(batch)
            now, verified = now + seconds, drafted
        assert first is not None
        return now - first


def never(batch: int) -> Strategy:
    return OFF


def always(batch: int) -> Strategy:
    return EAGLE


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 12))
def test_batches_without_speculation_are_those_of_a_queue(lengths: list[int], slots: int) -> None:
    """Against a simulation step by step."""
    expected, waiting, running = [], [length for length in lengths if length], list[int]()
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        expected.append(len(running))
        running = [left - 1 for left in running if left > 1]
    found = running_batches(lengths, slots)
    assert [batch for batch, steps in found for _ in range(steps)] == expected
    assert sum(batch * steps for batch, steps in found) == sum(lengths)


@settings(max_examples=50)
@given(st.lists(st.integers(2, 120), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 99))
def test_without_noise_the_estimate_is_exact(lengths: list[int], slots: int, seed: int) -> None:
    """Steps without drafts were measured in another rollout of these lengths on this engine."""
    meter = GainMeter()
    expected = Engine(slots, seed).rollout(lengths, never, meter)
    assert meter.end_rollout(lengths) == RolloutGain(pytest.approx(expected), pytest.approx(expected), 1.0)
    seconds = Engine(slots, seed).rollout(lengths, always, meter)
    found = meter.end_rollout(lengths)
    assert found.seconds == pytest.approx(seconds) and found.coverage == pytest.approx(1.0)
    # the first step has no time between steps before it
    assert found.plain_seconds == pytest.approx(expected + BETWEEN_S)


def test_steps_slowed_by_earlier_drafts_do_not_count() -> None:
    """As on a small model: the first steps without drafts are slower than in a rollout without any drafts."""
    lengths = list(range(20, 140, 10))
    expected = Engine(12).rollout(lengths, never, GainMeter()) + BETWEEN_S
    meter, engine = GainMeter(), Engine(12)
    engine.unsettled = [0.5, 0.3]
    steps = itertools.count()
    for _ in range(2):
        engine.rollout(lengths, lambda batch: OFF if next(steps) % 8 < 5 else EAGLE, meter)
        found = meter.end_rollout(lengths)
    assert found.plain_seconds == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("slots", [16, 64])
def test_with_noise_and_few_measured_steps_it_is_within_a_tenth(slots: int) -> None:
    """As in a run: long-tailed lengths, one of a hundred engine steps without drafts, no rollout without."""
    draw = random.Random(5)
    rollouts = [[min(300, int(12 * draw.paretovariate(1.0))) for _ in range(64)] for _ in range(30)]
    meter, probe = GainMeter(), PlainStepProbe()
    engine, other = Engine(slots, 1, noise=0.1), Engine(slots, 2, noise=0.1)
    ratios = []
    for lengths in rollouts:
        probe.begin_rollout()
        seconds = engine.rollout(lengths, lambda batch: OFF if probe.next(batch) else EAGLE, meter, probe.measured)
        found = meter.end_rollout(lengths)
        without = other.rollout(lengths, never, GainMeter())
        if found.gain is not None:
            ratios.append(found.gain / (without / seconds))
    assert len(ratios) >= 9
    assert abs(statistics.median(ratios) - 1.0) < 0.05 and all(abs(ratio - 1.0) < 0.1 for ratio in ratios[-10:])


@pytest.mark.parametrize("disturbed", [OFF, EAGLE])
def test_disturbances_lengthen_both_estimates(disturbed: Strategy) -> None:
    """A tenth of one strategy's steps take twenty times as long, as on a shared machine."""
    lengths = list(range(20, 140, 10))
    gains, seconds = [], []
    for share in (0.0, 0.1):  # both use the same random numbers
        meter = GainMeter()
        for choose in (never, always):
            Engine(12).rollout(lengths, choose, meter)
        engine = Engine(12, 3)
        engine.disturbed, engine.disturbed_share = disturbed, share
        seconds.append(engine.rollout(lengths, lambda batch: OFF if batch > 6 else EAGLE, meter))
        gains.append(meter.end_rollout(lengths).gain)
    assert seconds[1] > 1.5 * seconds[0]
    assert gains[1] == pytest.approx(gains[0], rel=0.05)


def test_a_rollout_without_drafts_has_gain_one_despite_noise() -> None:
    meter = GainMeter()
    Engine(8, noise=0.5).rollout([30] * 20, never, meter)
    assert meter.end_rollout([30] * 20).gain == 1.0


def test_an_unmeasured_batch_is_unknown() -> None:
    meter = GainMeter()
    Engine(8).rollout([30] * 8, always, meter)
    found = meter.end_rollout([30] * 8)
    assert (found.gain, found.coverage) == (None, 0.0)
    meter.plain.observe(1, plain_s(1))
    Engine(8).rollout([30] * 8, always, meter)
    found = meter.end_rollout([30] * 8)
    assert found.gain is None and found.coverage == 0.0, "a batch of 8 says nothing of one of 1"
    meter.plain.observe(6, plain_s(6))
    Engine(8).rollout([30] * 8, always, meter)
    assert meter.end_rollout([30] * 8).coverage == 1.0
    assert GainMeter().end_rollout([]).gain is None


def test_the_slowest_engine_determines_both_times() -> None:
    engines = [RolloutGain(2.0, 3.0, 1.0), RolloutGain(1.0, 4.0, 0.95)]
    found = slowest(engines)
    assert found == RolloutGain(2.0, 4.0, 0.95) and found.gain == 2.0
    assert slowest([*engines, RolloutGain(1.0, 1.0, 0.2)]).gain is None  # type: ignore[union-attr]
    assert slowest([]) is None


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.001, 10.0)), min_size=1, max_size=60), st.integers(1, 400))
@example([(4, 1.0), (8, 0.5)], 6)
def test_seconds_never_fall_with_the_batch_and_are_positive(steps: list[tuple[int, float]], batch: int) -> None:
    times = StepSeconds()
    for at, seconds in steps:
        times.observe(at, seconds)
    assert 0 < times.seconds(batch) <= times.seconds(batch + 1) + 1e-9
    again = StepSeconds()
    again.load_state(json.loads(json.dumps(times.state())))
    assert again.seconds(batch) == times.seconds(batch) and again.covers(batch) == times.covers(batch)
    assert times.covers(batch) or not any(cell_of(at) == cell_of(batch) for at, _ in steps)


def test_seconds_are_linear_between_measured_batches_and_outliers_are_left_out() -> None:
    times = StepSeconds()
    with pytest.raises(ValueError, match="no step was measured"):
        times.seconds(4)
    for batch in (4, 64):
        for _ in range(9):
            times.observe(batch, plain_s(batch))
        times.observe(batch, 5.0)
    for batch in (1, 4, 20, 64, 128):
        assert times.seconds(batch) == pytest.approx(plain_s(batch))
    assert [batch for batch in (1, 2, 8, 9, 31, 32, 128, 129) if times.covers(batch)] == [2, 8, 32, 128]
    times.observe(16, plain_s(16))
    assert all(times.covers(batch) for batch in range(2, 129))


@given(st.lists(st.integers(1, 64), max_size=3000), st.sampled_from([0.01, 0.05]))
def test_probed_steps_stay_within_the_share(batches: list[int], share: float) -> None:
    probe, taken, run = PlainStepProbe(share), 0, 0
    for number, batch in enumerate(batches, 1):
        plain = probe.next(batch)
        taken += plain
        assert taken <= share * number + 1e-6 or run  # a hold is paid for as it begins
        run = run + 1 if plain else 0
        if run > SETTLING + 1:
            probe.measured(batch)
    assert taken <= share * len(batches) + 1e-6 or run


def test_frequent_batches_are_probed_first_and_rarely_once_known() -> None:
    probe = PlainStepProbe()
    found: dict[int, int] = {}
    in_a_row = 0
    for step in range(200_000):
        batch = 64 if step % 93 < 10 else 8 if step % 93 < 40 else 1
        if step % 93 == 0:
            probe.begin_rollout()
        plain = probe.next(batch)
        if plain and in_a_row > SETTLING and step % 93:
            probe.measured(batch)
            found[batch] = found.get(batch, 0) + 1
        in_a_row = in_a_row + 1 if plain else 0
        if step == 1600:
            assert set(found) == {1, 8}
    assert min(found.values()) >= 24 and found[1] > found[8] > found[64]
    assert sum(found.values()) < 0.003 * 200_000


def test_a_resumed_probe_continues_identically() -> None:
    def play(probe: PlainStepProbe, seed: int) -> list[bool]:
        draw = random.Random(seed)
        taken = [probe.next(draw.randint(1, 32)) for _ in range(2000)]
        probe.measured(4)
        probe.begin_rollout()
        return taken

    probe, again = PlainStepProbe(), PlainStepProbe()
    assert any(play(probe, 1))
    again.load_state(json.loads(json.dumps(probe.state())))
    assert play(again, 2) == play(probe, 2)
