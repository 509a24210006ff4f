"""Loads a converted checkpoint into a policy of the same architecture and saves that policy anew."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_tlt.actor.megatron_checkpoint import save_policy
from megatron_tlt.actor.policy import Policy
from megatron_tlt.checkpoint.manifest import write_manifest
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.platform.device import initialize_distributed


def main(converted: str, saved: str) -> None:
    initialize_distributed()
    policy = Policy(Path(converted), ActorConfig(transformer_impl="local"), seed=0)
    Path(saved, "actor").mkdir(parents=True)
    save_policy(policy, Path(saved, "actor"))
    write_manifest(saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
