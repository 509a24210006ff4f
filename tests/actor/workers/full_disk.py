"""Saves a policy into a folder on a full disk, then a damaged copy of a checkpoint is loaded; prints what each says."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_tlt.actor.megatron_checkpoint import load_policy, save_policy
from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import initialize_distributed


def said(act: object, policy: Policy, folder: Path) -> str:
    try:
        act(policy, folder)  # type: ignore[operator]
    except RunError as error:
        return str(error)
    return "nothing"


def main(model: str, full: str, good: str) -> None:
    initialize_distributed()
    policy = Policy(Path(model), ActorConfig(transformer_impl="local", optimizer={"lr": 1e-3}), seed=0)
    print("FULL:", said(save_policy, policy, Path(full)))
    save_policy(policy, Path(good))
    largest = max(Path(good).glob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    print("DAMAGED:", said(load_policy, policy, Path(good)))
    print("EMPTY:", said(load_policy, policy, Path(model)))


if __name__ == "__main__":
    main(*sys.argv[1:])
