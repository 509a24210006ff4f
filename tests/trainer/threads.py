"""Ranks as threads of one process: groups over them, and a bubble for each with a real coordinator."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_tlt.config.drafter import DrafterBufferConfig, DrafterConfig
from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.drafter import DataBuffer, DrafterState, DrafterTrainer, Entry, drafter_from_target
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.subset_group import Abandoned
from megatron_tlt.spot import CoordinatorClient, CoordinatorService, MessageSigner, new_secret
from megatron_tlt.trainer.spot_checkpoints import SpotCheckpoints
from megatron_tlt.trainer.spot_trainer import SpotTrainer

LIMIT_S = 60.0
Asked = Callable[[], bool]


def never() -> bool:
    return False


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


@dataclass
class Meeting:
    """What the members of one group have brought so far."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    come: set[int] = field(default_factory=set)
    gone: bool = False
    given: dict[int, dict[int, list[torch.Tensor]]] = field(default_factory=lambda: defaultdict(dict))


class ThreadGroup:
    """A ``RankGroup`` over threads."""

    def __init__(self, ranks: Sequence[int], rank: int, meeting: Meeting, should_abandon: Asked = never) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self._meeting, self._should_abandon = meeting, should_abandon
        self._done = 0

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        given, self._done = self._meeting.given[self._done], self._done + 1
        with self._meeting.changed:
            given[self.rank] = [tensor.detach().clone() for tensor in tensors]
            self._meeting.changed.notify_all()
            while len(given) < len(self.ranks):
                if self._should_abandon():
                    raise Abandoned("given up")
                self._meeting.changed.wait(0.005)
        return given

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        given = self._exchange(tensors)
        for i, tensor in enumerate(tensors):
            tensor.copy_(torch.stack([given[rank][i] for rank in self.ranks]).sum(0))

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        given = self._exchange(tensors if self.rank == source else [])
        for tensor, found in zip(tensors, given[source], strict=True):
            tensor.copy_(found)


class Threads:
    """Ranks that wait in a bubble, each in a thread of its own once :meth:`release` says so."""

    def __init__(
        self, stack: ExitStack, folder: Path, target: Path, entries: Sequence[Sequence[Entry]], min_entries: int = 1
    ) -> None:
        self.config = SpotConfig(
            min_replicas=1,
            min_entries=min_entries,
            checkpoint_every=3,
            heartbeat_s=0.1,
            lost_after_s=20.0,
            silent_after_s=2.0,
            session_timeout_s=20.0,
            grace_s=0.3,
            preempt_timeout_s=10.0,
        )
        self._meetings: dict[str, Meeting] = {}
        self._lock = threading.Lock()
        self.batch = 4
        self.took_device: list[int] = []
        count, seal = len(entries), MessageSigner(new_secret(), "run")
        replicas = [(rank,) for rank in range(count)]
        self.service = stack.enter_context(CoordinatorService(replicas, self.config, seal, "127.0.0.1"))
        self.trainers: list[DrafterTrainer] = []
        self.buffers: list[DataBuffer] = []
        self.bubbles: list[SpotTrainer] = []
        self.clients: list[CoordinatorClient] = []
        self.timelines: list[Timeline] = []
        self.good: list[DrafterState] = []
        self._running: dict[int, threading.Thread] = {}
        for rank, own in enumerate(entries):
            drafter = DrafterConfig(kind="eagle", lr=1e-3, max_tokens_per_micro_batch=32, unroll_steps=1)
            # all have the same drafter, as in a run
            trainer = DrafterTrainer(drafter_from_target(target, "eagle", seed=1), drafter, 0)
            memory = DrafterBufferConfig(disk_bytes=0)
            buffer = DataBuffer(folder / f"data{rank}", memory, seed=rank)
            for entry in own:
                buffer.add(entry)
            checkpoints = SpotCheckpoints(folder / "spot", self.config.checkpoint_every, trainer)
            timeline = Timeline(rank)
            self.good.append(copied(trainer.state))
            bubble = SpotTrainer(
                self.config,
                trainer,
                buffer,
                checkpoints,
                timeline,
                global_batch=self.batch,
                last_good=lambda rank=rank: self.good[rank],  # type: ignore[misc]
                take_device=lambda rank=rank: self.took_device.append(rank),  # type: ignore[misc]
                form=lambda *given, rank=rank: self._form(rank, *given),  # type: ignore[misc]
            )
            client = CoordinatorClient(rank, self.service.endpoint, self.config, seal)
            self.clients.append(stack.enter_context(client))
            bubble.attach(client)
            stack.callback(bubble.close)
            self.trainers.append(trainer)
            self.buffers.append(buffer)
            self.bubbles.append(bubble)
            self.timelines.append(timeline)

    def _form(
        self, rank: int, name: str, ranks: Sequence[int], should_go: Asked, should_abandon: Asked, timeout_s: float
    ) -> ThreadGroup:
        with self._lock:
            meeting = self._meetings.setdefault(name, Meeting())
        with meeting.changed:
            meeting.come.add(rank)
            meeting.changed.notify_all()
            while len(meeting.come) < len(ranks):
                meeting.gone = meeting.gone or should_go()
                if meeting.gone:
                    raise Abandoned(f"group {name} was given up")
                meeting.changed.wait(0.005)
        return ThreadGroup(ranks, rank, meeting, should_abandon)

    def begin(self, rl_step: int = 1) -> None:
        for bubble in self.bubbles:
            bubble.begin(rl_step)

    def release(self, *ranks: int, rl_step: int = 1, is_enough: Asked = never) -> None:
        for rank in ranks:
            train = self.bubbles[rank].train_until_rollout_ends
            thread = threading.Thread(target=train, args=(rl_step, is_enough), daemon=True)
            self._running[rank] = thread
            thread.start()

    def join(self, *ranks: int) -> None:
        for rank in ranks:
            self._running[rank].join(LIMIT_S)
            assert not self._running[rank].is_alive(), f"rank {rank} still waits"


def copied(state: DrafterState) -> DrafterState:
    tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
    return DrafterState.from_tensors(state.version, tensors, dict(state.numbers))
