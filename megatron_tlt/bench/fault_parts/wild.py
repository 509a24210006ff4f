"""A verifier that does what its response says; in the verifiers' processes only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zlib

from megatron_tlt.rewards.types import Reward
from megatron_tlt.rewards.verifiers import load_verifier
from megatron_tlt.tasks.types import Problem

PATH = f"{__name__}.score"


def score(problem: Problem, response: str) -> float:
    """1 for a response that asks for nothing."""
    if response == "loop":
        while True:
            pass
    if response == "sleep":
        time.sleep(3600)
    if response == "memory":
        held = []
        while True:
            held.append(bytearray(256 << 20))
    if response == "exit":
        os._exit(0)
    if response == "raise":
        raise ValueError("wild")
    if response == "recurse":
        return score(problem, response)
    if response == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "noise":
        for stream in (sys.stdout, sys.stderr):
            print("noise", file=stream, flush=True)
        os.write(1, b'{"value": 99.0, "correct": true}\n')
        return 0.0
    if response == "close":
        for descriptor in range(3):
            os.close(descriptor)
        return 0.0
    if response == "read":
        subprocess.run(["head", "-c", "1"])
        sys.stdin.read()
        return 0.0
    if response == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
        return 0.0
    if response == "not a number":
        return float("nan")
    if response == "ignore signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
    return 1.0


REQUESTS = (
    "loop",
    "sleep",
    "memory",
    "exit",
    "raise",
    "recurse",
    "signal",
    "noise",
    "close",
    "read",
    "child",
    "not a number",
    "ignore signals",
)
"""What a response may ask for."""

_RARELY = 48
_QUICK = ("exit", "raise", "recurse", "signal", "noise", "close", "read", "not a number")


def score_or_fail(problem: Problem, response: str) -> Reward:
    """The reward by the tasks' own verifier; for one response in 48, by its text, one of the quick failures."""
    number = zlib.crc32(response.encode())
    if number % _RARELY == 0:
        return Reward(score(problem, _QUICK[number // _RARELY % len(_QUICK)]), False)
    return load_verifier("reasoning_gym")(problem, response)
