"""The layout for a smaller or larger world than the config's: which pipeline and data parallelism is fastest; pure.

Tensor, context and expert parallelism and the engines' ranks stay the config's, so that a tensor-parallel group and an
engine stay in a node and rollouts keep their memory plan; pipeline and data parallelism change, as in FlexTrain. The
global batch is unchanged. A choice may leave devices idle. Times are those of ``planning.cost``, so computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf, lcm
from typing import Any

from megatron_tlt.config.layouts import Layout, ModelShape, problems
from megatron_tlt.config.strict import forms_tree
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.cost import StepTime, Workload, layer_time, step_time
from megatron_tlt.planning.engine_memory import EngineMemory, engine_memory
from megatron_tlt.planning.job import Job, Recompute
from megatron_tlt.planning.layout_search import actor_seconds
from megatron_tlt.planning.machine import Machine
from megatron_tlt.planning.memory import GB, MemoryPlan
from megatron_tlt.planning.rollout_time import ResponseLengths, decode_step_seconds

# Keeps a lower bound below the bounded time where both are sums of the same terms in another order.
_ROUNDING = 1 - 1e-6
_TIED = (
    "strict: the model's embeddings are tied, and their gradient is summed in another order at pipeline parallel 1 "
    "than at 2 or more; allowed: pipeline parallel"
)


@dataclass(frozen=True)
class ElasticChoice:
    """The layout for the devices that are left, which nodes it needs, and its step.

    Attributes:
        job: the config's job with the chosen layout; ``job.devices_per_node`` is ``per_node``.
        nodes: number of nodes used (``launcher.nnodes``).
        per_node: processes on each of them (``launcher.nproc_per_node``).
        idle: devices that are left but not used.
        seconds: of a step, by phase; computed.
        margin: bytes left on the fullest device in the fullest phase.
    """

    job: Job
    nodes: int
    per_node: int
    idle: int
    seconds: StepTime
    margin: float

    @property
    def layout(self) -> Layout:
        return self.job.actor.layout

    @property
    def used(self) -> int:
        """Number of devices that the layout uses."""
        return self.layout.world

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.seconds.total

    def nodes_of(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The indices of the nodes to use, ascending: those with the most devices, the first ones among equals.

        Args:
            devices: devices left on each node, as given to ``best_layout``.
        """
        order = sorted(range(len(devices)), key=lambda node: (-devices[node], node))
        return tuple(sorted(order[: self.nodes]))

    def overrides(self) -> dict[str, Any]:
        """The choice as keys of a launch config, ``launcher`` and ``actor``; all others stay the config's."""
        layout = self.layout
        megatron = {
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp,
            "num_layers_in_first_pipeline_stage": layout.first,
            "num_layers_in_last_pipeline_stage": layout.last,
            "account_for_embedding_in_pipeline_split": layout.counts_embedding,
            "account_for_loss_in_pipeline_split": layout.counts_loss,
        }
        return {
            "launcher": {"nnodes": self.nodes, "nproc_per_node": self.per_node},
            "actor": {"megatron": megatron},
        }


