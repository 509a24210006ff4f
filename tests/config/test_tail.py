"""What tail batching, schedules, streaming and adaptive limits go together with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.algorithms.algorithm import Algorithm
from megatron_tlt.config.algorithm_checks import algorithm_violations
from megatron_tlt.config.rounding import times_at_least
from megatron_tlt.config.schedule import ScheduleConfig, schedule_violations
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.stream import stream_violations
from megatron_tlt.config.tail import TailConfig, longest_wait, tail_violations
from megatron_tlt.rollout.engines import engine_problems
from megatron_tlt.tasks.rounds import AheadScheduler, TailScheduler, TailState

BASE: dict[str, Any] = {"model": {"path": "m"}, "tasks": [{"name": "gcd"}], "launcher": {"nproc_per_node": 2}}
DISTILLED = {"name": "distillation", "kl": {"reference": "teacher"}, "correction": {"weights": "token"}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"tail": {}}, []),
        ({"tail": None, "observe": {"recording": True}}, []),
        ({"tail": {"eta_prompts": 1}}, ["tail: found eta_prompts and eta_responses of 1"]),
        (
            {"tail": {}, "algorithm": {"dynamic_sampling": {"enabled": True}}},
            ["algorithm.dynamic_sampling.enabled: found true"],
        ),
        ({"tail": {}, "trainer": {"curriculum": {}}}, ["trainer.curriculum: found a section"]),
        ({"tail": {}, "observe": {"recording": True}}, ["observe.recording: found true"]),
        (
            {"tail": {}, "tasks": [{"name": "products", "environment": {"name": "calculator"}}]},
            ["tasks.environment: products has one"],
        ),
        ({"tail": {}, "run": {"deterministic": True}}, ["run.deterministic: found true; 2 engines"]),
        (
            {"tail": {"deferred": "continue"}},
            ["tail.deferred: found continue; its responses have tokens of earlier policies"],
        ),
        ({"tail": {"deferred": "continue"}, "algorithm": {"correction": {"bypass": True}}}, []),
        (
            {
                "tail": {"deferred": "continue", "eta_prompts": 1, "eta_responses": 1.25},
                "algorithm": {"correction": {"bypass": True}},
            },
            ["tail.deferred: found continue; with eta_prompts 1 a short round asks for no more problems"],
        ),
        (
            {
                "tail": {"deferred": "continue", "eta_prompts": 1.25, "max_staleness": 2},
                "algorithm": {"correction": {"bypass": True}},
            },
            ["tail.max_staleness: found 2; with eta_prompts 1.25 a problem waits up to 4 steps"],
        ),
        (
            {
                "tail": {"deferred": "continue"},
                "algorithm": {"correction": {"weights": "token"}},
                "rollout": {"router_replay": "ids"},
            },
            ["tail.deferred: found continue; rollout.router_replay: found ids"],
        ),
        (
            {"tail": {"deferred": "continue"}, "algorithm": DISTILLED},
            ["tail.deferred: found continue; algorithm.name: found distillation, whose loss is a KL term alone"],
        ),
        (
            {"tail": {"race": "time"}, "run": {"deterministic": True}, "rollout": {"tensor_parallel_size": 2}},
            ["tail.race: found time; what is kept", "tail.race: found time; the 2 ranks of an engine"],
        ),
        ({"tail": {"max_staleness": 3}}, ["tail.max_staleness: found 3; deferred: resample has tokens of one policy"]),
        ({"tail": {}, "run": {"deterministic": True}, "rollout": {"tensor_parallel_size": 2}}, []),
    ],
)
def test_what_contradicts_tail_batching_is_named(sections: dict[str, Any], said: list[str]) -> None:
    found = list(tail_violations(TltConfig.model_validate({**BASE, **sections})))
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, []),
        ({"tail": {}}, ["schedule: found a section beside tail"]),
        ({"schedule": {"kind": "one_step_off"}}, []),
        (
            {"schedule": {"kind": "one_step_off", "eta_prompts": 2}},
            ["schedule.eta_prompts: found 2; kind: one_step_off always begins one step"],
        ),
        ({"schedule": {"kind": "one_step_off", "max_staleness": 1}}, []),
        (
            {"schedule": {"kind": "one_step_off", "max_staleness": 3}},
            ["schedule.max_staleness: found 3; kind: one_step_off trains on tokens of one step before"],
        ),
        ({"schedule": "sync", "algorithm": {}}, []),
        ({"algorithm": {}}, ["schedule.kind: found partial; its responses have tokens of earlier policies"]),
        ({"algorithm": DISTILLED}, ["schedule.kind: found partial; algorithm.name: found distillation"]),
        (
            {"algorithm": {"kl": {"coefficient": 0.1}, "correction": {"bypass": True}}},
            ["schedule.kind: found partial; algorithm.kl.coefficient: found 0.1 in the loss"],
        ),
        ({"algorithm": {"kl": {"coefficient": 0.1, "placement": "reward"}, "correction": {"weights": "token"}}}, []),
        ({"trainer": {"curriculum": {}}}, ["trainer.curriculum: found a section"]),
        ({"rollout": {"router_replay": "ids"}}, ["schedule.kind: found partial; rollout.router_replay: found ids"]),
        ({"run": {"deterministic": True}}, ["run.deterministic: found true; 2 engines"]),
    ],
)
def test_what_contradicts_a_schedule_is_named(sections: dict[str, Any], said: list[str]) -> None:
    correction = {"algorithm": {"correction": {"weights": "token"}}, "schedule": {"kind": "partial"}}
    config = TltConfig.model_validate({**BASE, **correction, **sections})
    found = list(schedule_violations(config))
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))


EXPERTS = {"expert_model_parallel_size": 2, "moe_aux_loss_coeff": 0.01}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, []),
        ({"stream": None, "run": {"deterministic": True}}, []),
        ({"tail": {}}, []),
        ({"algorithm": {"name": "rloo"}}, []),
        ({"launcher": {"nproc_per_node": 1}}, ["stream: found a section; the layout has one replica"]),
        (
            {"actor": {"megatron": {"tensor_model_parallel_size": 2}}},
            ["stream: found a section; the layout has one replica"],
        ),
        ({"run": {"deterministic": True}}, ["run.deterministic: found true; with stream the order"]),
        ({"trainer": {"mini_batches": 2}}, ["trainer.mini_batches: found 2; stream accumulates one gradient"]),
        (
            {"algorithm": {"dynamic_sampling": {"enabled": True}}},
            ["algorithm.dynamic_sampling.enabled: found true; which problems a step trains on"],
        ),
        ({"algorithm": {"kl": {"coefficient": 0.1}}}, ["algorithm.kl.coefficient: found 0.1; stream has no reference"]),
        ({"schedule": {"kind": "partial"}}, ["stream: found a section beside schedule"]),
        ({"rollout": {"router_replay": "ids"}}, ["rollout.router_replay: found ids, which stream does not replay"]),
        (
            {"actor": {"megatron": EXPERTS}},
            [
                "actor.megatron.expert_model_parallel_size: found 2; replicas that share experts",
                "actor.megatron.moe_aux_loss_coeff: found 0.01; its gradient is scaled",
            ],
        ),
        (
            {"actor": {"megatron": {"hidden_dropout": 0.1, "attention_dropout": 0.2}}},
            [
                "actor.megatron.hidden_dropout: found 0.1; a part would draw other masks",
                "actor.megatron.attention_dropout: found 0.2; a part would draw other masks",
            ],
        ),
        ({"actor": {"transformer_impl": "local", "lora": {}}}, []),
        (
            {"actor": {"transformer_impl": "local", "lora": {"dropout": 0.05}}},
            ["actor.lora.dropout: found 0.05; a part would draw other masks"],
        ),
        (
            {"actor": {"ddp": {"overlap_grad_reduce": True}}},
            ["actor.ddp.overlap_grad_reduce: found true; a replica that streams would wait"],
        ),
        (
            {"algorithm": {"name": "reinforce++"}},
            ["algorithm.name: found reinforce++, whose advantages depend on the whole batch"],
        ),
        (
            {"algorithm": {"name": "tests.config.test_tail.Unsaid"}},
            ["algorithm.name: found tests.config.test_tail.Unsaid, whose advantages"],
        ),
        ({"algorithm": {"name": "tests.config.test_tail.Missing"}}, []),
    ],
)
def test_what_contradicts_streaming_is_named(sections: dict[str, Any], said: list[str]) -> None:
    found = list(stream_violations(TltConfig.model_validate({**BASE, "stream": {}, **sections})))
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))


class Unsaid(Algorithm):
    """A user's algorithm that does not say that it is per problem."""

    def advantages(self, rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        return rewards


def test_an_engine_that_cannot_end_requests_is_refused() -> None:
    rollout = {"engine": "replay", "engine_arguments": {"path": "r"}}
    sections = {"speculation": {"enabled": False}, "reshard": {"method": "none"}, "tail": {}}
    found = engine_problems(TltConfig.model_validate({**BASE, "rollout": rollout, **sections}))
    assert found == ["tail: found a section; engine replay cannot end requests early; allowed: null"]


def test_limits_by_measured_times_are_not_for_deterministic_runs() -> None:
    sections = {"rewards": {"adaptive_timeout": True}, "run": {"deterministic": True}}
    assert list(algorithm_violations(TltConfig.model_validate({**BASE, **sections}))) == [
        "rewards.adaptive_timeout: found true; verdicts then depend on measured times; allowed with "
        "run.deterministic: false"
    ]


def test_a_teacher_that_nothing_learns_from_is_refused() -> None:
    kl = {"reference": "teacher", "placement": "reward"}
    config = TltConfig.model_validate({**BASE, "algorithm": {"name": "distillation", "kl": kl}})
    (found,) = algorithm_violations(config)
    assert found.startswith("algorithm.kl.placement: found reward; distillation takes no credit from rewards")


def test_a_limit_that_cannot_adapt_is_refused() -> None:
    rewards: dict[str, Any] = {"adaptive_timeout": True, "timeout_s": 2}
    assert list(algorithm_violations(TltConfig.model_validate({**BASE, "rewards": rewards}))) == [
        "rewards.timeout_s: found 2; adaptive_timeout shortens it to 2 s at least, so nothing would change; allowed: "
        "above 2"
    ]
    assert not list(algorithm_violations(TltConfig.model_validate({**BASE, "rewards": {**rewards, "timeout_s": 3}})))


def test_a_schedule_that_waits_for_all_is_none() -> None:
    for given_one in ("sync", {"kind": "sync"}, {"kind": "sync", "eta_prompts": None}, None):
        config = TltConfig.model_validate({**BASE, "schedule": given_one})
        assert config == TltConfig.model_validate(BASE) and config.schedule is None
    with pytest.raises(ValueError, match="found kind: sync with eta_prompts, max_staleness, which it does not read"):
        TltConfig.model_validate({**BASE, "schedule": {"kind": "sync", "eta_prompts": 2, "max_staleness": 3}})


def test_the_bound_of_a_schedule_is_its_kinds() -> None:
    assert ScheduleConfig(kind="partial").max_staleness == 4
    one = ScheduleConfig(kind="one_step_off")
    assert one.max_staleness == 1 == ScheduleConfig.model_validate(one.model_dump()).max_staleness
    assert ScheduleConfig.model_validate({"kind": "one_step_off", "max_staleness": None}).max_staleness == 1


@given(st.integers(100, 400), st.integers(0, 10_000))
def test_a_factor_with_two_decimals_gives_the_number_that_it_says(hundredths: int, count: int) -> None:
    assert times_at_least(hundredths / 100, count) == -(-hundredths * count // 100)


def test_a_round_asks_for_no_problem_more_than_its_factor_says() -> None:
    assert math.ceil(1.1 * 100) == 111, "of floats"
    settings = TailConfig(eta_prompts=1.1, eta_responses=1.1)
    assert TailScheduler(settings, 100, 100).round(TailState()).size == (110, 110)
    ahead = AheadScheduler(ScheduleConfig(kind="partial", eta_prompts=1.1), 100, 1)
    assert ahead.round(TailState()).size == (110, 1)


@given(st.integers(1, 40), st.integers(1, 80))
def test_the_longest_wait_is_that_of_the_scheduler(prompts: int, left: int) -> None:
    scheduler = TailScheduler(
        TailConfig.model_construct(eta_prompts=1 + left / prompts, eta_responses=1.0, race="tokens"), prompts, 1
    )
    state, begun, longest = TailState(), dict[int, int](), 0
    for step in range(200):
        asked = scheduler.round(state)
        if asked.is_long:
            longest = max(longest, *(step - begun[problem] for problem in asked.problems))
            state = scheduler.after(state, asked, range(prompts))
        else:
            begun |= dict.fromkeys(asked.problems, step)
            state = scheduler.after(state, asked, range(len(asked.problems) - left))
    assert longest <= longest_wait(prompts, left)
    if prompts <= 10:
        assert longest == longest_wait(prompts, left)
