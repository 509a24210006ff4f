"""A preempted session of drafter training: the next one, on other ranks, starts from its last checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_tlt.drafter.checkpoint import KIND, payload_of, read_checkpoint, state_of
from megatron_tlt.drafter.folder import drafter_from_target
from megatron_tlt.drafter.state import DrafterState
from megatron_tlt.drafter.training import DrafterTrainer
from megatron_tlt.spot.checkpointer import SelectiveCheckpointer, newest
from tests.drafter.conftest import load_target, random_entry, write_target
from tests.helpers.launch import run_torchrun
from tests.spot.workers.next_session import CONFIG

WORKER = Path(__file__).parent / "workers" / "next_session.py"


def same(a: DrafterState, b: DrafterState) -> bool:
    """Whether all tensors, numbers and the version are bit-equal."""
    one, other = a.tensors(), b.tensors()
    return (
        a.version == b.version
        and a.numbers == b.numbers
        and one.keys() == other.keys()
        and all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)
    )


@pytest.mark.distributed
def test_the_next_session_on_other_ranks_starts_from_the_same_bits(tmp_path: Path) -> None:
    target = write_target("qwen2-untied", tmp_path / "target")
    model = load_target(target)
    batches = [[random_entry(model, "eagle", 9, 3, seed=10 * step + i) for i in range(2)] for step in range(4)]
    alone = DrafterTrainer(drafter_from_target(target, "eagle", seed=0), CONFIG, seed=0)
    with SelectiveCheckpointer(tmp_path / "spot") as checkpointer:
        for step, batch in enumerate(batches):
            if step == 3:
                checkpointer.save(alone.version, payload_of(alone.state, {"step": 17}))
                kept = {name: tensor.clone() for name, tensor in alone.state.tensors().items()}
                expected = DrafterState.from_tensors(alone.version, kept, dict(alone.state.numbers))
            assert alone.train_step(batch).outcome == "trained"  # the fourth is lost

    found = newest(tmp_path / "spot", KIND)
    assert found is not None
    state, extra = state_of(found.payload)
    assert extra == {"step": 17} and same(state, expected) and state.version == 3
    assert same(read_checkpoint(found.folder)[0], expected), "the same file as a checkpoint of the run's"
    names = set(state.tensors())
    assert not any("embed" in name or "lm_head" in name for name in names) and any("exp_avg_sq" in n for n in names)

    resumed = DrafterTrainer(drafter_from_target(target, "eagle", seed=1), CONFIG, seed=0)
    resumed.load_state(state)
    resumed.train_step(batches[3])
    assert same(resumed.state, alone.state), "the lost step again, bit for bit"

    run_torchrun(WORKER, 2, [str(target), str(tmp_path / "spot"), str(tmp_path)])
    for rank in range(2):
        assert same(read_checkpoint(tmp_path / f"rank{rank}")[0], expected), rank
