"""Hosts of a network of their own on this machine: network namespaces, joined by a switch in the first one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

NETWORK = "10.77.0"
INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000


def enter_network(path: str) -> None:
    """Takes the calling thread into the network namespace of a file; PermissionError where that is not allowed."""
    with open(path) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise PermissionError(f"{path}: {os.strerror(ctypes.get_errno())}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Hosts:
    """``names`` are their namespaces; host i has the address ``NETWORK.(i + 1)`` at ``INTERFACE``."""

    names: tuple[str, ...]

    def address(self, index: int) -> str:
        return f"{NETWORK}.{index + 1}"

    def command(self, index: int, command: Sequence[str]) -> list[str]:
        """``command`` as it is run on a host."""
        return ["ip", "netns", "exec", self.names[index], *command]

    def link(self, index: int, state: str) -> None:
        """Plugs the cable between a host other than the first and the switch: ``up`` or ``down``."""
        _ip("-n", self.names[0], "link", "set", f"port{index}", state)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """``count`` hosts; skips the test where the machine does not allow namespaces."""
    made = Hosts(tuple(f"tlt{os.getpid()}-{index}" for index in range(count)))
    try:
        try:
            for index, name in enumerate(made.names):
                _ip("netns", "add", name)
                if index == 0:
                    _ip("-n", name, "link", "add", INTERFACE, "type", "bridge")
                else:
                    _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", f"port{index}")
                    _ip("-n", name, "link", "set", f"port{index}", "netns", made.names[0])
                    _ip("-n", made.names[0], "link", "set", f"port{index}", "master", INTERFACE, "up")
                _ip("-n", name, "addr", "add", f"{made.address(index)}/24", "dev", INTERFACE)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", INTERFACE, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            pytest.skip(f"network namespaces with a bridge are not allowed here: {said}")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
