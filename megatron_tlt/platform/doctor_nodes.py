"""``tlt doctor``: the network, the shared folder, and differences between nodes.

The nodes meet over the store and port that a launch uses, so a network problem shows before the launch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from megatron_tlt.errors import TltError
from megatron_tlt.platform.doctor import Check
from megatron_tlt.platform.nodes import Nodes, busy_ports, node_name
from megatron_tlt.platform.versions import installed_versions

_MEETING_S = 120
_VISIBLE_S = 30
_SLOW_FILE_S = 1.0
_SKEW_S = (0.5, 30.0)
_BLOCK = 1 << 20
_FIREWALL = "open that port between the nodes, or choose another one with TLT_PORT; TLT_INTERFACE chooses the network"


def check_network() -> Iterator[Check]:
    """Checks this node's interfaces, and whether its host name resolves to one of them."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    up = [
        f"{name} {item.address}"
        for name, items in sorted(addresses.items())
        for item in items
        if item.family == socket.AF_INET and name in states and states[name].isup
    ]
    own = {item.address for items in addresses.values() for item in items if item.family == socket.AF_INET}
    if not any(line.startswith("lo ") for line in up):
        yield Check("network", "fail", "the loopback interface is down", "ip link set lo up")
    yield Check("network", "ok", ", ".join(up) or "none with an IPv4 address")
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Check("host name", "warn", f"{name} has no address", "add it to /etc/hosts; some libraries look it up")
        return
    if address in own or address.startswith("127."):
        yield Check("host name", "ok", f"{name} is {address}")
    else:
        advice = "correct /etc/hosts or DNS: other processes cannot connect to that address"
        yield Check("host name", "fail", f"{name} is {address}, which no interface of this node has", advice)


def check_folder(folder: Path, *, leave: bool = False) -> Iterator[Check]:
    """Writes, flushes, reads, renames and locks files in ``folder``, and measures each.

    Unless ``leave``, as where other nodes check it too, folders that it had to make are removed again.
    """
    made = [] if leave else [one for one in (folder, *folder.parents) if not one.exists()]
    own = folder / f".doctor-{node_name()}-{os.getpid()}"
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began

    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.mkdir()
        data = os.urandom(_BLOCK)
        with timed("write"), (own / "a").open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        with timed("rename"):
            (own / "a").rename(own / "b")
        with timed("read"):
            same = (own / "b").read_bytes() == data
        with timed("lock"), (own / "b").open("rb+") as locked:
            fcntl.lockf(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        advice = "a folder that this node can write to: mount it here, or use another run.dir"
        yield Check("run's folder", "fail", f"{folder}: {error.strerror}", advice)
        return
    finally:
        shutil.rmtree(own, ignore_errors=True)
        with contextlib.suppress(OSError):  # it may be in use by now
            for one in made:
                one.rmdir()
    found = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())
    if not same:
        yield Check("run's folder", "fail", f"{folder}: 1 MiB is read back with other bytes", "another file system")
    elif max(seconds.values()) > _SLOW_FILE_S:
        yield Check("run's folder", "warn", f"{found} (1 MiB)", "checkpoints will be slow: another file system")
    else:
        yield Check("run's folder", "ok", f"{found} (1 MiB)")


def check_ports(nodes: Nodes) -> Iterator[Check]:
    """On the first node, checks that the rendezvous ports are free."""
    if nodes.index:
        return
    busy = busy_ports(nodes)
    for line in busy:
        yield Check("ports", "fail", line, "another job on this node? choose other ports")
    if not busy:
        yield Check("ports", "ok", f"{nodes.port} and the next are free for the rendezvous")


