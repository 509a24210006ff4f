"""One rank of a run in which a bit of one rank's weights flips after the second update."""

from __future__ import annotations

import sys
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.cli.worker import run_worker
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.platform.device import rank
from megatron_tlt.trainer.loop import Run

FLIPPED_BY, AFTER = 1, 2


def main(config: TltConfig) -> None:
    update, done = Policy.update, [0]

    def flipping(self: Policy, *arguments: Any) -> dict[str, float]:
        found = update(self, *arguments)
        done[0] += 1
        if done[0] == AFTER and rank() == FLIPPED_BY:
            next(self.model.chunks[0].parameters()).detach().view(-1).view(torch.int32)[0] ^= 1
        return found

    Policy.update = flipping  # type: ignore[method-assign]
    Run(config).train()


if __name__ == "__main__":
    sys.exit(run_worker(main))
