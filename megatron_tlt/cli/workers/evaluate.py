"""Held-out evaluation: one rank."""

import sys

from megatron_tlt.cli.worker import run_worker

if __name__ == "__main__":
    from megatron_tlt.trainer.loop import evaluate as main

    sys.exit(run_worker(main))
