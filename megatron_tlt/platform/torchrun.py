"""torchrun with signal handling for a launch: ``python -m megatron_tlt.platform.torchrun`` takes torchrun's arguments.

Or it takes ``--preload MODULES DESCRIPTOR`` and receives its arguments later (``megatron_tlt.platform.preload``).

A scheduler sends SIGTERM to all processes of a job. The workers then save and exit, and may need longer than the 30 s
after which torchrun would kill them. So torchrun ignores that signal and ends with its workers.

Until torchrun handles SIGINT, that signal ends this process at once: a KeyboardInterrupt raised while C extensions are
imported can be swallowed there.
"""

import signal
import sys


def main() -> None:
    """Runs torchrun with the arguments of this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torch.distributed.run import main as run

    from megatron_tlt.platform import preload
    from megatron_tlt.platform.deaths import failures_recorded, kill_others_at_once

    if sys.argv[1:2] == [preload.PRELOAD]:
        forks = preload.wait_for_start(sys.argv[2], int(sys.argv[3]))
        if forks is not None:
            forks.install()
    # a handler, not SIG_IGN: the workers would inherit SIG_IGN
    signal.signal(signal.SIGTERM, lambda *_: None)
    kill_others_at_once()
    with failures_recorded():
        run(["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]])


if __name__ == "__main__":
    main()
