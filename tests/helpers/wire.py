"""What passes between a run's ranks and its coordinator, read from a network interface as it goes by."""

from __future__ import annotations

import ctypes
import re
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import msgspec
import pytest

from megatron_tlt.spot.types import Directive, Report
from tests.helpers.hosts import enter_network

_ETH_P_ALL = 3
_OUTGOING = 4  # each packet of the loopback interface comes by twice
_SO_ATTACH_FILTER = 26
# a frame with the signature, and the one with the message behind it (ZMTP 3)
_MESSAGE = re.compile(rb"\x01\x20(.{32})(?:\x00(.)|\x02(.{8}))", re.DOTALL)


def _filter(port: int) -> bytes:
    """A classic BPF program that keeps IPv4 TCP packets from or to ``port``."""
    program = [
        (0x28, 0, 0, 12),
        (0x15, 0, 8, 0x0800),
        (0x30, 0, 0, 23),
        (0x15, 0, 6, socket.IPPROTO_TCP),
        (0xB1, 0, 0, 14),
        (0x48, 0, 0, 14),
        (0x15, 2, 0, port),
        (0x48, 0, 0, 16),
        (0x15, 0, 1, port),
        (0x06, 0, 0, 0xFFFF),
        (0x06, 0, 0, 0),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in program)


def _listening(namespace: str | None) -> socket.socket:
    if namespace is not None:
        enter_network(f"/var/run/netns/{namespace}")
    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))


class Wire:
    """All reports that were sent to ``port``, with their frames, and all directives from it.

    Args:
        namespace: of the network, where it is not this process's.
    """

    def __init__(self, port: int, interface: str = "lo", namespace: str | None = None) -> None:
        self.port = port
        self._twice = interface == "lo"
        self.frames: list[tuple[Report, list[bytes]]] = []
        self.directives: list[Directive] = []
        self._closing = False
        try:
            with ThreadPoolExecutor(1) as there:  # a thread has a network namespace of its own
                self._socket = there.submit(_listening, namespace).result()
        except PermissionError:
            pytest.skip("reading packets is not allowed here")
        program = ctypes.create_string_buffer(_filter(port))
        count = len(program) // 8
        self._socket.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", count, ctypes.addressof(program))
        )
        self._socket.bind((interface, 0))
        self._socket.settimeout(0.1)
        self._thread = threading.Thread(target=self._read, name="wire", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._closing:
            try:
                packet, address = self._socket.recvfrom(1 << 16)
            except TimeoutError:
                continue
            if address[2] != _OUTGOING or not self._twice:
                self._take(packet)

    def _take(self, packet: bytes) -> None:
        for found in _MESSAGE.finditer(packet):
            size = found[2][0] if found[2] is not None else int.from_bytes(found[3])
            payload = packet[found.end() : found.end() + size]
            try:
                self.frames.append((msgspec.msgpack.decode(payload, type=Report), [found[1], payload]))
            except msgspec.MsgspecError:
                try:
                    self.directives.append(msgspec.msgpack.decode(payload, type=Directive))
                except msgspec.MsgspecError:
                    continue

    def report(self, rank: int) -> Report | None:
        return next((report for report, _ in reversed(self.frames) if report.rank == rank), None)

    def session(self, members: int, first: int) -> int | None:
        """The RL step, ``first`` or later, in the middle of whose session so many ranks are, each a step into it.

        On a quick machine some rollouts are over without a session: which has one is not known before.
        """
        newest = [self.report(rank) for rank in {report.rank for report, _ in self.frames}]
        steps = [r.rl_step for r in newest if r is not None and r.place is not None and r.place.step >= 1]
        return next((step for step in sorted(set(steps)) if step >= first and steps.count(step) == members), None)

    def leader(self) -> int | None:
        """Of the newest session."""
        return next((d.order.leader for d in reversed(self.directives) if d.order is not None), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._thread.join()
        self._socket.close()
