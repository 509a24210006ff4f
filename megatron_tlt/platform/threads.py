"""Threads that are started before they are needed: memory may be short later.

Under a limit (``ulimit -v``, a cgroup) a thread that is started late may fail, or leave the one that started it waiting
forever: Python waits for a sign of the new thread, which may end for want of memory before it gives one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from megatron_tlt.errors import RunError

_START_S = 60.0


def start_thread(body: Callable[[], None], name: str) -> threading.Thread:
    """Starts a thread that ends with its process.

    Raises:
        RunError: the system starts no further thread.
    """
    thread = threading.Thread(target=body, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise _not_started(name, error) from error
    return thread


def started_pool(count: int, name: str) -> ThreadPoolExecutor:
    """An executor whose ``count`` threads all run already.

    Raises:
        RunError: the system starts no further thread.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_run = threading.Barrier(count + 1)  # no thread takes a second task, so each task starts one
    try:
        for _ in range(count):
            pool.submit(all_run.wait)
        all_run.wait(_START_S)
    except RuntimeError as error:
        all_run.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise _not_started(name, error) from error
    return pool


def _not_started(name: str, error: RuntimeError) -> RunError:
    why = str(error) or f"not within {_START_S:.0f} s"
    return RunError(f"thread {name!r} not started: {why}; needed: more memory or threads (ulimit -v, -u, cgroup)")
