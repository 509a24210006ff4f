"""Starts torchrun for a launch, from nothing or with the ranks' libraries imported already."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from megatron_tlt.config.schema import LauncherConfig
from megatron_tlt.platform.nodes import Nodes
from megatron_tlt.platform.preload import PreloadedTorchrun, Start
from megatron_tlt.platform.processes import end_with_parent, launch_environment, torchrun_arguments, torchrun_command


class Torchruns:
    """The torchruns of a launch, one after another; where there is a ``preload``, it can keep the next one ready.

    Args:
        module: what the ranks run.
        stderr: of torchrun and the ranks; None is this process's.
        preload: module that imports what ranks need, for ranks that are forks (``megatron_tlt.platform.preload``).
    """

    def __init__(self, module: str, stderr: IO[bytes] | None, preload: str | None = None) -> None:
        self._module, self._stderr, self._preload = module, stderr, preload
        self._reserve: PreloadedTorchrun | None = None

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
        everything = launch_environment(launcher.threads_per_process, nodes) | dict(environment)
        if self._preload is None:
            return subprocess.Popen(
                torchrun_command(self._module, args, launcher.nproc_per_node, **meeting),
                env=everything,
                stderr=self._stderr,
                # Ctrl-C in a terminal reaches a whole group; the workers must receive it once, from the launcher
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.prepare(launcher)
        reserve, self._reserve = self._reserve, None
        assert reserve is not None
        arguments = torchrun_arguments(self._module, args, launcher.nproc_per_node, **meeting)
        return reserve.start(Start(arguments, everything, launcher.nproc_per_node))

    def prepare(self, launcher: LauncherConfig) -> None:
        """Has a torchrun with a ``preload`` begin its imports for the next start, unless one is there."""
        if self._preload is None:
            return
        environment = launch_environment(launcher.threads_per_process) | {"PYTHONUNBUFFERED": "1"}
        if self._reserve is not None and not self._reserve.serves(environment):
            self.close()
        if self._reserve is None:
            self._reserve = PreloadedTorchrun(self._preload, environment, self._stderr)

    def close(self) -> None:
        """Ends the one that is kept ready."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
