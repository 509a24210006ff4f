"""Trials of faults, each in a fork of this process, which does nothing but start them and end those that hang.

Reads lines of JSON ``[part, fault, seed, deadline_s]``; answers each with ``[result, reason, seconds]``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path

import torch

from megatron_tlt.bench.fault_parts.components import BROKEN, HUNG, NOT_POSSIBLE, PASSED, parts
from megatron_tlt.bench.fault_parts.trial import Broken, NotPossible, Part
from megatron_tlt.platform.processes import stay_with_parent


def _try(trial_of: Mapping[str, Part], part: str, fault: str, seed: str, folder: Path) -> tuple[str, str]:
    try:
        trial_of[part][fault](random.Random(f"{part}/{fault}/{seed}"), folder)
    except Broken as error:
        return BROKEN, str(error)
    except NotPossible as error:
        return NOT_POSSIBLE, str(error)
    except Exception as error:
        return BROKEN, f"{type(error).__name__}: {error}"
    return PASSED, ""


def _forked(trial_of: Mapping[str, Part], part: str, fault: str, seed: str, deadline_s: float, root: Path) -> list[str]:
    folder = root / "trial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setsid()
        with contextlib.suppress(BaseException), open(writing, "w", encoding="utf-8") as answer:
            json.dump(_try(trial_of, part, fault, seed, folder), answer)
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        hung = not wait([answer.fileno()], deadline_s)
        if hung:
            os.kill(pid, signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            said = "" if hung else answer.read()
            os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if hung:
        return [HUNG, f"no end within {deadline_s:g} s"]
    return json.loads(said) if said else [BROKEN, "the trial's process ended without a result"]


def main() -> None:
    stay_with_parent()
    torch.set_num_threads(1)
    root, found = Path(sys.argv[1]), parts()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what trials print must not mix with the answers
    for line in sys.stdin:
        began = time.monotonic()
        part, fault, seed, deadline_s = json.loads(line)
        print(f"== {part}: {fault}, seed {seed}", file=sys.stderr, flush=True)
        outcome = _forked(found, part, fault, seed, deadline_s, root)
        answers.write(json.dumps([*outcome, time.monotonic() - began]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
