"""Input of a simulation: model, cluster, batch and policy as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_tlt.config.schedule import ScheduleConfig
from megatron_tlt.config.stream import StreamConfig
from megatron_tlt.config.tail import TailConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import DeviceSpec
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.planning.simulation.acceptance import DraftShape
from megatron_tlt.planning.simulation.constants import Constants
from megatron_tlt.planning.simulation.engine import EngineModel
from megatron_tlt.planning.simulation.lengths import LengthDistribution
from megatron_tlt.planning.simulation.rollout import Limits


@dataclass(frozen=True)
class Actor:
    """Layout and batches of training; data parallelism follows from tensor, pipeline and context parallelism."""

    tensor: int = 1
    pipeline: int = 1
    interleaved: int = 1
    """Model chunks per pipeline stage."""
    context: int = 1
    mini_batches: int = 1
    max_tokens_per_micro_batch: int = 32768
    recompute: bool = True
    """Whether every layer's activations are recomputed."""
    log_prob_passes: int = 1
    """2 with a reference model."""

    @property
    def shard(self) -> int:
        """Devices that hold one copy of the weights together."""
        return self.tensor * self.pipeline * self.context

    @property
    def update_passes(self) -> float:
        """An update in forward passes."""
        return 4.0 if self.recompute else 3.0


@dataclass(frozen=True)
class Spot:
    """When idle engines may train the drafter, and on what; see the ``spot`` section of a launch config."""

    min_replicas: int = 2
    min_entries: int = 64
    min_steps: int = 0
    entries_per_step: int = 16
    """Tokens per step of each device."""
    unroll: int = 3
    """Number of successive drafts that are trained."""


@dataclass(frozen=True)
class Gate:
    """See ``speculation.gate.ElasticGate``."""

    threshold: int = 32
    patience: int = 3
    hysteresis: int = 4


ROLLPACKER = TailConfig(eta_prompts=1.25, eta_responses=1.25)
"""RollPacker's factors (2509.21009), for configs without a ``tail`` section."""


@dataclass(frozen=True)
class Scenario:
    """A cluster of ``devices`` equal devices, ``per_node`` in each node, ``engine_devices`` per engine."""

    model: ModelSize
    device: DeviceSpec
    constants: Constants
    lengths: LengthDistribution
    devices: int
    per_node: int
    engine_devices: int
    prompts: int
    group: int
    """Responses per prompt."""
    prompt_tokens: float
    max_response_tokens: int
    memory_fraction: float
    """Fraction of a device's memory that its engine may use."""
    max_seqs: int
    arms: tuple[DraftShape, ...]
    """Strategies of adaptive speculation, except off; static speculation uses the first."""
    actor: Actor = Actor()
    gate: Gate = Gate()
    spot: Spot = Spot()
    tail: TailConfig = ROLLPACKER
    schedule: ScheduleConfig | None = None
    """Settings of the kind that it names; the other has its defaults."""
    stream_part: float = StreamConfig().part
    num_aux_layers: int = 0
    """Number of hidden states that an EAGLE-3 head reads; 0 for an EAGLE head."""
    drafted: int | None = None
    """Tokens that an EAGLE-3 head can draft; None for all."""
    kv_tokens: float | None = None
    """Tokens of an engine's KV cache; None: what fits beside the weights."""
    explore_cost: float = 0.01
    """Fraction of the time that the tuner may spend on exploration; default as in ``speculation.tuner_beg_mab``."""

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)

    @property
    def engines(self) -> int:
        return self.devices // self.engine_devices

    @property
    def data_parallel(self) -> int:
        return self.devices // self.actor.shard

    def engine(self) -> EngineModel:
        head = self.model.draft_head(self.num_aux_layers, self.drafted) if self.num_aux_layers else None
        return EngineModel(self.model, self.device, self.engine_devices, self.constants, head)

    def limits(self) -> Limits:
        room = self.engine().kv_tokens(self.memory_fraction) if self.kv_tokens is None else self.kv_tokens
        return Limits(self.max_seqs, room)

    def on(self, nodes: int) -> Scenario:
        """The same step on another number of nodes."""
        return replace(self, devices=nodes * self.per_node)

    def check(self) -> None:
        """Raises ConfigError, one line per reason, if the scenario cannot be simulated."""
        shard, problems = self.actor.shard, []
        if self.devices < 1 or self.devices % self.engine_devices:
            problems.append(
                f"rollout.tensor_parallel_size: found {self.engine_devices}; allowed: a divisor of {self.devices} "
                "devices"
            )
        if self.devices % shard:
            problems.append(
                f"actor.megatron: tensor x pipeline x context is {shard}; allowed: a divisor of {self.devices} devices"
            )
        room, longest = self.limits().kv_tokens, self.prompt_tokens + self.max_response_tokens
        if 0.99 * room < longest:
            weights = self.model.parameters * 2 / self.engine_devices / 1e9
            problems.append(
                f"rollout.max_response_tokens: found {self.max_response_tokens}, with its prompt {longest:.0f}; "
                f"allowed: at most an engine's KV cache, {max(0.0, 0.99 * room):.0f} tokens beside {weights:.1f} GB "
                f"of weights per device of {self.device.name} (rollout.tensor_parallel_size, "
                "rollout.vllm.gpu_memory_utilization)"
            )
        if problems:
            raise ConfigError("\n".join(problems))
