"""Engine steps in the timeline, and what the report reads of them."""

from __future__ import annotations

from megatron_tlt.observe.report_data import last_rollout
from megatron_tlt.observe.timeline import Timeline, merge
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy
from megatron_tlt.trainer.engine_track import EngineTrack
from tests.helpers.traces import trace_problems

EAGLE = Strategy("eagle", 3)


def step(at: int, running: int, strategy: Strategy, tokens: int) -> StepRecord:
    drafted = running * strategy.num_tokens
    return StepRecord(strategy, running, 0.01, tokens, drafted, (tokens - running,), start=0.01 * at)


def test_steps_of_one_strategy_and_batch_are_one_stretch() -> None:
    timeline = Timeline(0)
    timeline.begin_step(3)
    track = EngineTrack(timeline)
    track.begin_rollout()
    steps = [step(0, 4, OFF, 4), step(1, 4, OFF, 4), step(2, 2, OFF, 2), step(3, 2, EAGLE, 5), step(4, 2, EAGLE, 7)]
    for record in steps:
        track.add(record)
    track.flush()
    trace = merge([timeline.to_events()])
    assert trace_problems(trace) == []
    found = last_rollout(trace)
    assert [(s.strategy, s.batch, round(s.duration, 6)) for s in found] == [
        ("off", 4, 0.02),
        ("off", 2, 0.01),
        ("eagle-3", 2, 0.02),
    ]
    assert [s.tokens_per_request for s in found] == [1.0, 1.0, 3.0]
    assert {s.ms_per_step for s in found} == {10.0}
    spans = [e["args"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert (spans[-1]["drafted"], spans[-1]["accepted"], spans[-1]["steps"]) == (12, 8, 2)


def test_only_the_last_of_a_steps_rollouts_is_read() -> None:
    timeline = Timeline(0)
    track = EngineTrack(timeline)
    for strategy in (OFF, EAGLE):
        track.begin_rollout()
        track.add(step(0, 1, strategy, 2))
        track.flush()
    assert [stretch.strategy for stretch in last_rollout(merge([timeline.to_events()]))] == ["eagle-3"]


def test_no_stretch_is_endless() -> None:
    timeline = Timeline(0)
    track = EngineTrack(timeline)
    for at in range(200):
        track.add(step(at, 1, EAGLE, 2))
    track.flush()
    assert [e["args"]["steps"] for e in timeline.to_events() if e["kind"] == "span"] == [64, 64, 64, 8]


def test_a_trace_without_engine_steps_has_no_rollout() -> None:
    assert last_rollout(merge([[]])) == []
