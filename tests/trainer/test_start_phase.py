"""On a device with a memory of its own the engine is built alone, and nothing is read after its memory was given up."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_tlt.config.loader import dump_resolved, load_config
from tests.helpers.launch import run_torchrun
from tests.trainer.conftest import Runs
from tests.trainer.test_drafter_manager import OVERRIDES, drafter, of_kind
from tests.trainer.test_run import weights

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORKER = Path(__file__).parent / "workers" / "fake_device.py"


def test_a_run_starts_resumes_and_ends_with_the_bits_of_one_whose_memory_is_shared(runs: Runs) -> None:
    overrides = (*OVERRIDES, *of_kind("eagle3"), "trainer.steps=2")
    runs.train("shared-memory", *overrides)
    own = runs.folder / "own-memory"
    for steps in (1, 2):  # the second start resumes
        settings = [*overrides, f"trainer.steps={steps}", f"run.dir={own}"]
        resolved = runs.folder / f"own-memory-{steps}.yaml"
        resolved.write_text(dump_resolved(load_config(runs.config, settings, check_libraries=False)))
        run_torchrun(WORKER, 2, [str(resolved)], timeout_s=400)
    shared = runs.folder / "shared-memory"
    assert weights(own) == weights(shared)
    expected, found = load_file(drafter(shared)), load_file(drafter(own))
    assert expected.keys() == found.keys() and all(expected[name].equal(found[name]) for name in expected)
