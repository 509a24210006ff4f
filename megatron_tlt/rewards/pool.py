"""Verifies responses in separate processes during decoding."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rewards import process
from megatron_tlt.rewards.limits import AdaptiveLimits
from megatron_tlt.rewards.process import WorkerDied, WorkerProcess
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rewards.verifiers import VERIFIERS, check_verifier
from megatron_tlt.tasks.types import Problem

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0

#: Additional time for a verdict after its limits, in which a hanging worker is killed and waited for.
_GRACE_S = 5.0


@dataclass(frozen=True)
class PoolCounts:
    """Counts since the pool's start; ``verified`` includes all others.

    ``timeouts`` exceeded the pool's limit and ``late`` ones an adaptive one; ``errors``: the verifier raised.
    """

    verified: int = 0
    timeouts: int = 0
    late: int = 0
    errors: int = 0
    deaths: int = 0


class RewardPool:
    """Verifies submitted responses; ``collect`` returns all their rewards. The order has no influence.

    One thread per process sends it jobs and enforces the time limit. A process that exceeds ``timeout_s`` is killed and
    replaced, and its response gets 0. ``verifiers`` names the verifiers to load (default: all); the import of their
    libraries takes seconds, once per process, and does not count towards ``timeout_s``. With ``adaptive`` limits
    (:class:`AdaptiveLimits`) a response with a late verdict is wrong, and marked. After a thread fails,
    ``submit`` and ``collect`` raise RunError.
    """

    def __init__(
        self, workers: int, timeout_s: float, verifiers: Sequence[str] | None = None, *, adaptive: bool = False
    ) -> None:
        self._verifiers = sorted(VERIFIERS) if verifiers is None else list(verifiers)
        for name in self._verifiers:
            check_verifier(name)
        self._timeout_s = timeout_s
        self._limits = AdaptiveLimits(timeout_s) if adaptive else None
        self._at_full_time = False
        self._jobs: queue.SimpleQueue[tuple[Hashable, Problem, str] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: set[Hashable] = set()
        self._done: dict[Hashable, Reward] = {}
        self._failure: RunError | None = None
        self._counts = PoolCounts()
        self._closed = False
        self._active: dict[int, WorkerProcess] = {}
        for index in range(workers):
            self._active[index] = self._start()
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"reward-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def counts(self) -> PoolCounts:
        return self._counts

    @contextmanager
    def full_time(self) -> Iterator[None]:
        """Within the context every verdict has ``timeout_s``: for evaluations, whose results are to be comparable."""
        self._at_full_time = True
        try:
            yield
        finally:
            self._at_full_time = False

    @property
    def pending(self) -> int:
        """Number of submitted responses without a reward."""
        with self._changed:
            return len(self._pending)

    def submit(self, key: Hashable, problem: Problem, response_text: str) -> None:
        """Queues one response; returns at once.

        Raises:
            ConfigError: the verifier is not loaded.
            ValueError: the key is not collected yet.
            RunError: the pool has failed.
            RuntimeError: the pool is closed.
        """
        if problem.verifier not in self._verifiers:
            raise ConfigError(
                f"problem {problem.uid}: verifier '{problem.verifier}' is not loaded in this pool; "
                f"allowed are {', '.join(self._verifiers)}"
            )
        with self._changed:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            if self._failure is not None:
                raise self._failure
            if key in self._pending or key in self._done:
                raise ValueError(f"reward key {key!r} is in use already")
            self._pending.add(key)
        self._jobs.put((key, problem, response_text))

    def collect(self) -> dict[Hashable, Reward]:
        """Waits for all submitted responses and returns the rewards that were not collected before.

        Raises:
            RunError: a worker cannot be started, a thread has failed, or no verdict arrives within ``timeout_s`` plus
                the start limit of a worker.
        """
        limit_s = self._timeout_s + process.START_LIMIT_S + _GRACE_S
        with self._changed:
            verified, last = self._counts.verified, time.monotonic()
            while self._pending and self._failure is None and not self._closed:
                self._changed.wait(_CHECK_EVERY_S)
                if self._counts.verified != verified:
                    verified, last = self._counts.verified, time.monotonic()
                elif self._pending:
                    self._check_progress(time.monotonic() - last, limit_s)
            if self._failure is not None:
                raise self._failure
            done, self._done = self._done, {}
            return done

    def close(self) -> None:
        """Ends the processes and drops unfinished work. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for _ in self._threads:
            self._jobs.put(None)
        for worker in list(self._active.values()):
            worker.end()  # do not wait for a busy worker; its thread closes it
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_progress(self, waited_s: float, limit_s: float) -> None:
        if self._failure is not None:
            return
        count = f"{len(self._pending)} response{'s' if len(self._pending) > 1 else ''}"
        if not any(thread.is_alive() for thread in self._threads):
            self._failure = RunError(f"reward pool: {count} without a verdict, and all its threads have ended")
        elif waited_s > limit_s:
            self._failure = RunError(
                f"reward pool: no verdict for {waited_s:.0f} s, allowed are {limit_s:g} s; {count} outstanding"
            )

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._verifiers, self._timeout_s)

    def _serve(self, index: int) -> None:
        try:
            self._active[index].wait_ready()
            while not self._closed and (job := self._jobs.get()) is not None:
                self._finish(job[0], self._verify(index, *job))
        except Exception as error:  # this thread ends, so collect() must not wait for it
            with self._changed:
                if not self._closed and self._failure is None:
                    self._failure = error if isinstance(error, RunError) else RunError(f"reward pool: {error!r}")
                self._changed.notify_all()
        finally:
            self._active[index].close()

    def _verify(self, index: int, key: Hashable, problem: Problem, response: str) -> Reward:
        kind: str | None = None
        with self._changed:
            limits = None if self._at_full_time else self._limits
            limit_s = self._timeout_s if limits is None else limits.limit(problem.uid)
        worker = self._active[index]
        worker.wait_ready()  # which takes longer after a restart
        began = time.monotonic()
        try:
            reward = worker.verify(problem, response, limit_s)
            kind = "errors" if reward.error is not None else None
        except TimeoutError as error:
            is_late = limit_s < self._timeout_s
            error_text = None if is_late else str(error)
            kind, reward = "late" if is_late else "timeouts", Reward(0.0, False, error=error_text, late=is_late)
        except WorkerDied as error:
            kind, reward = "deaths", Reward(0.0, False, error=f"the verifier's process died: {error}")
        seconds = time.monotonic() - began
        if reward.error is not None and not self._closed:
            logger.warning("verifier %s failed on %s: %s", problem.verifier, problem.uid, reward.error)
        if kind not in (None, "errors") and not self._closed:
            worker.kill()
            self._active[index] = self._start()
        with self._changed:
            if self._limits is not None and reward.correct:
                self._limits.judged_correct(problem.uid, seconds)
            counted = {} if kind is None else {kind: getattr(self._counts, kind) + 1}
            self._counts = replace(self._counts, verified=self._counts.verified + 1, **counted)
        return reward

    def _finish(self, key: Hashable, reward: Reward) -> None:
        with self._changed:
            self._pending.discard(key)
            self._done[key] = reward
            self._changed.notify_all()
