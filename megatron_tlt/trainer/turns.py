"""The turns of a rollout on all ranks of an engine: the first rank has the episodes, the others follow it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_tlt.platform.rank_group import WholeGroup, broadcast_plain
from megatron_tlt.rollout.engine_speculation import EngineSpeculation
from megatron_tlt.rollout.types import Request
from megatron_tlt.trainer.episodes import Episodes


class EngineTurns:
    """See ``rollout.interface.TurnSource``; the same on each rank of an engine.

    Args:
        episodes: on the engine's first rank.
        group: CPU group of the engine's ranks; None for one rank.
        speculation: learns of each new request.
        check_stop: called on every rank while nothing runs; raises to interrupt the rollout.
    """

    def __init__(
        self,
        episodes: Episodes | None,
        group: dist.ProcessGroup | None,
        speculation: EngineSpeculation | None,
        check_stop: Callable[[], None],
    ) -> None:
        self._episodes, self._group = episodes, group
        self._speculation, self._check_stop = speculation, check_stop
        self.requests: list[Request] = []
        """Those that were taken so far."""

    def take(self, wait: bool) -> list[Request] | None:
        """See ``TurnSource.take``."""
        found = self._episodes.take(wait) if self._episodes is not None else None
        if self._group is not None:
            source = dist.get_global_rank(self._group, 0)
            group = WholeGroup(self._group)
            found = broadcast_plain(group, found, list[Request] | None, source, torch.device("cpu"))
        if found:
            self.requests += found
            if self._speculation is not None:
                self._speculation.started(found)
        elif wait and found is not None:
            self._check_stop()
        return found
