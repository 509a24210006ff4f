"""A checkpoint loads under another layout, optimizer state included, and training goes on as it would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.actor.conftest import rows_of

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "resharding.py"
FORGOTTEN = "without optimizer state"


@pytest.fixture(scope="module")
def losses(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    return rows_of(WORKER, models, tmp_path_factory.mktemp("resharding"))


def test_loss_goes_on_under_every_other_layout(losses: dict[str, dict[str, list[float]]]) -> None:
    from tests.actor.workers.resharding import LAYOUTS

    assert set(losses) == {name for layouts in LAYOUTS.values() for name in layouts}
    for source, rows in losses.items():
        expected = rows["uninterrupted"]
        assert expected[-1] < expected[0]
        for target in LAYOUTS["moe" if source.startswith("moe") else "dense"]:
            assert rows[target] == pytest.approx(expected, rel=1e-5), f"{source} to {target}"


def test_the_optimizer_state_is_what_makes_it_so(losses: dict[str, dict[str, list[float]]]) -> None:
    for source, rows in losses.items():
        assert rows[FORGOTTEN][0] == pytest.approx(rows["uninterrupted"][0], rel=1e-5), source
        assert rows[FORGOTTEN][1:] != pytest.approx(rows["uninterrupted"][1:], rel=1e-3), source
