"""Snapshots of tiny policies under several layouts: restored alike and under others, damaged, incomplete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO, Any

from megatron_tlt.actor.megatron_rng import RngState
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.checkpoint.memory_slots import DATA, INDEX
from megatron_tlt.platform import file_exchange
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.platform.memory_files import allocate
from megatron_tlt.trainer.checkpoints import Checkpoints, TrainerState
from megatron_tlt.trainer.snapshots import Snapshots
from tests.actor.workers.layouts import PP2, TP2SP, VP2, batch, equal, policy_of, weights_of

MUON: dict[str, Any] = {
    "optimizer": {"optimizer": "torch.optim.Muon", "lr": 1e-2},
    "optimizer_split": {"lr": 1e-3},
}
CASES: dict[str, dict[str, Any]] = {
    "dp2": {"megatron": {}},
    "tp2sp": {"megatron": TP2SP},
    "pp2vp2": {"megatron": PP2 | VP2},
    "dp2-bf16": {"megatron": {"bf16": True}},
    "moe-ep2": {"megatron": {"expert_model_parallel_size": 2}},
    "dp2-muon": {"megatron": {}, **MUON},
    "pp2-muon": {"megatron": PP2, **MUON},
}
EXPECTED = 4096
"""Fewer bytes than a snapshot, as an estimate may be."""
OTHER_LAYOUTS = {"tp2sp": "dp2", "dp2": "pp2vp2", "pp2-muon": "dp2-muon"}


def built(models: Path, name: str) -> Policy:
    return policy_of(models, name, **CASES[name])


def train(policy: Policy, steps: int) -> list[float]:
    return [policy.update(batch(), negative_log_likelihood)["loss"] for _ in range(steps)]


def _is_made(file: Path, size: int) -> bool:
    """Whether the file has so many bytes, or gets them soon."""
    end = time.monotonic() + 60.0
    while not file.is_file() or file.stat().st_size < size:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return size > 0


def run(models: Path, root: Path, name: str) -> dict[str, Any]:
    policy = built(models, name)
    snapshots = Snapshots(root, [RngState(policy.layout)], expected_bytes=EXPECTED)
    assert snapshots.resume(policy, least=0) is None
    row: dict[str, Any] = {"first_slot_made": _is_made(root / "slot_0" / f"rank_{rank():05d}" / DATA, EXPECTED)}
    for step in (1, 2):
        train(policy, 1)
        snapshots.begin(policy, step)
        snapshots.commit(TrainerState(step=step, tokens_seen=10 * step))
        if step == 1:
            made = root / "slot_1" / f"rank_{rank():05d}" / DATA
            row["second_slot_made"] = _is_made(made, snapshots.bytes_used)
    row |= {"bytes": snapshots.bytes_used, "copy_s": snapshots.copy_s}
    row["losses"] = train(policy, 1)
    snapshots.begin(policy, 3)  # and the process dies
    expected = weights_of(policy)
    again = built(models, name)
    resumed = Snapshots(root, [RngState(again.layout)])
    state = resumed.resume(again, least=2)
    assert state is not None
    row["state"] = [state.step, state.tokens_seen]
    train(again, 1)
    row["resume_is_bit_equal"] = equal(weights_of(again), expected)
    if name in OTHER_LAYOUTS:
        other = built(models, OTHER_LAYOUTS[name])
        assert Snapshots(root, [RngState(other.layout)]).resume(other, least=0) is not None
        row["other_losses"] = train(other, 1)
    # the next snapshot goes into the other slot
    resumed.begin(again, 3)
    row["kept_while_writing"] = getattr(Snapshots(root, []).resume(built(models, name), least=0), "step", None)
    resumed.commit(TrainerState(step=3))
    barrier()  # as collectives of the next step would be
    row["newest"] = getattr(Snapshots(root, []).resume(built(models, name), least=0), "step", None)
    row["older_than_checkpoint"] = Snapshots(root, []).resume(again, least=4)
    return row


def flip(file: Path) -> None:
    """Changes a bit of a byte that is in use."""
    with file.open("r+b") as opened:
        opened.seek(100)
        byte = opened.read(1)
        opened.seek(100)
        opened.write(bytes([byte[0] ^ 1]))


def beside(models: Path, root: Path) -> dict[str, Any]:
    """A flipped bit in what lies beside the blocks: of the common state, or of a part, of one rank."""
    policy = built(models, "dp2")
    snapshots = Snapshots(root, [RngState(policy.layout)])
    train(policy, 1)
    snapshots.begin(policy, 1)
    snapshots.commit(TrainerState(step=1))
    row: dict[str, Any] = {}
    for name in ("parts_00001/common.pt", "parts_00001/rng/rank_00001/state.json"):
        if rank() == 1:
            flip(root / "slot_0" / name)
        barrier()
        # a snapshot that cannot be used is forgotten
        index = root / "slot_0" / f"rank_{rank():05d}" / INDEX
        kept = index.read_bytes()
        row[name] = Snapshots(root, [RngState(policy.layout)]).resume(policy, least=0)
        index.write_bytes(kept)
        barrier()
        if rank() == 1:
            flip(root / "slot_0" / name)
        barrier()
    row["step"] = getattr(Snapshots(root, [RngState(policy.layout)]).resume(policy, least=0), "step", None)
    return row


def no_room(opened: IO[bytes], size: int) -> None:
    """In place of ``allocate``: memory is short for files of a MB."""
    if size > 1 << 20:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    allocate(opened, size)


def short_memory(models: Path, root: Path) -> dict[str, Any]:
    """Rank 1 cannot take its buddy's copy; then, of a single node, it cannot write what lies beside the blocks."""
    policy = built(models, "dp2")
    row: dict[str, Any] = {}
    snapshots = Snapshots(root / f"node_{rank()}", [RngState(policy.layout)], node=rank())
    if rank() == 1:
        file_exchange.allocate = no_room  # type: ignore[attr-defined]
    for step in (1, 2, 3):
        train(policy, 1)
        snapshots.begin(policy, step)
        snapshots.commit(TrainerState(step=step))
    snapshots.close()
    file_exchange.allocate = allocate  # type: ignore[attr-defined]
    row["copy"] = snapshots.newest_step
    alone = Snapshots(root / "one", [RngState(policy.layout)])
    for step in (1, 2, 3):
        train(policy, 1)
        if step == 2 and rank() == 1:
            (root / "one" / "slot_1").mkdir(exist_ok=True)
            (root / "one" / "slot_1" / "parts_00001").write_text("")  # no folder can be made there
        barrier()
        alone.begin(policy, step)
        alone.commit(TrainerState(step=step))
    row["part"] = alone.newest_step
    return row


