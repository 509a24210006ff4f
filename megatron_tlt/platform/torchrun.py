"""torchrun as a launch starts it: ``python -m megatron_tlt.platform.torchrun`` takes torchrun's own arguments.

A scheduler sends SIGTERM to all processes of a job. The workers save and leave on it, in their own time; torchrun
would kill them 30 s later, saved or not. So it leaves that signal to them, and ends with its workers.
"""

import signal
import sys

from torch.distributed.run import main

from megatron_tlt.platform.deaths import failures_recorded

if __name__ == "__main__":
    # a handler, not SIG_IGN: the workers would inherit that
    signal.signal(signal.SIGTERM, lambda *_: None)
    with failures_recorded():
        main(["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]])
