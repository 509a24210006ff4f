"""The spot section's bounds, and what it asks of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.config.loader import load_config
from tests.config.test_loader import violations, write

RIGHT = (
    "launcher.nproc_per_node=4",
    "drafter.kind=eagle",
    "speculation.drafter=eagle",
    "spot.min_replicas=3",
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["drafter=null", "speculation.drafter=ngram"], "spot: there is no drafter section"),
        (
            ["run.deterministic=true"],
            "run.deterministic: found true; how long spot trains the drafter goes by measured",
        ),
        (["spot.min_replicas=4"], "spot.min_replicas: found 4; allowed: at most 3, as the last of the 4 engines"),
        (["rollout.tensor_parallel_size=4"], "spot: there is one engine, which never waits for another"),
        (["spot.lost_after_s=0.7"], "lost_after_s is 0.7; allowed: twice heartbeat_s, 1.0, and more"),
        (["spot.grace_s=5"], "grace_s is 5.0; allowed: below preempt_timeout_s, 5.0"),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in "\n".join(violations(write(tmp_path), *RIGHT, *overrides))


def test_what_fits_is_taken(tmp_path: Path) -> None:
    spot = load_config(write(tmp_path), RIGHT, check_libraries=False).spot
    assert spot is not None and (spot.min_replicas, spot.least_steps, spot.memory_gib) == (3, 0, None)
