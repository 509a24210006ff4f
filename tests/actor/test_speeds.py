"""Shares by speed take the step of even shares, under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.config.speeds import slowest_of
from tests.actor.conftest import rows_of

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "speeds.py"


@pytest.mark.parametrize("world", [2, 4])
def test_shares_by_speed_take_the_step_of_even_shares(world: int, models: Path, tmp_path: Path) -> None:
    from tests.actor.workers.speeds import CASES

    rows = rows_of(WORKER, models, tmp_path, world)
    assert set(rows) == set(CASES[world])
    assert {name: row["error"] for name, row in rows.items() if not row["error"] < 1e-6} == {}
    for name, row in rows.items():
        for one, other in zip(row["log_probs"]["even"], row["log_probs"]["uneven"], strict=True):
            assert other == pytest.approx(one, abs=1e-5), name
        assert row["metrics"]["uneven"] == pytest.approx(row["metrics"]["even"], rel=1e-5, abs=1e-6), name
        assert row["speeds"] == slowest_of(row["replicas"], CASES[world][name][1])
        tokens = {case: [count for (count,) in found] for case, found in row["tokens"].items()}
        assert tokens["uneven"] != tokens["even"], name
        slow = row["speeds"].index(min(row["speeds"]))
        own = [tokens["uneven"][row["replicas"].index(replica)] for replica in range(len(row["speeds"]))]
        assert own[slow] == min(own) and (own[slow] == 0) == name.endswith("-empty"), name
