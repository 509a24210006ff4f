"""Starts torchrun for a launch, from nothing or with the ranks' libraries imported already."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from megatron_tlt.config.schema import LauncherConfig
from megatron_tlt.platform.nodes import Nodes
from megatron_tlt.platform.preload import PreloadedTorchrun, Start
from megatron_tlt.platform.processes import (
    launch_environment,
    numa_binding,
    start_torchrun,
    torchrun_arguments,
    torchrun_command,
)


class Torchruns:
    """The torchruns of a launch, one after another; where modules are preloaded, it can keep the next one ready.

    Args:
        module: what the ranks run.
        stderr: of torchrun and the ranks; None is this process's.
        preload: modules that import what ranks need, for ranks that are forks (``megatron_tlt.platform.preload``).
            Processes that ``TLT_NUMA`` binds as they start are not forks.
    """

    def __init__(self, module: str, stderr: IO[bytes] | None, preload: Sequence[str] = ()) -> None:
        self._module, self._stderr = module, stderr
        self._preload = () if numa_binding() else preload
        self._reserve: PreloadedTorchrun | None = None
        self._threads = 0  # of the reserve, which libraries read while they are imported
        if preload and not self._preload:
            print("note: ranks start from nothing, as TLT_NUMA binds each to its processors", file=sys.stderr)

    @property
    def preloads(self) -> bool:
        """Whether ranks are forks."""
        return bool(self._preload)

    def start(
        self,
        args: Sequence[str],
        launcher: LauncherConfig,
        nodes: Nodes | None,
        number: int,
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        """Starts the ranks of this node.

        Args:
            args: of the ranks' module.
            launcher: processes and threads.
            nodes: this node among several.
            number: of this start among all of the launch.
            environment: variables in addition to those of every launch.
        """
        meeting = {"meeting": nodes.torchrun_arguments(self._module, number)} if nodes else {}
        nproc = launcher.nproc_per_node
        everything = launch_environment(launcher.threads_per_process, nodes) | dict(environment)
        if not self._preload:
            return start_torchrun(torchrun_command(self._module, args, nproc, **meeting), everything, self._stderr)
        start = Start(torchrun_arguments(self._module, args, nproc, **meeting), everything, nproc)
        if self._reserve is not None and not (self._reserve.is_there and self._threads == launcher.threads_per_process):
            self.close()
        self.prepare(launcher)
        reserve, self._reserve = self._reserve, None
        assert reserve is not None
        return reserve.start(start)

    def prepare(self, launcher: LauncherConfig) -> None:
        """Has a torchrun begin its imports for the next start, unless one has, or nothing is preloaded.

        Raises:
            OSError: no process can be started.
        """
        if self._preload and self._reserve is None:
            self._threads = launcher.threads_per_process
            environment = launch_environment(self._threads) | {"PYTHONUNBUFFERED": "1"}
            self._reserve = PreloadedTorchrun(self._preload, environment, self._stderr)

    def close(self) -> None:
        """Ends the one that is kept ready."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
