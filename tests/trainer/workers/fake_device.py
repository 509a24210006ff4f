"""A rank of a run whose device has a memory of its own."""

from __future__ import annotations

import sys

from megatron_tlt.cli.worker import run_worker
from megatron_tlt.platform.device import prepare

if __name__ == "__main__":
    prepare()
    from megatron_tlt.trainer.loop import train
    from tests.helpers import fake_device, put_back

    fake_device.install()
    put_back.install_from_environment()
    sys.exit(run_worker(train))
