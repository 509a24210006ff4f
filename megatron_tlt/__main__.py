"""``tlt`` and ``python -m megatron_tlt``."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from megatron_tlt import __version__


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once: an exception raised inside a callback of the garbage collector would be dropped."""
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signum)


def main() -> int:
    """Runs one command; Ctrl-C ends it with one line, also while the commands are imported.

    ``--version`` imports nothing, so that it answers in any environment.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"tlt {__version__}")
        return 0
    before = signal.signal(signal.SIGINT, _leave)
    from megatron_tlt.cli import main as run

    signal.signal(signal.SIGINT, before)
    try:
        return run()
    except KeyboardInterrupt:  # where no command awaits it
        print("error: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
