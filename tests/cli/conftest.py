"""What the tests of several nodes share: the quickstart's config on two nodes, and a Slurm to submit it to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.slurm import Slurm, cluster, why_no_slurm

_QUICKSTART = "launch/quickstart-deterministic.yaml"
# A drafter that learns; one of the quickstart's tasks, its sizes smaller, and 200 of 1,500 steps of its warm-up, from
# where six steps raise held-out pass@1 by far (two seeds on one node: 0.27 to 0.41, 0.31 to 0.44).
_SHORTER = (
    "launcher.nnodes=2",
    "launcher.nproc_per_node=1",
    "speculation.drafter=eagle",
    "drafter.kind=eagle",
    "drafter.lr=1e-3",
    "tasks=[{name: spell_backward, params: {sizes: {min: 3, max: 5}}}]",
    "model.recipe.supervised.num_steps=200",
    "trainer.steps=6",
    "trainer.prompts_per_step=24",
    "evaluation.problems=48",
)


def steps(run: Path) -> int:
    """Steps in the metrics of a run; -1 before there are any, 0 with the row before the first."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return len([line for line in lines if line.endswith("}")]) - 1


@dataclass(frozen=True)
class TwoNodes:
    """Runs of the quickstart's config on two nodes, below one folder."""

    folder: Path

    def arguments(self, run: Path, *more: str) -> list[str]:
        """The config and the overrides of a run, which are those of each of its jobs."""
        return [_QUICKSTART, f"run.dir={run}", f"model.recipe.cache_dir={self.folder / 'models'}", *_SHORTER, *more]


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> TwoNodes:
    return TwoNodes(tmp_path_factory.mktemp("two-nodes"))


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
