"""The benchmark of the planner's predictions: what it compares, and one case for real."""

from __future__ import annotations

import argparse

import pytest

from megatron_tlt.bench import plan
from megatron_tlt.bench.plan import CASES, LARGE, job_of_case, predicted_bytes, predicted_seconds, spearman
from megatron_tlt.config.layouts import problems
from megatron_tlt.planning.machine import processor


def test_rank_correlation_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)  # equal ones share their ranks


def test_every_layout_fits_its_model_and_is_predicted() -> None:
    large = {name: case for name, case in CASES.items() if case.shape is LARGE}
    assert len(large) >= 8 and all(case.processes == 8 for case in large.values())
    machine, seconds = processor(2, 24e9), []
    for case in large.values():
        job = job_of_case(case)
        assert job.model.parameters >= 100e6
        assert problems(job.actor.layout, job.model.shape) == []
        sizes = predicted_bytes(job)
        # what the machine is asked for in all
        assert len(sizes) == 8 and sum(sizes) < 14e9
        seconds.append(predicted_seconds(case, job, machine))
    assert len({round(one, 3) for one in seconds}) == len(seconds)


@pytest.mark.distributed
def test_the_memory_of_a_real_step_is_as_predicted() -> None:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    result = plan.run(parser.parse_args(["--cases", "quickstart, DP2", "--steps", "1", "--rounds", "1"]))
    (row,) = result.rows
    assert row["off_by"] <= plan.WITHIN and row["measured_s"] > 0
    assert [entry["met"] for entry in result.targets.values()] == [True]
