"""Base of the coordinator's client and service: a thread that a file descriptor wakes."""

from __future__ import annotations

import logging
import os
import threading
from types import TracebackType
from typing import Self

import zmq

from megatron_tlt.platform.processes import name_thread

logger = logging.getLogger(__name__)


class Threaded:
    """Runs ``_run`` in a thread until closed; a subclass implements ``_run``, sets itself up, and calls ``_start``.

    Args:
        name: the thread's name.
        complaint: log message with the consequence of a failure of the thread.
    """

    def __init__(self, name: str, complaint: str) -> None:
        self.failure: BaseException | None = None
        """The exception that ended the thread, if any."""
        self._complaint = complaint
        self._closing = False
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def _start(self) -> None:
        self._thread.start()

    def _abandon(self) -> None:
        """Clean up if the setup failed, so that no thread has to be ended."""
        self._closing = True
        self._context.destroy(linger=0)
        os.close(self._wake)

    def _run(self) -> None:
        """Thread body; must check ``_closing`` whenever ``_wake`` is readable."""
        raise NotImplementedError

    def _work(self) -> None:
        name_thread(self._thread.name)
        try:
            self._run()
        except Exception as error:
            logger.exception(self._complaint)
            self.failure = error
        finally:
            self._context.destroy(linger=0)

    def _wake_up(self) -> None:
        if not self._closing:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and close its sockets. May be called twice."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
