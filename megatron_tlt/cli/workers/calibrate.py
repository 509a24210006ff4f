"""Calibration of tasks by a policy: one rank."""

import json
import sys

from megatron_tlt.cli.worker import run_guarded


def main(resolved: str, request: str) -> None:
    """Takes the path of a resolved config, and a ``CalibrationRequest`` as JSON."""
    from megatron_tlt.config.loader import load_resolved
    from megatron_tlt.trainer.calibration import CalibrationRequest, calibrate

    calibrate(load_resolved(resolved), CalibrationRequest(**json.loads(request)))


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(*sys.argv[1:])))
