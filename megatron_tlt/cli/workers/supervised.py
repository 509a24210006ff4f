"""Supervised warm-up of a recipe's model: one rank."""

import sys

from megatron_tlt.cli.worker import run_worker

if __name__ == "__main__":
    from megatron_tlt.trainer.supervised import build_model_of_recipe as main

    sys.exit(run_worker(main))
