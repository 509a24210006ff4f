"""Evaluation of a checkpoint: one rank."""

import json
import sys

from megatron_tlt.cli.worker import run_guarded


def main(resolved: str, request: str) -> None:
    """Takes the path of a resolved config, and an ``EvaluationRequest`` as JSON."""
    from megatron_tlt.config.loader import load_resolved
    from megatron_tlt.trainer.evaluation import EvaluationRequest
    from megatron_tlt.trainer.offline import evaluate

    evaluate(load_resolved(resolved), EvaluationRequest(**json.loads(request)))


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(*sys.argv[1:])))
