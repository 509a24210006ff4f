"""A launch that goes on with the nodes that are left: who takes part in each start, and with which layout."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

from megatron_tlt.cli.launch import LaunchStart
from megatron_tlt.cli.planned import fitting_spot, layout_chooser, load_text, machine_of, mean_response
from megatron_tlt.config.loader import RESOLVED, dump_resolved, load_resolved
from megatron_tlt.config.schema import TltConfig, visible_gpus
from megatron_tlt.config.speeds import fitting_speeds, speeds_of_part
from megatron_tlt.config.strict import logical_shards
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.models.recipe import recipe_folder
from megatron_tlt.observe.metrics import METRICS_FILE, read_metrics
from megatron_tlt.planning.devices import runs_on_gpu
from megatron_tlt.planning.elastic import ElasticChoice
from megatron_tlt.planning.job import job_of
from megatron_tlt.planning.machine import documented
from megatron_tlt.planning.scale_table import PAYS, payback_probability, payback_seconds
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.membership import (
    MEMBERSHIP,
    LaunchMember,
    LaunchRound,
    Membership,
    RoundChoice,
    RoundEnd,
    left_out_nodes,
)
from megatron_tlt.platform.nodes import Nodes
from megatron_tlt.platform.owner import Owner

_JOB = "TLT_JOB"
_FIRST_WAIT_S = 300.0  # as torchrun waits for nodes
_PORTS = 6
"""Rendezvous ports that rounds take in turn after the first; job scripts leave 8 to each job."""


class ElasticNodes:
    """Gathers the nodes before each start of a run's ranks, and gives the ranks a config for those that came.

    Args:
        config: the run's, with ``elastic.min_devices``.
        args: the worker's arguments after the config.
        finished: whether the run has done all of its steps.
    """

    def __init__(
        self, config: TltConfig, args: Sequence[str] = (), finished: Callable[[], bool] = lambda: False
    ) -> None:
        assert config.elastic is not None and config.elastic.min_devices is not None
        self._config, self._args, self._elastic, self._finished = config, args, config.elastic, finished
        launcher = config.launcher
        self._nodes = Nodes.from_environment(launcher.nnodes) if launcher.nnodes > 1 else None
        if self._nodes is not None and not os.environ.get(_JOB):
            raise ConfigError(
                f"{_JOB}: not set, and elastic.min_devices is; allowed: a name of this launch, the same on all nodes "
                "and different for each launch"
            )
        job = os.environ.get(_JOB) if self._nodes else None
        self._folder = config.run.dir / "logs" / "members" / (job or Owner.current().text)
        index, address = (self._nodes.index, self._nodes.address) if self._nodes else (0, "127.0.0.1")
        self._own = LaunchMember(index, address, _devices(config))
        self._membership: Membership | None = None
        self._stopped: Callable[[], bool] = lambda: False
        self._round: LaunchRound | None = None
        self._gave_up = False
        self._gains: dict[tuple[LaunchMember, ...], tuple[float, int]] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[ElasticNodes]:
        """Enters the launch, and marks it as ended for waiting nodes unless this node alone fails."""
        self._membership = Membership(
            self._folder,
            self._own,
            self._config.launcher.nnodes,
            self._elastic.wait_s,
            lambda: self._stopped(),
            max(self._elastic.wait_s, _FIRST_WAIT_S),
        )
        try:
            yield self
        finally:
            problem = self._round is not None and bool(self._round.problem)
            self._membership.end(launch=problem or self._gave_up or self._stopped() or self._finished())

    def next(self, stopped: Callable[[], bool], end: RoundEnd) -> LaunchStart | None:
        """Gathers the nodes; None if this node has no part in the rest of the launch, or was told to stop.

        ``end``: of the start before.

        Raises:
            RunError: too few devices are left, or no layout fits them.
        """
        assert self._membership is not None
        self._stopped = stopped
        found = self._round or self._membership.newest()
        if self._round is None and found is not None:
            if self._membership.has_ended():
                raise RunError(f"{self._folder}: this launch has ended; allowed: another {_JOB}")
            if not self._membership.wait_for_next(found, self._pays):
                return None
        while True:
            found = self._membership.gather(0 if found is None else found.number + 1, self._choose, end)
            if found is None:
                return None
            before, self._round = self._round, found
            if found.problem:
                raise RunError(found.problem)
            if (position := found.position(self._own.index)) is not None:
                return self._start(found, position, before)
            if not self._membership.wait_for_next(found, self._pays):
                return None
            end = RoundEnd()

    def give_up(self) -> None:
        """Ends the launch for all nodes, as this one does not restart."""
        self._gave_up = True

    def is_obsolete(self) -> bool:
        """Whether another node has entered the next round."""
        assert self._membership is not None and self._round is not None
        return self._membership.has_begun(self._round.number + 1)

    def _start(self, found: LaunchRound, position: int, before: LaunchRound | None) -> LaunchStart:
        path = self._config.run.dir / RESOLVED
        text = found.config
        # the run's own file stays that of the whole launch
        if self._own.index or text != dump_resolved(self._config):
            path = self._config.run.dir / "logs" / f"config.node{self._own.index}.round{found.number}.yaml"
            atomic_write_text(path, text)
        config = load_resolved(path)
        members = [member.index for member in found.members]
        earlier = range(self._config.launcher.nnodes) if before is None else [one.index for one in before.members]
        if position == 0 and members != list(earlier):
            self._say(members, config)
        nodes = None
        if self._nodes is not None:
            host = found.members[0].address
            nodes = Nodes(
                len(found.members), position, host, self._nodes.port, f"{self._nodes.job}.{found.number}",
                self._nodes.address, self._nodes.interface,
            )  # fmt: skip
        number = 1 + found.number % _PORTS
        environment = {MEMBERSHIP: str(self._folder)}
        args, again = [str(path), *self._args], found.failed_after
        return LaunchStart(args, config.launcher, nodes, number, environment, found.restarts, again)

    def _say(self, members: Sequence[int], config: TltConfig) -> None:
        devices = f"{config.launcher.world_size} of {self._config.launcher.world_size} devices"
        nodes = f"node{'s' * (len(members) > 1)} {', '.join(map(str, members))}"
        layout = job_of(config).actor.layout
        dropped = [name for name in ("spot", "stream") if getattr(self._config, name) and not getattr(config, name)]
        if self._config.integrity.replicas_every and not config.integrity.replicas_every:
            dropped.append("integrity.replicas_every")
        for name in ("rollout", "actor"):
            if getattr(self._config.speeds, name, None) and not getattr(config.speeds, name, None):
                dropped.append(f"speeds.{name}")
        without = f", without {', '.join(dropped)}, which the layout cannot have" if dropped else ""
        line = f"warning: the run goes on with {devices} ({nodes}): actor {layout}{without}"
        print(line, file=sys.stderr, flush=True)

    def _choose(self, came: Sequence[LaunchMember]) -> RoundChoice:
        """The nodes that take part, and their config; raises ConfigError if too few devices are left."""
        left_out = left_out_nodes(self._folder)
        if left_out and (kept := [member for member in came if member.index not in left_out]):
            with contextlib.suppress(ConfigError):  # the others do not suffice
                return self._choose_from(kept)
        return self._choose_from(came)

    def _choose_from(self, came: Sequence[LaunchMember]) -> RoundChoice:
        launcher, least = self._config.launcher, self._elastic.min_devices
        devices = [member.devices for member in came]
        if len(came) == launcher.nnodes and min(devices) == launcher.nproc_per_node:
            return came, dump_resolved(self._config)
        choice = self._best(devices) if sum(devices) else None
        if choice is None or choice.used < (least or 0):
            names = ", ".join(f"{member.devices} on node {member.index}" for member in came)
            raise ConfigError(
                f"elastic.min_devices: found {choice.used if choice else 0} usable devices ({names}); allowed: at "
                f"least {least}"
            )
        used = [came[at] for at in choice.nodes_of(devices)]
        return used, dump_resolved(self._fitted(choice, used))

    def _best(self, devices: Sequence[int]) -> ElasticChoice:
        config, shards = self._config, logical_shards(self._config)
        mean, strict = mean_response(None, config), shards is not None
        chooser = layout_chooser(config, machine_of(config, None), mean, strict=strict, logical_shards=shards)
        return chooser.best(devices)

    def _fitted(self, choice: ElasticChoice, used: Sequence[LaunchMember]) -> TltConfig:
        """The run's config with the choice's layout on these nodes; raises ConfigError if they cannot be combined."""
        values: dict[str, Any] = yaml.safe_load(dump_resolved(self._config))
        chosen = choice.overrides()
        values["launcher"] |= chosen["launcher"]
        for key, value in chosen["actor"]["megatron"].items():
            if value is None or value is False:
                values["actor"]["megatron"].pop(key, None)
            else:
                values["actor"]["megatron"][key] = value
        layout = choice.layout
        values["elastic"]["logical_shards"] = logical_shards(self._config)  # those of the whole launch
        if layout.dp < 2:
            values["stream"] = None
        if layout.dp * layout.cp < 2:
            values["integrity"]["replicas_every"] = 0
        if self._config.model.recipe is not None:  # its name depends on the layout that builds it
            values["model"] |= {"path": str(recipe_folder(self._config)), "recipe": None}
        spot = fitting_spot(self._config, choice.job.engines)
        if "spot" in spot:
            values["spot"] = values["spot"] | spot["spot"] | {"min_entries": None} if spot["spot"] else None
        values["speeds"] = None
        path = self._config.run.dir / "logs" / f"config.node{self._own.index}.fitted.yaml"
        found = load_text(path, yaml.safe_dump(values, sort_keys=False, width=1000), load_resolved)
        part = speeds_of_part(self._config, [member.index for member in used], choice.per_node)
        return found.model_copy(update={"speeds": fitting_speeds(found, part)})

    def _pays(self) -> bool:
        """Whether a place for this node makes up for the restart before the run ends and the next failure comes."""
        assert self._membership is not None
        found = self._membership.newest()
        if found is None or self._own.index in left_out_nodes(self._folder):
            return False
        if found.members not in self._gains:  # asked every few seconds, while it changes only with them
            try:
                self._gains[found.members] = self._gain(found.members)
            except RunError:  # of a full disk, say, which the next question may find with room
                return False
        speedup, used = self._gains[found.members]
        taken = documented()["recovery"]["snapshots_s"]["value"]
        seconds = taken if self._elastic.reconfigure_s is None else self._elastic.reconfigure_s
        lasts = payback_probability(used, documented()["failures"]["device_mtbf_hours"]["value"], seconds, speedup)
        return lasts >= PAYS and payback_seconds(seconds, speedup) < self._seconds_left()

    def _gain(self, nodes: Sequence[LaunchMember]) -> tuple[float, int]:
        """Speedup of a step if this node joins these, 1 if it cannot; and the devices that are used then."""
        members = {member.index: member for member in nodes}
        with contextlib.suppress(ConfigError):
            now = self._best([member.devices for member in members.values()])
            more = [*(members | {self._own.index: self._own}).values()]
            grown = self._best([member.devices for member in more])
            used = [more[at] for at in grown.nodes_of([member.devices for member in more])]
            self._fitted(grown, used)  # or the launch would end the ranks for a config that nobody can use
            return now.total / grown.total, grown.used
        return 1.0, sum(member.devices for member in nodes)

    def _seconds_left(self) -> float:
        """Seconds that the run still takes at the speed of its newest steps."""
        rows = [row for row in read_metrics(self._config.run.dir / METRICS_FILE) if row.get("time/total")]
        if not rows:
            return 0.0
        done, seconds = rows[-1]["step"] or 0.0, rows[-1]["time/total"] or 0.0
        return (self._config.trainer.steps - done) * seconds


def _devices(config: TltConfig) -> int:
    """The processes that this node can have: on GPUs one for each that is there, at most as the config asks for."""
    asked = config.launcher.nproc_per_node
    return min(visible_gpus(), asked) if runs_on_gpu(config) else asked
