"""Interface between the trainer and a rollout engine.

An engine is one class, named by ``rollout.engine`` (``rollout/engines.py``). It subclasses :class:`RolloutEngine`,
implements ``generate``, and lists its other features in ``capabilities``. A config that needs more is refused before
ranks start, so methods of a missing capability are never called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

from megatron_tlt.errors import RunError
from megatron_tlt.rollout.types import Request, Response
from megatron_tlt.speculation.strategy import StepRecord

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_tlt.config.schema import RolloutConfig
    from megatron_tlt.config.speculation import SpeculationConfig
    from megatron_tlt.reshard.interface import HeldWeights, Part
    from megatron_tlt.rollout.chooser import StrategyChooser
    from megatron_tlt.rollout.recorded_states import RecordedStates
    from megatron_tlt.speculation.token_drafter import TokenDrafter


class TurnSource(Protocol):
    """Requests that are not known when a rollout begins: the next turns of its responses."""

    def take(self, wait: bool) -> list[Request] | None:
        """The new requests, none of them, or None if none will come. With ``wait`` it may wait up to a second."""


OnFinished = Callable[[Response], None]
OnStep = Callable[[StepRecord], None]


@dataclass(frozen=True)
class Capabilities:
    """Optional features of an engine.

    Attributes:
        weights: it generates with the actor's weights, which each step writes into it. Without it, responses come from
            elsewhere: weights are not transferred (``reshard.method: none``), and there is no evaluation.
        speculation: it drafts as the ``speculation`` section says, and records the drafter model's inputs.
        turns: it takes requests during a rollout, so that responses can have several turns.
        aborts: it ends requests of a running rollout, so that short rounds can leave what loses (``tail``).
        routes: it records the experts of each token (``rollout.router_replay``).
        whole_episodes: its responses to tasks with an environment have all turns already.
        sleep: it frees the device's memory between rollouts, or uses none.
        tensor_parallel: several ranks can form one engine.
        vllm: it is built on vLLM and reads ``rollout.vllm``.
    """

    weights: bool = False
    speculation: bool = False
    turns: bool = False
    aborts: bool = False
    routes: bool = False
    whole_episodes: bool = False
    sleep: bool = False
    tensor_parallel: bool = False
    vllm: bool = False


class RolloutEngine(Protocol):
    """One rank of one engine, driven by the calling thread.

    A class is constructed as ``cls(model_path, rollout, speculation, seed, **rollout.engine_arguments)``:
    ``model_path`` is the folder of the policy's config and tokenizer (it may hold no weights), ``rollout`` and
    ``speculation`` are the config's sections, ``seed`` is the run's.
    """

    def __init__(self, model_path: Path, rollout: RolloutConfig, speculation: SpeculationConfig, seed: int) -> None:
        """See the class; an engine without ``engine_arguments`` may omit it."""

    capabilities: ClassVar[Capabilities] = Capabilities()
    token_drafters: Mapping[str, TokenDrafter] = MappingProxyType({})
    """Token drafters by name; they learn from the responses of all engines."""

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """CPU group of the engine's ranks; None for one rank."""
        return None

    @property
    def versions(self) -> Mapping[str, int | None]:
        """The version of each part's weights (``policy``, ``drafter``); None while they are incomplete."""
        return {}

    @abstractmethod
    def generate(
        self,
        requests: Sequence[Request],
        on_finished: OnFinished | None = None,
        on_step: OnStep | None = None,
        chooser: StrategyChooser | None = None,
        turns: TurnSource | None = None,
    ) -> list[Response]:
        """Generate one response per request, in the order of the requests.

        The same weights and requests give the same responses in any process, so a resumed run repeats its steps.
        ``on_finished`` is called with each response when it ends. ``on_step`` is called after each engine step and at
        least once per second; it raises if the run was asked to stop. ``chooser`` selects the speculation strategy.
        ``turns``, for engines with this capability, is asked before each step and while nothing runs; the responses to
        its requests go to ``on_finished`` alone.

        Raises:
            ConfigError: the engine cannot answer a request; raised before anything is generated.
            RunError: generation failed, or weights are incomplete.
        """
        ...

    def shutdown(self) -> None:
        """Release the engine's resources; it is not used afterwards."""

    # capability: sleep
    def sleep(self, level: int = 1) -> None:
        """Free the device: level 1 keeps weights on the host, 2 drops them."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Reallocate device memory: everything, or only ``weights`` or ``kv_cache``."""

    # capability: aborts
    @property
    def unfinished(self) -> Mapping[str, int]:
        """Tokens so far of each unfinished request of the running rollout, by id; in ``on_step``."""
        raise self._lacks("aborts")

    def abort(self, request_id: str) -> None:
        """End a request of the running rollout from a callback; its response has the tokens generated so far."""
        raise self._lacks("aborts")

    # capability: weights; see ``reshard.interface.WeightTarget``
    def begin_update(self, part: Part) -> None:
        """Announce an update: the engine refuses to generate with this part until it is finished."""
        raise self._lacks("weights")

    def finish_update(self, part: Part, version: int) -> None:
        """Set the version of a part whose weights are complete again."""
        raise self._lacks("weights")

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Write full tensors under their Hugging Face names; return their number."""
        raise self._lacks("weights")

    def read_weights(self) -> HeldWeights:
        """Yield each Hugging Face name, this rank's tensor (a view) and its slice of the full tensor."""
        raise self._lacks("weights")

    # capability: speculation with a drafter model
    def read_drafter_weights(self) -> HeldWeights:
        """Like ``read_weights``, under the names in the drafter's folder."""
        raise self._lacks("speculation")

    def restore_drafter(self) -> None:
        """Reload the drafter that the engine was built with, if ``sleep`` dropped it."""

    def record_into(self, recorded: RecordedStates | None) -> None:
        """Record the drafter model's inputs for each request in ``recorded`` while it ``records``; None stops it."""
        raise self._lacks("speculation")

    def _lacks(self, capability: str) -> RunError:
        return RunError(f"rollout.engine: {type(self).__name__} has no capability {capability!r}")
