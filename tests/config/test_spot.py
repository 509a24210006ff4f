"""The spot section's bounds, and what it asks of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.spot import session_start
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
            "run.deterministic: found true; how long spot trains the drafter depends on measured",
        ),
        (["spot.min_replicas=4"], "spot.min_replicas: found 4; allowed: at most 3, as the last of the 4 engines"),
        (["rollout.tensor_parallel_size=4"], "spot: there is one engine, which never waits for another"),
        (["spot.lost_after_s=0.7"], "lost_after_s is 0.7; allowed: at least twice heartbeat_s, 1.0"),
        (["spot.grace_s=5"], "grace_s is 5.0; allowed: below preempt_timeout_s, 5.0"),
        (
            ["spot.min_entries=73", "trainer.prompts_per_step=4", "algorithm.group_size=8"],
            "spot.min_entries: found 73; allowed: at most 72, the average of 3 of 4 engines over "
            "drafter.buffer.max_age + 1 = 3 step(s)",
        ),
        (
            [
                *("launcher.nproc_per_node=2", "spot.min_replicas=1", "drafter.buffer.max_age=0"),
                *("spot.min_entries=6", "trainer.prompts_per_step=5", "algorithm.group_size=2"),
            ],
            "spot.min_entries: found 6; allowed: at most 5, the average of 1 of 2 engines over",
        ),
        (
            ["drafter.loss.reward_weighting=true", "spot.states_bytes=1000000"],
            "drafter.loss.reward_weighting: found true with spot.states_bytes = 1000000; spot trains on responses",
        ),
        (
            ["drafter.buffer.disk_bytes=100000"],
            f"drafter.buffer.disk_bytes: found 100000; allowed: at least {640 * (2 * 128 + 4) + 4096}, for one "
            "response of rollout.max_prompt_tokens + rollout.max_response_tokens = 640 tokens",
        ),
        (
            ["drafter.buffer.disk_bytes=0", "drafter.buffer.memory_bytes=100000"],
            "drafter.buffer.memory_bytes: found 100000; allowed: at least",
        ),
        (
            ["spot=null", "run.deterministic=true", "drafter.buffer.disk_bytes=0"],
            "drafter.buffer.disk_bytes: found 0; under run.deterministic a resumed run repeats its steps",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in "\n".join(violations(write(tmp_path), *RIGHT, *overrides))


def test_what_waiting_engines_hold_on_average_is_taken(tmp_path: Path) -> None:
    own = ["launcher.nproc_per_node=2", "spot.min_replicas=1", "drafter.buffer.max_age=0"]
    sizes = ["trainer.prompts_per_step=4", "algorithm.group_size=4", "spot.min_entries=8"]
    config = load_config(write(tmp_path), (*RIGHT, *own, *sizes), check_libraries=False)
    assert config.spot is not None and config.spot.min_entries == 8


def test_what_fits_is_taken(tmp_path: Path) -> None:
    spot = load_config(write(tmp_path), RIGHT, check_libraries=False).spot
    assert spot is not None and (spot.min_replicas, spot.min_steps, spot.memory_gib) == (3, 0, None)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (2, 8)),  # of 32 responses two of four engines have 16
        (["spot.min_replicas=3"], (3, 12)),
        (["launcher.nproc_per_node=2"], (1, 8)),
        (["trainer.prompts_per_step=64", "drafter.entries_per_step=2"], (2, 8)),  # a global batch
        (["trainer.prompts_per_step=4", "algorithm.group_size=2"], (2, 2)),
        (["spot.min_entries=64"], (2, 64)),
    ],
)
def test_defaults_scale_with_what_a_step_gives(overrides: list[str], expected: tuple[int, int], tmp_path: Path) -> None:
    sizes = ("trainer.prompts_per_step=4", "algorithm.group_size=8", "spot.min_steps=0")
    config = load_config(write(tmp_path), (*RIGHT[:-1], *sizes, *overrides), check_libraries=False)
    assert session_start(config) == expected
    assert expected[0] < config.launcher.world_size