class Meeting:
    """All nodes of a launch over one store, held by the first node; ``close`` waits until all nodes have finished.

    Raises:
        TltError: a node did not arrive in time.
    """

    def __init__(
        self,
        nodes: Nodes,
        about: dict[str, Any],
        timeout_s: float = _MEETING_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        import torch.distributed as dist

        self.nodes, self._clock = nodes, clock
        limit = timedelta(seconds=timeout_s)
        where = f"{nodes.host}:{nodes.port}"
        try:
            self._store = dist.TCPStore(
                nodes.host, nodes.port, is_master=nodes.index == 0, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            raise TltError(f"{where}, where the nodes meet, cannot be reached: {str(error).splitlines()[0]}") from error
        self._store.set(f"about/{nodes.index}", json.dumps(about))
        deadline = time.monotonic() + timeout_s
        self.about: list[dict[str, Any]] = []
        missing = list(range(nodes.count))
        while missing and time.monotonic() < deadline:
            missing = [index for index in missing if not self._store.check([f"about/{index}"])]
            time.sleep(0.02)
        if missing:
            raise TltError(
                f"of {nodes.count} nodes, numbers {', '.join(map(str, missing))} (from 0) did not reach "
                f"{where} within {timeout_s:g} s"
            )
        self.about = [json.loads(self._store.get(f"about/{index}")) for index in range(nodes.count)]

    def name(self, index: int) -> str:
        return str(self.about[index]["name"])

    def skew(self) -> tuple[float, float]:
        """Seconds by which this node's clock is ahead of the first node's, and the uncertainty of that."""
        if self.nodes.index == 0:
            for index in range(1, self.nodes.count):
                self._store.set(f"turn/{index}", "")
                self._store.get(f"ping/{index}")
                self._store.set(f"pong/{index}", repr(self._clock()))
            return 0.0, 0.0
        own = self.nodes.index
        self._store.get(f"turn/{own}")
        began = self._clock()
        self._store.set(f"ping/{own}", "")
        there = float(self._store.get(f"pong/{own}"))
        ended = self._clock()
        return (began + ended) / 2 - there, (ended - began) / 2

    def share(self, folder: Path) -> tuple[list[int], float]:
        """Node indices whose files are not visible in ``folder``, and the seconds until all others were visible."""
        own = folder / f".doctor-{self.nodes.job}"
        with contextlib.suppress(OSError):  # an unwritable folder is reported by its own check
            own.mkdir(parents=True, exist_ok=True)
            (own / str(self.nodes.index)).write_text("here")
        self.wait("written")
        began = time.monotonic()
        missing = list(range(self.nodes.count))
        seconds = 0.0
        while missing and time.monotonic() - began < _VISIBLE_S:
            with contextlib.suppress(OSError):
                os.listdir(own)  # makes a network file system refresh its listing
            left = [index for index in missing if not (own / str(index)).is_file()]
            if left != missing:
                seconds = time.monotonic() - began
            missing = left
            if missing:
                time.sleep(0.1)
        self.wait("seen")
        if self.nodes.index == 0:
            shutil.rmtree(own, ignore_errors=True)
        return missing, seconds

    def wait(self, what: str) -> None:
        """Waits until all nodes have reached this point."""
        self._store.set(f"{what}/{self.nodes.index}", "")
        for index in range(self.nodes.count):
            self._store.get(f"{what}/{index}")

    def close(self) -> None:
        """Closes the store; the first node holds it and closes last."""
        self._store.set(f"closed/{self.nodes.index}", "")
        if self.nodes.index == 0:
            with contextlib.suppress(RuntimeError):
                for index in range(self.nodes.count):
                    self._store.get(f"closed/{index}")


def check_between(nodes: Nodes, folder: Path) -> Iterator[Check]:
    """Checks between nodes: rendezvous, shared folder, clocks and releases."""
    about = {
        "name": node_name(),
        "address": nodes.address,
        "versions": {"python": platform.python_version(), **installed_versions()},
    }
    try:
        meeting = Meeting(nodes, about)
    except TltError as error:
        yield Check("nodes", "fail", str(error), _FIREWALL)
        return
    with contextlib.closing(meeting):
        others = ", ".join(f"{item['name']} {item['address']}" for item in meeting.about)
        yield Check("nodes", "ok", f"{nodes.count} met at {nodes.host}:{nodes.port} over {nodes.interface}: {others}")
        yield _skew(meeting)
        missing, seconds = meeting.share(folder)
        if missing:
            names = ", ".join(map(meeting.name, missing))
            found = f"{folder}: what {names} wrote is not seen here within {_VISIBLE_S} s"
            yield Check("shared folder", "fail", found, "run.dir on a file system that all nodes mount")
        else:
            yield Check("shared folder", "ok", f"all {nodes.count} nodes' files are seen within {seconds:.2f} s")
        yield _same_versions(meeting)


def _skew(meeting: Meeting) -> Check:
    skew, accuracy = meeting.skew()
    found = f"{skew:+.3f} s against {meeting.name(0)}, known to {accuracy:.3f} s"
    if abs(skew) - accuracy <= _SKEW_S[0]:
        return Check("clock", "ok", found)
    status = "fail" if abs(skew) - accuracy > _SKEW_S[1] else "warn"
    return Check("clock", status, found, "start chrony or ntpd: rows of the timeline are shifted, file times mislead")  # type: ignore[arg-type]


def _same_versions(meeting: Meeting) -> Check:
    first, own = (meeting.about[index]["versions"] for index in (0, meeting.nodes.index))
    other = [f"{name} {own[name]}, on {meeting.name(0)} {first[name]}" for name in first if own[name] != first[name]]
    if other:
        return Check("same versions", "fail", "; ".join(other), "one environment for all nodes: TLT_VENV or TLT_IMAGE")
    return Check("same versions", "ok", f"as on {meeting.name(0)}")
