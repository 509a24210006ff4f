"""Ctrl-C as an event that a command waits for, where an exception could be lost."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[Callable[[float], bool]]:
    """Holds SIGINT back inside the block; yields ``wait(seconds)``, which is true as soon as one has arrived.

    Python drops a KeyboardInterrupt that is raised inside a callback of the garbage collector: a command that goes on
    until it is interrupted would then go on for ever. Main thread only.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    handler, wakeup = signal.signal(signal.SIGINT, lambda *_: None), signal.set_wakeup_fd(writing)

    def wait(seconds: float) -> bool:
        return bool(select.select([reading], [], [], seconds)[0])

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, handler)
        os.close(reading)
        os.close(writing)
