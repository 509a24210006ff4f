"""``tlt doctor``: the links between devices and nodes, by their error counters and by messages between all pairs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.errors import RanksOverdue, RunError
from megatron_tlt.platform.doctor import Check
from megatron_tlt.platform.processes import run_processes

INFINIBAND = Path("/sys/class/infiniband")
_COUNTERS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
_PAIRS_S = 30.0
"""For the messages, once all processes have started."""
_START_S = 300.0
_PAIRS_MODULE = "megatron_tlt.platform.pairs"
_SLOW = 0.5
"""Of the median pair's bandwidth."""
_BAD_LINK = "exclude this node and report it: such links slow down or end collectives"
# NVIDIA's NVML documentation, nvmlClocksEventReasons: what lowers the clocks although there is work.
_THROTTLING = {0x8: "hardware slowdown", 0x20: "temperature", 0x40: "temperature (hardware)", 0x80: "power brake"}


def parse_link_errors(text: str) -> dict[str, int]:
    """``nvidia-smi nvlink --errorcounters`` -> the counters above 0, by ``GPU 0 link 3: Replay Errors``."""
    found: dict[str, int] = {}
    gpu = ""
    for line in text.splitlines():
        if device := re.match(r"GPU (\d+)", line):
            gpu = device[1]
        elif (counter := re.match(r"\s+Link (\d+): (.+?):\s*(\d+)\s*$", line)) and int(counter[3]):
            found[f"GPU {gpu} link {counter[1]}: {counter[2]}"] = int(counter[3])
    return found


def parse_throttling(text: str) -> dict[int, list[str]]:
    """``--query-gpu=clocks_event_reasons.active --format=csv,noheader`` -> reasons by GPU, of those that have any."""
    found: dict[int, list[str]] = {}
    for index, line in enumerate(text.splitlines()):
        mask = int(line.strip(), 16) if re.fullmatch(r"\s*0x[0-9a-fA-F]+\s*", line) else 0
        if reasons := [reason for bit, reason in _THROTTLING.items() if mask & bit]:
            found[index] = reasons
    return found


def _nvidia_smi(*arguments: str) -> str | None:
    """What it prints; None if it is not there, or refuses the question, as older drivers do."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else None


def check_links() -> Iterator[Check]:
    """Error counters of NVLink and InfiniBand, and clocks that are lowered."""
    text = _nvidia_smi("--query-gpu=clocks_event_reasons.active", "--format=csv,noheader")
    if text is None:
        yield Check("clocks", "ok", "no GPU, or a driver that does not report why clocks are lowered")
    else:
        slow = parse_throttling(text)
        for gpu, reasons in slow.items():
            advice = "check cooling and power of this node, or exclude it: the slowest GPU limits the others"
            yield Check("clocks", "warn", f"GPU {gpu} is slowed down: {', '.join(reasons)}", advice)
        if not slow:
            yield Check("clocks", "ok", "no GPU is slowed down")
    text = _nvidia_smi("nvlink", "--errorcounters")
    errors = parse_link_errors(text or "")
    for name, count in errors.items():
        yield Check("NVLink", "warn", f"{name}: {count}", _BAD_LINK)
    if not errors:
        yield Check("NVLink", "ok", "no GPU, or no NVLink" if not text else "no link has errors")
    yield from check_infiniband(INFINIBAND)


def check_infiniband(folder: Path) -> Iterator[Check]:
    """State and error counters of each port, as the kernel reports them in ``folder``."""
    ports = sorted(folder.glob("*/ports/*"))
    well = []
    for port in ports:
        name = f"{port.parents[1].name} port {port.name}"
        state = _read(port / "state").partition(":")[2].strip() or "unknown"
        errors = {counter: int(_read(port / "counters" / counter) or 0) for counter in _COUNTERS}
        bad = {counter: count for counter, count in errors.items() if count}
        if state != "ACTIVE":
            yield Check("InfiniBand", "warn", f"{name} is {state}", "connect it, or leave it out with NCCL_IB_HCA")
        elif bad:
            yield Check("InfiniBand", "warn", f"{name}: {', '.join(f'{k} {v}' for k, v in bad.items())}", _BAD_LINK)
        else:
            well.append(name)
    if well or not ports:
        yield Check("InfiniBand", "ok", f"{', '.join(well)}: active, no errors" if well else "no port")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class DevicePair:
    """A message in both directions between two local devices."""

    ranks: tuple[int, int]
    gb_per_s: float
    correct: bool


def check_pairs(processes: int, timeout_s: float = _PAIRS_S) -> Iterator[Check]:
    """Sends messages between each pair of ``processes`` local devices, with the backend of a run.

    ``timeout_s`` is for the messages. Processes that take too long to start are a warning: nothing is known of links.
    """
    if processes < 2:
        yield Check("pairs of devices", "ok", "a single process")
        return
    with tempfile.TemporaryDirectory() as folder:
        advice = "NCCL_DEBUG=INFO tlt doctor CONFIG shows why; NCCL_P2P_DISABLE=1 avoids direct access between GPUs"
        try:
            arguments, limit_s = [folder, str(timeout_s)], _START_S + timeout_s
            run_processes("messages between devices", _PAIRS_MODULE, arguments, processes, limit_s)
            pairs = [DevicePair(tuple(row[0]), *row[1:]) for row in json.loads(Path(folder, "pairs.json").read_text())]
        except RunError as error:
            print(error, file=sys.stderr)
            began = Path(folder, "started")
            if isinstance(error, RanksOverdue) and not began.exists():
                slow = "a slow disk or a busy node: the links are not checked; run tlt doctor again"
                yield Check("pairs of devices", "warn", f"the processes did not start within {limit_s:g} s", slow)
                return
            begun = sorted(path.read_text(encoding="utf-8") for path in Path(folder).glob("begun-*"))
            where = f"between {', '.join(dict.fromkeys(begun))}" if begun else "before the first message"
            late = began.exists() and time.time() - began.stat().st_mtime >= timeout_s
            how = f"no answer within {timeout_s:g} s" if late else "the processes failed"
            yield Check("pairs of devices", "fail", f"{how} {where}", advice)
            return
        yield from judge_pairs(pairs)


def judge_pairs(pairs: list[DevicePair]) -> Iterator[Check]:
    """Names pairs whose messages arrive changed, and those that are much slower than the others."""
    speeds = sorted(pair.gb_per_s for pair in pairs)
    median = speeds[len(speeds) // 2]
    for pair in pairs:
        name = f"{pair.ranks[0]} and {pair.ranks[1]}"
        if not pair.correct:
            yield Check("pairs of devices", "fail", f"{name}: other bytes arrive than were sent", _BAD_LINK)
        elif pair.gb_per_s < _SLOW * median:
            found = f"{name}: {pair.gb_per_s:.2g} GB/s; the median pair has {median:.2g}"
            yield Check("pairs of devices", "warn", found, "nvidia-smi topo -m shows how they are connected")
    if all(pair.correct for pair in pairs):
        found = f"{len(pairs)} of {len(pairs)} exchange messages, {speeds[0]:.2g} to {speeds[-1]:.2g} GB/s"
        yield Check("pairs of devices", "ok", found)
