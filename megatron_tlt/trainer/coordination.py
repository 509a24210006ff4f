"""The spot trainer's coordinator on rank 0, and every rank's client of it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import Counter
from contextlib import ExitStack
from types import TracebackType

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.spot import session_start
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.collectives import broadcast_data, failing_together
from megatron_tlt.platform.device import log_once, rank
from megatron_tlt.spot import CoordinatorClient, CoordinatorService, MessageSigner, new_secret

_REJECTED = ("misdirected", "replayed", "reports replayed", "reports of unknown ranks")


def coordinator_host(host: str | None, nodes: int) -> str:
    """The coordinator's address: ``host`` if given, else the loopback (one node) or the launch's master address.

    Raises:
        ConfigError: other nodes cannot reach the launch's master address.
    """
    if host is not None:
        return host
    if nodes == 1:
        return "127.0.0.1"
    name = os.environ.get("MASTER_ADDR", "")
    try:
        address = socket.gethostbyname(name) if name else ""
    except OSError:
        address = ""
    if not address or ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            f"spot.host: not given, and MASTER_ADDR, {name!r}, is {address or 'no address'} on rank 0; allowed: an "
            "address of rank 0's node that the other nodes reach"
        )
    return address


def check_coordinator_host(config: TltConfig) -> None:
    """Checks the coordinator's address; all ranks call it before they load the model.

    Raises:
        ConfigError: there is no usable address.
    """
    if config.spot is not None:
        with failing_together():
            if rank() == 0:
                coordinator_host(config.spot.host, config.launcher.nnodes)


class Coordination:
    """The coordinator and its clients; all ranks create and close it together.

    The secret that signs messages is sent over the ranks' process group only.

    Raises:
        ConfigError: there is no usable address.
        RunError: the address cannot be bound.
    """

    def __init__(self, config: TltConfig) -> None:
        assert config.spot is not None
        self._open = ExitStack()
        min_replicas, min_entries = session_start(config)
        settings = config.spot.model_copy(update={"min_replicas": min_replicas, "min_entries": min_entries})
        run_id = config.run.name
        secret, endpoint = b"", ""
        self._service: CoordinatorService | None = None
        with failing_together():
            if rank() == 0:
                secret = new_secret()
                width = config.rollout.tensor_parallel_size
                replicas = [range(first, first + width) for first in range(0, config.launcher.world_size, width)]
                host = coordinator_host(config.spot.host, config.launcher.nnodes)
                service = CoordinatorService(replicas, settings, MessageSigner(secret, run_id), host)
                endpoint = self._open.enter_context(service).endpoint
                self._service = service
        secret, endpoint = broadcast_data((secret, endpoint), tuple[bytes, str])
        client = CoordinatorClient(rank(), endpoint, settings, MessageSigner(secret, run_id))
        self.client = self._open.enter_context(client)
        log_once(f"the spot coordinator listens at {endpoint}")

    def refused(self) -> int:
        """Messages rejected by this rank so far: wrong signature, damaged, replayed, or from an unknown sender."""
        counts = Counter(self.client.counts)
        if self._service is not None:
            counts.update(self._service.counts)
        return sum(count for what, count in counts.items() if what.startswith("messages ") or what in _REJECTED)

    def __enter__(self) -> Coordination:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
