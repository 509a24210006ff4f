"""The launchers of nodes, which agree through files on who takes part, with launchers that are killed or stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_tlt.bench.fault_parts.trial import Part, check, wait_until
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.membership import LaunchMember, LaunchTimes, Membership, RoundChoice

_TIMES = LaunchTimes(beat_s=0.05, poll_s=0.01, silent_s=0.6)
_WAIT_S = 3.0
_LIMIT_S = 30.0


def _everybody(came: Sequence[LaunchMember]) -> RoundChoice:
    return came, f"{len(came)} nodes, by {os.getpid()}"


def _launcher(folder: Path, index: int, nodes: int, rounds: int) -> None:
    """Takes part in each round after the other, when ``begin-N`` is there; reports what it read."""
    own = Membership(folder / "launch", LaunchMember(index, f"10.0.0.{index}", 8), nodes, _WAIT_S, times=_TIMES)
    for number in range(rounds):
        wait_until((folder / f"begin-{number}").exists, _LIMIT_S, "the next round")
        found = own.gather(number, _everybody)
        assert found is not None
        said = {"members": [one.index for one in found.members], "config": found.config}
        atomic_write_text(folder / f"found-{number}-{index}.json", json.dumps(said), durable=False)
    own.end(launch=False)


def _trial(fault: str, rng: random.Random, folder: Path) -> None:
    nodes, victim_at = rng.randint(2, 5), rng.uniform(0.0, 0.3)
    victim, pids = rng.randrange(nodes), []
    for index in range(nodes):
        pid = os.fork()
        if pid == 0:
            try:
                _launcher(folder, index, nodes, 2)
            finally:
                os._exit(0)
        pids.append(pid)
    try:
        _drive(fault, rng, folder, pids, victim, victim_at)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _drive(fault: str, rng: random.Random, folder: Path, pids: Sequence[int], victim: int, victim_at: float) -> None:
    others = [index for index in range(len(pids)) if index != victim]
    in_round = rng.randrange(2)
    for number in range(2):
        (folder / f"begin-{number}").touch()
        if number == in_round:
            time.sleep(victim_at)
            os.kill(pids[victim], signal.SIGKILL if fault == "launcher: SIGKILL" else signal.SIGSTOP)
            if fault == "launcher: SIGSTOP":
                time.sleep(rng.uniform(0.0, 2.0))
                os.kill(pids[victim], signal.SIGCONT)
        alive = others if fault == "launcher: SIGKILL" and number >= in_round else range(len(pids))
        files = [folder / f"found-{number}-{index}.json" for index in alive]
        wait_until(partial(_all_there, files), _LIMIT_S, f"the end of round {number}")
        found = [file.read_text() for file in files]
        check(len(set(found)) == 1, f"launchers read different rounds: {found}")
        members = json.loads(found[0])["members"]
        check(set(others) <= set(members), f"round {number} is without a living node: {members}")
        if fault == "launcher: SIGKILL" and number > in_round:
            check(victim not in members, f"a node that is lost has a part: {members}")


def _all_there(files: Sequence[Path]) -> bool:
    return all(file.exists() for file in files)


def launchers_part() -> Part:
    """The agreement of launchers with the faults that it is to survive."""
    return {fault: partial(_trial, fault) for fault in ("launcher: SIGKILL", "launcher: SIGSTOP")}
