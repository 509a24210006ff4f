"""What two ranks see of saves in the background; rank 0 writes it down."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch

from megatron_tlt.actor.megatron_convert import hf_to_megatron
from megatron_tlt.actor.megatron_rng import RngState
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.checkpoint.manifest import verify_manifest
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, collective_timeout_s, initialize_distributed, rank
from megatron_tlt.trainer.checkpoints import Checkpoints, TrainerState
from tests.actor.workers.layouts import batch


def policy_of(model: Path, **megatron: Any) -> Policy:
    actor = ActorConfig(
        transformer_impl="local", megatron=megatron, optimizer={"lr": 1e-3}, max_tokens_per_micro_batch=64
    )
    return Policy(model, actor, seed=0, total_steps=8)


def update(policy: Policy, steps: int = 1) -> None:
    for _ in range(steps):
        policy.update(batch(), negative_log_likelihood)


def tensors(policy: Policy) -> list[torch.Tensor]:
    """Everything on this rank that training changes: parameters, their float32 masters, Adam's moments."""
    found = [parameter.detach() for chunk in policy.model.chunks for parameter in chunk.parameters()]
    for wrapper in policy.optimizer.chained_optimizers:
        for group in wrapper.optimizer.param_groups:
            for parameter in group["params"]:
                state = wrapper.optimizer.state[parameter]
                found += [parameter.detach(), *(state[key] for key in sorted(state))]
    return found


def differing(policy: Policy, expected: list[torch.Tensor]) -> int:
    mine = sum(not torch.equal(a, b) for a, b in zip(tensors(policy), expected, strict=True))
    return sum(all_gather_data(mine, int))


def writers(known: set[int]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in known]


def snapshot(model: Path, root: Path) -> dict[str, Any]:
    """Changes every byte of the state while the writers are held, then lets them go on."""
    policy = policy_of(model)
    update(policy)
    checkpoints = Checkpoints(root, 2)
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    expected = [tensor.clone() for tensor in tensors(policy)]
    checkpoints.save(policy, TrainerState(1))
    held = writers(known)
    for process in held:
        process.suspend()
    unfinished = not checkpoints.poll()
    update(policy)
    for tensor in tensors(policy):
        tensor.add_(1.0)
    changed = differing(policy, expected)
    for process in held:
        process.resume()
    checkpoints.finish()
    loaded = policy_of(model)
    Checkpoints(root, 2).resume(loaded)
    return {"held": len(held), "unfinished": unfinished, "changed": changed, "differing": differing(loaded, expected)}


def refused(checkpoints: Checkpoints, policy: Policy, step: int) -> list[str]:
    """What each rank is told."""
    said = "nothing"
    try:
        checkpoints.save(policy, TrainerState(step))
        checkpoints.finish()
    except RunError as error:
        said = str(error)
    return all_gather_data(said, str)


