"""torchrun as a launch starts it: ``python -m megatron_tlt.platform.torchrun`` takes torchrun's own arguments.

A scheduler sends SIGTERM to all processes of a job. The workers save and leave on it, in their own time; torchrun
would kill them 30 s later, saved or not. So it leaves that signal to them, and ends with its workers.

SIGINT ends this process at once until torchrun handles it: a KeyboardInterrupt that is raised while C extensions
are imported can be swallowed there.
"""

import signal
import sys


def main() -> None:
    """Runs torchrun with the arguments of this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torch.distributed.run import main as run

    from megatron_tlt.platform.deaths import failures_recorded

    # a handler, not SIG_IGN: the workers would inherit that
    signal.signal(signal.SIGTERM, lambda *_: None)
    with failures_recorded():
        run(["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]])


if __name__ == "__main__":
    main()
