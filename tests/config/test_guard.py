"""The section ``guard``: what it refuses, and that a run may get it later."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.config.identity import identifies_run
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError
from tests.config.test_loader import write

BACK = "guard={on_nonfinite: go_back}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([BACK, "trainer.save_every=0"], "guard.on_nonfinite: found go_back with trainer.save_every = 0"),
        ([BACK, "schedule={kind: partial}"], "guard.on_nonfinite: found go_back with a section schedule"),
        ([BACK, "tail={}"], "guard.on_nonfinite: found go_back with a section tail"),
        (
            [BACK, "algorithm.kl.coefficient=0.1", "algorithm.kl.update_every=5"],
            "guard.on_nonfinite: found go_back with algorithm.kl.update_every",
        ),
        (["guard={on_spike: skip}"], "guard.on_spike: found skip without guard.spike_factor"),
        (["guard={spike_factor: 1.0}"], "guard.spike_factor"),
        (["guard={straggler_factor: 0.5}"], "guard.straggler_factor"),
        (["guard={on_straggler: leave_out}"], "guard.on_straggler: found leave_out without guard.straggler_factor"),
        (
            ["guard={on_straggler: leave_out, straggler_factor: 2.0}"],
            "guard.on_straggler: found leave_out without elastic.min_devices",
        ),
    ],
)
def test_what_has_no_effect_or_does_not_fit_is_refused(tmp_path: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(write(tmp_path), overrides, check_libraries=False)


def test_without_the_section_nothing_is_judged_and_a_run_may_get_it_later(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), check_libraries=False)
    assert config.guard is None
    given = load_config(write(tmp_path), [BACK], check_libraries=False)
    assert given.guard is not None and given.guard.going_back == ["on_nonfinite"]
    assert given.run.dir == config.run.dir and not identifies_run("guard.on_nonfinite")
