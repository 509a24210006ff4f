"""The process that verifies: JSON lines in on stdin, JSON lines out on stdout; ends when stdin does.

A program of its own rather than a fork or a multiprocessing child: the parent holds torch, process groups and engines,
none of which survives a fork, and none of which this should import.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron_tlt.rewards.types import Reward, Verifier
from megatron_tlt.tasks.types import Problem

#: Beyond this much address space a verification fails with MemoryError instead of taking the machine's memory.
_ADDRESS_SPACE_BYTES = 4 << 30

#: How long after the pool's own limit the kernel ends this process, should the pool be gone.
_ORPHAN_GRACE_S = 5


def serve(load: Callable[[str], Verifier], preload: list[str], timeout_s: float) -> None:
    """Answers jobs until stdin ends.

    After loading ``preload`` it writes ``{"ready": true}``; every job ``{"problem": {...}, "response": text}`` is
    answered by a Reward's fields.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not mix with the answers
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for name in preload:
        load(name)
    _write(answers, {"ready": True})
    for line in sys.stdin.buffer:
        # The default action of SIGALRM ends the process whatever it is doing, C code included.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(timeout_s) + _ORPHAN_GRACE_S)
        job = json.loads(line)
        reward = judge(load, Problem(**job["problem"]), job["response"])
        signal.alarm(0)
        _write(answers, asdict(reward))


def judge(load: Callable[[str], Verifier], problem: Problem, response: str) -> Reward:
    """The verifier's reward; one with ``error`` set and value 0 where the verifier raises."""
    try:
        return load(problem.verifier)(problem, response)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # not only Exception: math-verify's own TimeoutException is none
        return Reward(0.0, False, error=f"{type(error).__name__}: {error}"[:500])


def _write(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def main() -> None:
    """``python -m megatron_tlt.rewards.worker --timeout S [--preload NAME ...]``."""
    from megatron_tlt.rewards.verifiers import load_verifier

    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--preload", nargs="*", default=[])
    options = parser.parse_args()
    serve(load_verifier, options.preload, options.timeout)


if __name__ == "__main__":
    main()
