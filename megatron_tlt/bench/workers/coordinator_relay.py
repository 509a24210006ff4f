"""A bad network between clients and service of the coordinator benchmark: loses, repeats, reorders, delays."""

from __future__ import annotations

import heapq
import json
import math
import random
import sys
import time

import zmq

from megatron_tlt.platform.processes import stay_with_parent


class Relay:
    """Clients connect to ``endpoint`` as to the service; each has its own connection to the service.

    Args:
        target: the service's endpoint.
        lost, duplicated, reordered, delayed: shares of messages of either direction.
        swap_s, delay_s: maximum delay of reordered and delayed messages.
    """

    def __init__(
        self,
        target: str,
        seed: int,
        *,
        lost: float = 0.0,
        duplicated: float = 0.0,
        reordered: float = 0.0,
        delayed: float = 0.0,
        swap_s: float = 0.02,
        delay_s: float = 0.2,
    ) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._shares = lost, duplicated, reordered, delayed
        self._swap_s, self._delay_s = swap_s, delay_s
        self._context = zmq.Context()
        self._front = self._socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._lines: dict[bytes, zmq.Socket[bytes]] = {}
        self._clients: dict[zmq.Socket[bytes], bytes] = {}
        self._pending: list[tuple[float, int, zmq.Socket[bytes], list[bytes]]] = []
        self._count = 0

    def run(self) -> None:
        """Runs until the process ends."""
        while True:
            wait = self._pending[0][0] - time.monotonic() if self._pending else 1.0
            for ready, _ in self._poller.poll(math.ceil(max(0.0, wait) * 1000)):
                self._take(ready)
            while self._pending and self._pending[0][0] <= time.monotonic():
                _, _, socket, frames = heapq.heappop(self._pending)
                socket.send_multipart(frames)

    def _take(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        if socket is not self._front:
            self._pass_on(self._front, [self._clients[socket], *frames])
            return
        client, *message = frames
        if client not in self._lines:
            line = self._socket(zmq.DEALER)
            line.connect(self._target)
            self._poller.register(line, zmq.POLLIN)
            self._lines[client], self._clients[line] = line, client
        self._pass_on(self._lines[client], message)

    def _pass_on(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        lost, duplicated, reordered, delayed = (self._random.random() < share for share in self._shares)
        if lost:
            return
        late = self._random.random()
        after = late * self._delay_s if delayed else late * self._swap_s if reordered else 0.0
        for when in (after, self._random.random() * self._swap_s)[: 1 + duplicated]:
            self._count += 1
            heapq.heappush(self._pending, (time.monotonic() + when, self._count, socket, frames))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return socket


def main() -> None:
    stay_with_parent()
    relay = Relay(**json.loads(sys.argv[1]))
    print(relay.endpoint, flush=True)
    relay.run()


if __name__ == "__main__":
    main()
