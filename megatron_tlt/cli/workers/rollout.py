"""A rollout without training: one rank."""

import json
import sys

from megatron_tlt.cli.worker import run_guarded


def main(resolved: str, request: str) -> None:
    """Takes the path of a resolved config, and a ``RolloutRequest`` as JSON."""
    from megatron_tlt.config.loader import load_resolved
    from megatron_tlt.trainer.offline import RolloutRequest, roll_out

    roll_out(load_resolved(resolved), RolloutRequest(**json.loads(request)))


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(*sys.argv[1:])))
