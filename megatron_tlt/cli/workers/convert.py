"""Conversion of a checkpoint: one rank."""

import sys
from pathlib import Path

from megatron_tlt.cli.worker import run_guarded


def main(source: str, target: str, side_files: str, verify: str) -> None:
    """``side_files`` empty: use those beside the checkpoint. ``verify`` empty: do not verify the source."""
    from tqdm import tqdm

    from megatron_tlt.actor.megatron_convert import convert
    from megatron_tlt.platform.device import initialize_distributed, rank

    initialize_distributed()
    # None: shown only on a terminal; standard error goes to a log
    with tqdm(unit="B", unit_scale=True, file=sys.stdout, disable=None if rank() == 0 else True) as bar:

        def done(count: int, total: int) -> None:
            bar.total = total
            bar.update(count)

        convert(Path(source), Path(target), Path(side_files) if side_files else None, done, verify=bool(verify))


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(*sys.argv[1:])))