def full_disk(model: Path, disk: Path) -> dict[str, Any]:
    """A second save with more and more room, until it fits: each stage of a save runs out of it."""
    policy = policy_of(model)
    update(policy)
    checkpoints = Checkpoints(disk / "checkpoints", 2)
    checkpoints.save(policy, TrainerState(1))
    checkpoints.finish()
    update(policy)
    files = [file.stat().st_size for file in (disk / "checkpoints").rglob("*") if file.is_file()]
    rows = []
    for room in (0, 8192, 16384, sum(files) // 2, sum(files) - 65536, sum(files) - 8192, sum(files)):
        if rank() == 0:
            free = psutil.disk_usage(str(disk)).free
            with open(disk / "filler", "wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, free - room)
        barrier()
        said = refused(checkpoints, policy, 2)
        left = sorted(path.name for path in (disk / "checkpoints").iterdir())
        rows.append({"room": room, "said": said, "left": left, "latest": (disk / "checkpoints/latest").read_text()})
        barrier()
        if rank() == 0:
            (disk / "filler").unlink()
    barrier()
    rows.append({"said": refused(checkpoints, policy, 2), "latest": (disk / "checkpoints/latest").read_text()})
    return {"rows": rows}


def killed_writer(model: Path, root: Path) -> dict[str, Any]:
    """One of a rank's writing processes is killed, as by a system out of memory."""
    policy = policy_of(model)
    checkpoints = Checkpoints(root, 2)
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    said = "nothing"
    checkpoints.save(policy, TrainerState(1))
    if rank() == 0:  # writes most: the optimizer's state is gathered here
        deadline = time.monotonic() + 10
        while not (files := [p for p in writers(known) if p.ppid() != os.getpid()]) and time.monotonic() < deadline:
            pass
        files[0].send_signal(signal.SIGKILL)
    try:
        checkpoints.finish()
    except RunError as error:
        said = str(error)
    return {"said": all_gather_data(said, str), "left": sorted(path.name for path in root.iterdir())}


def dropout(model: Path, root: Path) -> dict[str, Any]:
    """Steps after a resume against those of the policy that went on, with and without the random states."""
    policy = policy_of(model, hidden_dropout=0.1)
    update(policy, 2)
    Checkpoints(root, 2, [RngState(policy.layout)], in_background=False).save(policy, TrainerState(2))
    update(policy, 2)
    expected = [tensor.clone() for tensor in tensors(policy)]
    found = {}
    for name, parts in (("without", []), ("with", [RngState(policy.layout)])):
        resumed = policy_of(model, hidden_dropout=0.1)
        Checkpoints(root, 2, parts).resume(resumed)
        update(resumed, 2)
        found[name] = differing(resumed, expected)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        Checkpoints(root, 2, [RngState({**policy.layout, "tensor": 2})]).resume(policy)
    kept = torch.equal(before, torch.get_rng_state())
    return {"tensors": len(expected), **found, "other_layout": {"said": said.getvalue(), "kept": kept}}


def slow_hash(model: Path, root: Path) -> dict[str, Any]:
    """Resumes and converts while hashing a file takes longer than a collective may."""
    policy = policy_of(model)
    checkpoints = Checkpoints(root, 2)
    checkpoints.save(policy, TrainerState(3))
    checkpoints.finish()
    digest, hashed = hashlib.file_digest, []

    def slowly(file: BinaryIO, name: str) -> Any:
        time.sleep(2 * collective_timeout_s())
        hashed.append(Path(file.name).name)
        return digest(file, name)

    hashlib.file_digest = slowly
    step = Checkpoints(root, 2).resume(policy).step
    by_rank = all_gather_data(hashed, list[str])
    hf_to_megatron(model, root / "converted")
    hashlib.file_digest = digest
    return {"step": step, "hashed": by_rank, "converted": verify_manifest(root / "converted")}


def publishing_fails(model: Path, root: Path) -> dict[str, Any]:
    """The file system of rank 0 fails when the checkpoint is all but published."""
    policy = policy_of(model)
    checkpoints = Checkpoints(root, 2)
    digest = hashlib.file_digest

    def broken(file: BinaryIO, name: str) -> Any:
        raise OSError(5, "Input/output error")

    hashlib.file_digest = broken
    said = refused(checkpoints, policy, 1)
    hashlib.file_digest = digest
    return {"said": said, "left": sorted(path.name for path in root.iterdir())}


CASES = {
    "snapshot": snapshot,
    "killed_writer": killed_writer,
    "dropout": dropout,
    "full_disk": full_disk,
    "slow_hash": slow_hash,
    "publishing_fails": publishing_fails,
}


def main(model: str, folder: str, timeout_s: str, *cases: str) -> None:
    initialize_distributed(int(timeout_s))
    for case in cases:
        found = CASES[case](Path(model), Path(folder, case))
        if rank() == 0:
            Path(folder, f"{case}.json").write_text(json.dumps(found))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
