"""The process group: what a failed rendezvous says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

JOIN = "from megatron_tlt.platform.device import initialize_distributed; initialize_distributed(5)"


def test_a_port_in_use_is_one_line_with_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(
            [sys.executable, "-c", JOIN], env={**os.environ, **launch}, capture_output=True, text=True, timeout=120
        )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("megatron_tlt.errors.RunError: rendezvous at 127.0.0.1:" + port), done.stderr
    assert "in use" in last