def whole_nodes(devices: int, per_node: int) -> tuple[int, ...]:
    """``devices`` devices as devices per node: full nodes, and one with the rest if they do not divide."""
    rest = devices % per_node
    return (per_node,) * (devices // per_node) + ((rest,) if rest else ())


def best_layout(
    job: Job,
    machine: Machine,
    plan: Callable[[Job], MemoryPlan],
    devices: int | Sequence[int],
    mean_response: float,
    *,
    strict: bool = False,
    logical_shards: int | None = None,
) -> ElasticChoice:
    """The fastest layout for ``devices`` that fits, with the TP, CP, EP and engines of ``job`` and its global batch.

    It needs no torch. More devices never give a slower choice, and with the config's devices it is at least as fast as
    the config's own layout, by the same cost model. Equal inputs give equal choices; of equally fast ones that with the
    fewest devices, then the fewest stages.

    Args:
        job: the launch config's job.
        machine: the kind of all devices.
        plan: computes a choice's memory, such as ``plan_memory`` with a fixed capacity per device.
        devices: devices left on each node, or a number of devices in full nodes.
        mean_response: tokens of a response on average.
        strict: only data-parallel sizes that are a power of two up to ``logical_shards``, so that gradients can be
            summed in one tree over the logical shards whatever the size; no interleaved pipeline, whose micro-batches
            depend on its stages; with tied embeddings the pipeline neither begins nor ends to be one.
        logical_shards: a power of two, at least the config's data parallelism; by default equal to that.

    Raises:
        ConfigError: no layout fits (the message says what was short), ``devices`` or ``logical_shards`` is not allowed,
            or the config places its layers by hand.
    """
    return LayoutChooser(job, machine, plan, mean_response, strict=strict, logical_shards=logical_shards).best(devices)


@dataclass(frozen=True)
class _Shape:
    """``nodes`` nodes with ``per_node`` processes each."""

    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


class LayoutChooser:
    """``best_layout`` for several numbers of devices, which share what was computed; the arguments are its own."""

    def __init__(
        self,
        job: Job,
        machine: Machine,
        plan: Callable[[Job], MemoryPlan],
        mean_response: float,
        *,
        strict: bool = False,
        logical_shards: int | None = None,
    ) -> None:
        self._machine, self._plan, self._mean = machine, plan, mean_response
        self._shards = _checked_shards(job, logical_shards) if strict else None
        self._job = replace(job, actor=replace(job.actor, logical_shards=self._shards))
        self._lengths = ResponseLengths.of(job, mean_response)
        self._work = Workload.of(job, self._lengths)
        self._actor = cache(self._actor_seconds)
        self._memory = cache(plan)
        self._rests: dict[tuple[Any, ...], StepTime] = {}
        self._steps: dict[float, list[float]] = {}

    def best(self, devices: int | Sequence[int]) -> ElasticChoice:
        """The fastest layout for ``devices`` that fits; raises ConfigError like ``best_layout``."""
        left = whole_nodes(devices, self._job.devices_per_node) if isinstance(devices, int) else tuple(devices)
        if not left or min(left) < 0 or max(left) > self._job.devices_per_node or not any(left):
            raise ConfigError(
                f"devices: found {list(left)} on {len(left)} node(s); allowed: 0 to {self._job.devices_per_node} on "
                "each, at least one in all"
            )
        choices = ((shape, layout) for shape in self._by_bound(left) for layout in self._layouts(shape))
        found: tuple[float, Job, MemoryPlan, _Shape] | None = None
        for shape, layout in choices:
            worst = found[0] if found else inf
            if self._bound(shape) >= worst:
                break
            job = self._job_of(shape, layout)
            actor = sum(self._actor(job))
            if actor + self._decoding_bound(shape) >= worst or actor + self._tail_bound(shape) >= worst:
                continue
            total = self._seconds(job).total
            if total < worst and (memory := self._memory(job)).fits:
                found = total, job, memory, shape
        if found is None:
            raise ConfigError(self._why_not(left))
        _, job, memory, shape = found
        return ElasticChoice(
            job, shape.nodes, shape.per_node, sum(left) - shape.world, self._seconds(job), memory.margin
        )

    def _shapes(self, left: tuple[int, ...]) -> Iterator[_Shape]:
        """Worlds of equal nodes, the launcher's shape; groups that fit into a node are kept inside one."""
        own = self._job.devices_per_node
        unit = lcm(self._job.actor.layout.tp, self._job.engine.tp)
        sizes = sorted({own, *range(unit, own, unit)}, reverse=True)
        seen: set[int] = set()
        # fewer nodes for the same world are never slower, unless the network is faster than the links inside a node
        all_of_them = self._machine.network > self._machine.node_link
        for per_node in sizes:
            for nodes in range(1, sum(count >= per_node for count in left) + 1):
                world = nodes * per_node
                if world not in seen and not world % self._job.engine.tp:
                    if world // self._job.engine.tp <= self._job.prompts:
                        yield _Shape(nodes, per_node)
                    if not all_of_them:
                        seen.add(world)

    def _by_bound(self, left: tuple[int, ...]) -> list[_Shape]:
        return sorted(self._shapes(left), key=lambda one: (self._bound(one), one.world, -one.per_node))

    def _layouts(self, shape: _Shape) -> Iterator[Layout]:
        """Layouts of a world, the fewest stages first; each rank of data parallelism has a response."""
        own, model = self._job.actor.layout, self._job.model
        groups, rest = divmod(shape.world, own.tp * own.cp)
        if rest:
            return
        for pp in range(1, min(groups, model.layers) + 1):
            if groups % pp or groups // pp > self._job.responses // self._job.mini_batches:
                continue
            if self._shards is not None and self._refused(pp, groups // pp):
                continue
            ways = dict.fromkeys(_divided(replace(own, world=shape.world, pp=pp), own, model.shape))
            yield from (one for one in ways if self._shards is None or one.vpp is None)

    def _refused(self, pp: int, dp: int) -> bool:
        """Whether ``strict`` refuses the sizes."""
        assert self._shards is not None
        return not forms_tree(self._shards, dp) or (self._job.model.tied and self._changes_ties(pp))

    def _changes_ties(self, pp: int) -> bool:
        return (pp == 1) != (self._job.actor.layout.pp == 1)

    def _job_of(self, shape: _Shape, layout: Layout) -> Job:
        return replace(self._job, actor=replace(self._job.actor, layout=layout), devices_per_node=shape.per_node)

    def _actor_seconds(self, job: Job) -> tuple[float, float, float]:
        return actor_seconds(job, self._machine, self._work)

    def _seconds(self, job: Job) -> StepTime:
        scored, update, offload = self._actor(job)
        return replace(self._rest(job), log_probs=scored, update=update, offload=offload)

    def _rest(self, job: Job) -> StepTime:
        """A step's seconds, of which only the parts without the actor count.

        Of the world they depend on an engine's number of responses, the links and how many processes share a core.
        Simulating an engine is the longest part of a choice, so equal ones are computed once.
        """
        one_node, in_node = job.world <= job.devices_per_node, job.engine.tp <= job.devices_per_node
        key = (-(-job.responses // job.engines), one_node, in_node, self._machine.sharing(job.world))
        if key not in self._rests:
            bare = replace(job, actor=replace(job.actor, layout=Layout(job.world)))
            self._rests[key] = step_time(bare, self._machine, self._own_memory, self._mean, None)
        return self._rests[key]

    @cached_property
    def _own_memory(self) -> MemoryPlan:
        """For the tokens of an engine's cache, which do not depend on the actor's layout."""
        job = self._job
        return self._plan(replace(job, actor=replace(job.actor, layout=Layout(job.world))))

    @cached_property
    def _engine(self) -> EngineMemory:
        return engine_memory(self._job, None)

    def _bound(self, shape: _Shape) -> float:
        """Seconds that no layout of the world stays below."""
        return self._decoding_bound(shape) + self._actor_work / shape.world

    def _decoding_bound(self, shape: _Shape) -> float:
        """Seconds of an engine that always decodes its largest batch, at the shortest context: a token's fewest."""
        count = -(-self._job.responses // (shape.world // self._job.engine.tp))
        most = self._most(count)
        return count * self._lengths.mean * self._decoding(shape)[most - 1] / most * _ROUNDING

    def _tail_bound(self, shape: _Shape) -> float:
        """As above, for at least as many engine steps as the longest response has tokens.

        A line below the seconds of a step over its batch, summed over steps: the number of steps times its height at
        an empty batch, and all tokens times its slope.
        """
        count = -(-self._job.responses // (shape.world // self._job.engine.tp))
        steps = self._decoding(shape)[: self._most(count)]
        slope = (steps[-1] - steps[0]) / max(1, len(steps) - 1)
        height = min(seconds - slope * batch for batch, seconds in enumerate(steps, start=1))
        longest = self._lengths.quantiles(count)[-1]
        return (longest * height + count * self._lengths.mean * slope) * _ROUNDING

    def _most(self, count: int) -> int:
        """The largest batch of an engine with ``count`` responses."""
        admitted = int(self._own_memory.cache_tokens / (self._job.prompt_tokens + self._lengths.mean))
        return max(1, min(self._job.engine.max_sequences, admitted, count))

    def _decoding(self, shape: _Shape) -> list[float]:
        """Seconds of an engine's step by its batch, from 1, at the shortest context."""
        sharing = self._machine.sharing(shape.world)
        if sharing not in self._steps:
            job = self._job_of(shape, Layout(shape.world))
            self._steps[sharing] = [
                decode_step_seconds(job, self._machine, self._engine, batch, job.prompt_tokens, False)
                for batch in range(1, self._most(job.responses) + 1)
            ]
        return self._steps[sharing]

    @cached_property
    def _actor_work(self) -> float:
        """Device seconds of a step's products in the layers, at twice the tokens of a micro-batch; 0 on processors."""
        if self._machine.is_cpu:
            return 0.0
        actor = replace(self._job.actor, recompute=Recompute())
        job = replace(self._job, actor=actor)
        tokens = 2 * max(actor.max_tokens, self._work.tokens)
        one = layer_time(job, self._machine, tokens, self._work.attended)
        passes = (3 if job.reference else 2) * one.forward + one.backward
        work = self._work.sequences * self._work.tokens * actor.layout.tp * actor.layout.cp
        return work * job.model.layers * passes / tokens * _ROUNDING

    def _why_not(self, left: tuple[int, ...]) -> str:
        job, own = self._job, self._job.actor.layout
        fixed = f"TP{own.tp}, CP{own.cp}, EP{own.ep} and engines of TP{job.engine.tp}"
        lines = [f"{sum(left)} device(s) on {len(left)} node(s): no layout with {fixed} fits"]
        tried = [self._job_of(shape, layout) for shape in self._shapes(left) for layout in self._layouts(shape)]
        if tried:
            nearest = max((self._memory(one) for one in tried), key=lambda memory: memory.margin)
            short = nearest.problems() or [f"margin {nearest.margin / GB:.1f} GB, below the reserve"]
            lines += [f"memory, nearest of {len(tried)} layouts: {line}" for line in short]
            return "\n".join(lines)
        lines.append(
            f"allowed: a pipeline of at most {job.model.layers} stages, at least one of {job.prompts} prompts for each "
            f"engine and one of {job.responses // job.mini_batches} responses of a mini-batch for each data-parallel "
            "rank"
        )
        if self._shards is not None:
            lines.append(
                f"strict: allowed: data parallelism that is a power of two, at most {self._shards}, and no interleaved "
                "pipeline"
            )
            if job.model.tied:
                lines.append(f"{_TIED} {'1' if own.pp == 1 else '2 or more'}, as in the config")
        return "\n".join(lines)


def _divided(layout: Layout, own: Layout, shape: ModelShape) -> Iterator[Layout]:
    """Ways to divide the layers among the stages: as configured, interleaved or not, else uneven first and last stages.

    The uneven ones give all other stages the same number, and the first and last the rest: they also hold embedding
    and output layer.
    """
    kept = layout if layout.pp == own.pp else replace(layout, first=None, last=None)
    single = replace(layout, vpp=None, first=None, last=None)
    ways = [kept, replace(kept, vpp=None)] if layout.pp > 1 else [single]
    plain = replace(layout, first=None, last=None, vpp=None, counts_embedding=False, counts_loss=False)
    fitting = [one for one in (*ways, plain) if not problems(one, shape)]
    if not fitting and layout.pp > 1:
        middle = -(-shape.layers // layout.pp)
        while (ends := shape.layers - (layout.pp - 2) * middle) < 2:
            middle -= 1
        uneven = replace(plain, first=-(-ends // 2), last=ends // 2)
        fitting = [uneven] if not problems(uneven, shape) else []
    yield from fitting


def _checked_shards(job: Job, given: int | None) -> int:
    """The number of logical shards; raises ConfigError if it is not a power of two or the config has more ranks."""
    own = job.actor.layout.dp
    shards = own if given is None else given
    if not forms_tree(shards, own):
        raise ConfigError(
            f"logical_shards: found {shards} with data parallelism {own} in the config; allowed: a power of two, at "
            "least the config's data parallelism, which is a power of two as well"
        )
    return shards
