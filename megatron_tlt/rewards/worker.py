"""The verifier process: reads JSON lines from stdin, writes JSON lines to stdout, ends when stdin ends.

A separate program instead of a fork or a multiprocessing child: the parent holds torch, process groups and engines,
which do not survive a fork and which this process should not import.
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

#: Limit of the address space; a verification that exceeds it fails with MemoryError.
_ADDRESS_SPACE_BYTES = 4 << 30

#: Seconds after the pool's own limit at which the kernel ends this process, in case the pool no longer exists.
_ORPHAN_GRACE_S = 5


def serve(load: Callable[[str], Verifier], preload: list[str], timeout_s: float) -> None:
    """Answers jobs until stdin ends.

    After loading ``preload`` it writes ``{"ready": true}``; every job ``{"problem": {...}, "response": text}`` is
    answered by a Reward's fields.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the answers
    jobs = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())  # a verifier, or a program that it starts, must not read jobs
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for name in preload:
        load(name)
    _write(answers, {"ready": True})
    for line in jobs:
        # The default action of SIGALRM ends the process even during C code.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(timeout_s) + _ORPHAN_GRACE_S)
        job = json.loads(line)
        reward = judge(load, Problem(**job["problem"]), job["response"])
        signal.alarm(0)
        _write(answers, asdict(reward))


def judge(load: Callable[[str], Verifier], problem: Problem, response: str) -> Reward:
    """The verifier's reward; if the verifier raises, a reward with ``error`` set and value 0."""
    try:
        return load(problem.verifier)(problem, response)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # math-verify's TimeoutException is not an Exception
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
