"""Speeds of unequal devices: which lists fit a layout, and how equal items are divided by them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.config.identity import identifies_run
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.loader import dump_resolved, load_config, load_resolved
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.speeds import (
    engines_of,
    fitting_speeds,
    of_devices,
    replicas_of,
    shares_of,
    slowest_of,
    speeds_of_part,
    speeds_violations,
)
from megatron_tlt.models.recipe import recipe_description
from tests.helpers.launch import REPOSITORY

BASE: dict[str, Any] = {"model": {"path": "m"}, "tasks": [{"name": "gcd"}], "launcher": {"nproc_per_node": 2}}
TWO_NODES = {"launcher": {"nnodes": 2, "nproc_per_node": 2}}
QUICKSTART = REPOSITORY / "launch" / "quickstart-cpu.yaml"


def config_of(**sections: Any) -> TltConfig:
    return TltConfig.model_validate({**BASE, **sections})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"speeds": None}, []),
        ({"speeds": [1, 0.5]}, []),
        ({"speeds": [1, 1]}, []),
        ({"speeds": [2.0]}, []),  # a number for the one node
        ({"speeds": {}}, ["speeds: found a section without rollout and actor; allowed: null, or with one of them"]),
        (
            {"speeds": {"rollout": [1, 0.5, 1]}},
            ["speeds.rollout: found 3 numbers; allowed: one for each of the 2 proc"],
        ),
        (
            {"speeds": [1, 0.5, 1], **TWO_NODES},
            [
                f"speeds.{k}: found 3 numbers; allowed: one for each of the 2 nodes, or one"
                for k in ("rollout", "actor")
            ],
        ),
        ({"speeds": [1, 0.5], **TWO_NODES}, []),
        ({"speeds": [1, 1, 1, 0.5], **TWO_NODES}, []),
        (
            {"speeds": [1, 0.5], "rollout": {"tensor_parallel_size": 2}},
            ["speeds.rollout: found [1, 0.5]; there is one of the engines, with a device of speed 0.5, so none gets"],
        ),
        # Megatron-Core's stages are outermost: each replica has one on each node
        (
            {"speeds": [1, 0.5], **TWO_NODES, "actor": {"megatron": {"pipeline_model_parallel_size": 2}}},
            ["speeds.actor: found [1, 0.5]; each of the 2 data-parallel replicas has a device of speed 0.5"],
        ),
        (
            {
                "speeds": {"rollout": [1, 0.5]},
                **TWO_NODES,
                "actor": {"megatron": {"pipeline_model_parallel_size": 2}},
            },
            [],
        ),
        ({"speeds": [1, 0.5], **TWO_NODES, "actor": {"megatron": {"tensor_model_parallel_size": 2}}}, []),
        (
            {"speeds": [1, 0.1], "trainer": {"prompts_per_step": 8}},
            ["speeds.rollout: found [1, 0.1]; engine 1, of speed 0.1, gets none of the 8 problems of a step"],
        ),
        ({"speeds": [1, 0.1], "trainer": {"prompts_per_step": 11}}, []),
        # a layout that does not divide is another rule's
        ({"speeds": [1, 0.5], "rollout": {"tensor_parallel_size": 3}}, []),
    ],
)
def test_lists_that_divide_nothing_are_named(sections: dict[str, Any], said: list[str]) -> None:
    found = list(speeds_violations(config_of(**sections)))
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))


@pytest.mark.parametrize(
    ("given_speeds", "message"),
    [
        ("[1, 0]", "speeds.rollout.1: found 0; allowed: above 0"),
        ("[1, .inf]", "speeds.rollout.1: found inf"),
        ("{engines: [1, 2]}", "speeds.engines: unknown key; allowed: actor, rollout"),
        ("3", "speeds: found 3; allowed: a mapping of keys"),
        ("[1, 0.5, 2]", "speeds.actor: found 3 numbers"),
    ],
)
def test_what_is_no_speed_is_refused_as_the_config_is_read(given_speeds: str, message: str) -> None:
    with pytest.raises(Exception, match=message.replace("[", r"\[")):
        load_config(QUICKSTART, [f"speeds={given_speeds}", "launcher.nproc_per_node=2"], check_libraries=False)


def test_a_resolved_config_is_read_again_and_its_model_and_run_stay_the_same(tmp_path: Path) -> None:
    two = ["launcher.nproc_per_node=2"]
    even = load_config(QUICKSTART, two, check_libraries=False)
    config = load_config(QUICKSTART, [*two, "speeds=[1, 0.5]"], check_libraries=False)
    assert even.speeds is None and recipe_description(config) == recipe_description(even)
    assert config.run.name == even.run.name and not identifies_run("speeds.actor")
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
    assert load_resolved(tmp_path / "resolved.yaml") == config
    only = load_config(QUICKSTART, [*two, "speeds.actor=[1, 0.5]"], check_libraries=False)
    assert only.speeds is not None and only.speeds.actor == (1, 0.5) and only.speeds.rollout is None


@given(st.lists(st.floats(0.05, 4), min_size=1, max_size=6), st.integers(0, 60))
def test_no_other_division_ends_earlier_and_each_gets_its_share_rounded_down(speeds: list[float], items: int) -> None:
    shares = shares_of(items, speeds)
    assert sum(shares) == items
    slowest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    # the least time in which all workers together have done so many whole items
    times = sorted(taken / speed for speed in speeds for taken in range(items + 1))
    least = next(t for t in times if sum(math.floor(t * speed + 1e-9) for speed in speeds) >= items)
    assert slowest == pytest.approx(least)
    assert all(share >= math.floor(items * s / sum(speeds) - 1e-9) for share, s in zip(shares, speeds, strict=True))


def test_equal_speeds_take_turns_as_without_any() -> None:
    assert shares_of(7, [0.3, 0.3, 0.3]) == [3, 2, 2]


def test_groups_are_as_slow_as_their_slowest_device() -> None:
    assert of_devices([1, 0.5], 2, 2) == [1, 1, 0.5, 0.5] and of_devices([1, 2, 3, 4], 2, 2) == [1, 2, 3, 4]
    assert slowest_of(engines_of(4, 2), [1, 0.25, 0.5, 1]) == [0.25, 0.5]
    layout = Layout(8, tp=2, pp=2)
    assert replicas_of(8, layout) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert slowest_of(replicas_of(8, layout), [1, 1, 1, 1, 1, 0.5, 1, 1]) == [0.5, 1]


def test_a_part_of_the_nodes_keeps_the_speeds_by_which_it_can_divide() -> None:
    config = config_of(launcher={"nnodes": 3, "nproc_per_node": 2}, speeds={"rollout": [1, 0.5, 0.25], "actor": None})
    part = speeds_of_part(config, [0, 2], 2)
    assert part is not None and part.rollout == (1, 1, 0.25, 0.25) and part.actor is None
    assert fitting_speeds(config_of(**TWO_NODES), part) == part
    assert fitting_speeds(config_of(**TWO_NODES, rollout={"tensor_parallel_size": 4}), part) is None
    one = speeds_of_part(config, [1], 1)
    assert one is not None and one.rollout == (0.5,) and speeds_of_part(config_of(), [0], 2) is None