def broken(models: Path, root: Path, checkpoints: Path) -> dict[str, Any]:
    """A flipped byte of one rank, and a rank that had not committed: the checkpoint is taken."""
    policy = built(models, "dp2")
    saved = Checkpoints(checkpoints, 2)
    snapshots = Snapshots(root, [])
    train(policy, 1)
    saved.save(policy, TrainerState(step=1))
    saved.finish()
    for step in (2, 3):
        train(policy, 1)
        snapshots.begin(policy, step)
        snapshots.commit(TrainerState(step=step))
    own = [root / f"slot_{slot}" / f"rank_{rank():05d}" for slot in (0, 1)]
    row: dict[str, Any] = {}
    if rank() == 1:
        (own[1] / INDEX).unlink()
    barrier()
    row["incomplete"] = saved.resume(policy, snapshots=Snapshots(root, [])).step
    if rank() == 1:
        flip(own[0] / DATA)
    barrier()
    row["flipped"] = saved.resume(policy, snapshots=Snapshots(root, [])).step
    row["forgotten"] = Snapshots(root, []).resume(policy, least=0)
    newest = snapshots.newest_step
    snapshots.forget()
    row["newest_step"] = [newest, snapshots.newest_step]
    return row


def mixed(models: Path, root: Path) -> dict[str, Any]:
    """A step that was saved, and repeated by another start of the ranks: a part of each is no snapshot."""
    policy = built(models, "dp2")
    for name in ("before", "after"):
        snapshots = Snapshots(root / name, [])
        train(policy, 1)
        snapshots.begin(policy, 1)
        snapshots.commit(TrainerState(step=1))
    own = [root / name / "slot_0" / f"rank_{rank():05d}" for name in ("before", "after")]
    barrier()
    row = {"alone": getattr(Snapshots(root / "after", []).resume(policy, least=0), "step", None)}
    if rank() == 1:
        shutil.rmtree(own[1])
        own[0].rename(own[1])
    barrier()
    row["mixed"] = getattr(Snapshots(root / "after", []).resume(policy, least=0), "step", None)
    return row


def two_nodes(models: Path, root: Path) -> dict[str, Any]:
    """Each rank is a node of its own, and one of them loses its memory."""
    own = root / f"node_{rank()}"
    policy = built(models, "dp2")
    snapshots = Snapshots(own, [RngState(policy.layout)], node=rank())
    for step in (1, 2, 3):
        train(policy, 1)
        snapshots.begin(policy, step)
        snapshots.commit(TrainerState(step=step))
    snapshots.close()  # what was sent has arrived
    barrier()
    row: dict[str, Any] = {"copies": sorted(folder.name for folder in (own / "slot_0").iterdir())}
    train(policy, 1)
    expected = weights_of(policy)
    if rank() == 1:
        shutil.rmtree(own)
    barrier()
    again = built(models, "dp2")
    resumed = Snapshots(own, [RngState(again.layout)], node=rank())
    state = resumed.resume(again, least=0)
    row["step"] = None if state is None else state.step
    resumed.close()
    barrier()
    row["copies_after"] = sorted(index.parent.name for index in (root / "node_1" / "slot_0").glob(f"*/{INDEX}"))
    train(again, 1)
    row["resume_is_bit_equal"] = equal(weights_of(again), expected)
    other = built(models, "pp2vp2")
    row["other_step"] = getattr(Snapshots(own, [], node=rank()).resume(other, least=0), "step", None)
    flip(own / "slot_0" / f"rank_{1 - rank():05d}" / DATA)  # which this node uses under another layout
    barrier()
    row["flipped_copy"] = Snapshots(own, [], node=rank()).resume(other, least=0)
    shutil.rmtree(root / f"node_{rank()}")
    barrier()
    row["both_lost"] = Snapshots(own, [], node=rank()).resume(again, least=0)
    return row


def main(models: str, out: str) -> None:
    initialize_distributed(120)
    rows = {name: run(Path(models), Path(out) / name, name) for name in CASES}
    rows["broken"] = broken(Path(models), Path(out) / "broken", Path(out) / "checkpoints")
    rows["mixed"] = mixed(Path(models), Path(out) / "mixed")
    rows["beside"] = beside(Path(models), Path(out) / "beside")
    rows["short"] = short_memory(Path(models), Path(out) / "short")
    rows["nodes"] = two_nodes(Path(models), Path(out) / "nodes")
    if rank() == 0:
        Path(out, "rows.json").write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
