"""The data-plane benchmark: its extrapolation, and a step of this release that it measures."""

from __future__ import annotations

import argparse

import pytest

from megatron_tlt.bench import data_plane
from megatron_tlt.bench.data_plane import extrapolate


def test_a_size_that_was_not_measured_is_on_the_line_through_those_that_were() -> None:
    assert extrapolate([256, 512], [10.0, 18.0], 2048) == 18.0 + 8.0 * 6
    assert extrapolate([256, 2048], [10.0, 70.0], 2048) == 70.0
    assert extrapolate([256], [10.0], 512) == 20.0


@pytest.mark.distributed
def test_a_step_without_a_model_is_measured_on_every_rank() -> None:
    parser = argparse.ArgumentParser()
    data_plane.add_arguments(parser)
    given = ["--processes", "2", "--responses", "32", "--measured-after", "8", "16", "--tokens", "64"]
    result = data_plane.run(parser.parse_args(given))
    assert [(row["responses"], row["release"]) for row in result.rows] == [(8, "after"), (16, "after"), (32, "after")]
    assert result.rows[-1]["measured"] == "extrapolated from 8, 16" and result.targets == {}
    # through two small measurements a line may lead anywhere
    measured = [row for row in result.rows if row["measured"] == str(row["responses"])]
    assert len(measured) == 2
    assert all(row["seconds"] > 0 and row["mib_of_all"] >= row["mib_per_rank"] for row in measured)
