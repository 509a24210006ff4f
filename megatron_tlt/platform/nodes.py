"""Describes this node of a launch, from the environment set by the script that starts it (``slurm/node.sh``).

| variable | what |
|---|---|
| ``TLT_RENDEZVOUS`` | ``host:port`` on the first node, where all nodes meet; the next few ports are also used |
| ``TLT_NODE_RANK`` | this node's index; node 0 hosts the rendezvous |
| ``TLT_JOB`` | a name of this start, the same on all nodes and different for each start |
| ``TLT_NODE_NAME`` | this node's name in messages (default: its host name) |
| ``TLT_INTERFACE`` | the network interface to use (default: the one on the route to the first node) |
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_tlt.errors import ConfigError, RunError

_HOW = "slurm/train.sbatch starts one launcher per node, and slurm/node.sh shows how to do so by hand"
_JOIN_TIMEOUT_S = 300
_DISCARD_PORT = 9
_PORTS = 2


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch; ``address`` and ``interface`` are this node's on the route to ``host``."""

    count: int
    index: int
    host: str
    port: int
    job: str
    address: str
    interface: str

    @classmethod
    def from_environment(cls, count: int, environ: Mapping[str, str] = os.environ) -> Nodes:
        """Reads the environment of a launch with ``count`` nodes.

        Raises:
            ConfigError: a variable is missing or invalid.
            RunError: the first node's name has no address, or there is no route to it.
        """
        given = environ.get("TLT_RENDEZVOUS")
        if given is None:
            raise ConfigError(f"launcher.nnodes: found {count}; allowed here: 1; {_HOW}")
        host, _, port = given.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65535:
            raise ConfigError(f"TLT_RENDEZVOUS: found {given!r}; allowed: host:port, the port below 65535")
        index = environ.get("TLT_NODE_RANK", "")
        if not index.isdecimal() or int(index) >= count:
            raise ConfigError(f"TLT_NODE_RANK: found {index!r}; allowed: 0 to {count - 1} (launcher.nnodes = {count})")
        address, interface = own_address(host, environ.get("TLT_INTERFACE"))
        return cls(count, int(index), host, int(port), environ.get("TLT_JOB", "tlt"), address, interface)

    def torchrun_arguments(self, module: str, launch: int) -> list[str]:
        """torchrun's rendezvous arguments for ``module``; nodes that run another module do not meet.

        ``launch`` counts the job's earlier launches; each uses its own port, as a node may leave the earlier one late.
        """
        return [
            f"--nnodes={self.count}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.host}:{self.port + launch}",
            f"--rdzv-id={self.job}-{module}",
            f"--rdzv-conf=is_host={int(self.index == 0)},join_timeout={_JOIN_TIMEOUT_S}",
            f"--local-addr={self.address}",
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the workers: gloo and NCCL use the interface, and vLLM does not search for an address."""
        return {
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
            "VLLM_HOST_IP": self.address,
        }


def busy_ports(nodes: Nodes) -> list[str]:
    """On the first node, one line per rendezvous port that another process uses."""
    lines = []
    for port in range(nodes.port, nodes.port + _PORTS) if nodes.index == 0 else ():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                lines.append(
                    f"TLT_RENDEZVOUS: port {port} on {node_name()}: {error.strerror}; allowed: {_PORTS} free ports in "
                    "a row, by another TLT_RENDEZVOUS=host:port, or under Slurm another TLT_PORT"
                )
    return lines


def cgroup_bytes(name: str) -> int | None:
    """``memory.max`` or another figure of this job's or container's memory; None without such a limit."""
    try:
        return int(Path("/sys/fs/cgroup", name).read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max"
        return None


def node_index() -> int:
    """This node's index; 0 with a single node."""
    index = os.environ.get("TLT_NODE_RANK", "0")
    return int(index) if index.isdecimal() else 0


def node_name() -> str:
    """This node's name in messages: Slurm's node name if there is one."""
    return os.environ.get("TLT_NODE_NAME") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(host: str, interface: str | None = None) -> tuple[str, str]:
    """This machine's IPv4 address and interface: ``interface`` if given, else those on the route to ``host``.

    Raises:
        ConfigError: the interface does not exist, or has no IPv4 address.
        RunError: ``host`` has no address, or there is no route to it.
    """
    found = {
        name: [item.address for item in items if item.family == socket.AF_INET]
        for name, items in psutil.net_if_addrs().items()
    }
    if interface:
        if not found.get(interface):
            having = ", ".join(sorted(name for name, addresses in found.items() if addresses))
            raise ConfigError(f"TLT_INTERFACE: found {interface!r}; allowed: one with an IPv4 address: {having}")
        return found[interface][0], interface
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _DISCARD_PORT))  # sends nothing: only selects the route
            address = probe.getsockname()[0]
    except OSError as error:
        raise RunError(f"the first node, {host}, cannot be reached from {node_name()}: {error}") from error
    for name, addresses in found.items():
        if address in addresses:
            return address, name
    # 127.0.0.2 and similar addresses belong to lo but are not listed
    return address, "lo"
