"""What the tests of several nodes share: a small run on two nodes, and a Slurm to submit it to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.slurm import Slurm, cluster, why_no_slurm
from tests.trainer.conftest import CONFIG

_CHANGES = {
    "launcher: {nproc_per_node: 2}": "launcher: {nnodes: 2, nproc_per_node: 1}",
    "trainer: {steps: 4, prompts_per_step: 4,": "trainer: {steps: 4, prompts_per_step: 16,",
    # a reward above 0 from the start, which four steps raise: held-out pass@1 from 0.25 to 0.67
    "optimizer: {lr: 1.0e-3}": "optimizer: {lr: 2.0e-3}",
    "  - {name: chain_sum, params: {sizes: {min: 2, max: 3}}}\n": "",
    "sizes: {min: 9, max: 19}": "sizes: {min: 4, max: 9}",
    "num_steps: 30,": "num_steps: 150,",
    "entropy_coefficient: 0.1": "entropy_coefficient: 0.0",
    "problems: 8, samples: 2": "problems: 16, samples: 4",
}
_DRAFTER = """
speculation: {drafter: eagle, num_speculative_tokens: 2}
drafter: {kind: eagle}
"""


def steps(run: Path) -> int:
    """Steps in the metrics of a run; -1 before there are any, 0 with the row before the first."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return len([line for line in lines if line.endswith("}")]) - 1


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of the trainer's small run, with a drafter, on two nodes; runs go beside it."""
    folder = tmp_path_factory.mktemp("two-nodes")
    text = CONFIG
    for one, other in _CHANGES.items():
        assert one in text
        text = text.replace(one, other)
    file = folder / "two-nodes.yaml"
    file.write_text(text % {"cache": folder / "models"} + _DRAFTER)
    return file


@pytest.fixture(scope="session")
def environment() -> Path:
    """The environment that the tests run in, for ``TLT_VENV``."""
    return Path(sys.prefix)


@pytest.fixture(scope="session")
def slurm(environment: Path) -> Iterator[Slurm]:
    """A real cluster; without one the tests that need it are skipped, and say what is missing."""
    reason = why_no_slurm()
    if reason is not None:
        pytest.skip(reason)
    with cluster(environment) as running:
        yield running
