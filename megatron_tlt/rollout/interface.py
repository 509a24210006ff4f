"""What the trainer asks of a rollout engine, whatever generates the responses.

An engine is one class, named by ``rollout.engine`` (``rollout/engines.py``). It subclasses :class:`RolloutEngine`,
implements ``generate``, and states in ``capabilities`` what else it does. A config that needs more is refused before
ranks start, so the methods of a capability that an engine lacks are never called.
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

OnFinished = Callable[[Response], None]
OnStep = Callable[[StepRecord], None]


@dataclass(frozen=True)
class Capabilities:
    """What an engine does besides generating.

    Attributes:
        weights: it generates with the actor's weights, which each step writes into it. Without, the responses come
            from elsewhere: nothing is moved (``reshard.method: none``), and nothing is evaluated.
        speculation: it drafts as the ``speculation`` section says, and records what a drafter model reads.
        sleep: it gives the device's memory up between rollouts, or takes none.
        tensor_parallel: several ranks can form one engine.
        vllm: it is built on vLLM and reads ``rollout.vllm``.
    """

    weights: bool = False
    speculation: bool = False
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
        """See above; a class without ``engine_arguments`` may leave it out."""

    capabilities: ClassVar[Capabilities] = Capabilities()
    token_drafters: Mapping[str, TokenDrafter] = MappingProxyType({})
    """Drafters without a model, by name; they learn from the responses of all engines."""

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """The engine's ranks, over CPU tensors; None where it is one rank."""
        return None

    @property
    def versions(self) -> Mapping[str, int | None]:
        """The version of each part's weights (``policy``, ``drafter``); None where they are not whole."""
        return {}

    @abstractmethod
    def generate(
        self,
        requests: Sequence[Request],
        on_finished: OnFinished | None = None,
        on_step: OnStep | None = None,
        chooser: StrategyChooser | None = None,
    ) -> list[Response]:
        """One response per request, in the requests' order.

        The same weights and requests give the same responses, in any process: a resumed run repeats its steps.
        ``on_finished`` is called with each response as soon as it ends, ``on_step`` after each engine step, and at
        least once per second: it raises where the run was asked to stop. ``chooser`` chooses how to speculate.

        Raises:
            ConfigError: a request that the engine cannot answer; raised before anything is generated.
            RunError: generation failed, or the weights are not whole.
        """
        ...

    def shutdown(self) -> None:
        """Releases what the engine holds; nothing is asked of it afterwards."""

    # capability: sleep
    def sleep(self, level: int = 1) -> None:
        """Frees the device: level 1 keeps weights on the host, 2 drops them."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes the device back: all of it, or only ``weights`` or ``kv_cache``."""

    # capability: weights; as ``reshard.interface.WeightTarget``
    def begin_update(self, part: Part) -> None:
        """From here on the engine refuses to generate with this part."""
        raise self._lacks("weights")

    def finish_update(self, part: Part, version: int) -> None:
        """The part is whole again, and of this version."""
        raise self._lacks("weights")

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Writes whole tensors under their Hugging Face names; returns how many."""
        raise self._lacks("weights")

    def read_weights(self) -> HeldWeights:
        """Yields each Hugging Face name, this rank's tensor (a view) and its slice of the whole one."""
        raise self._lacks("weights")

    # capability: speculation, where the drafter is a model
    def read_drafter_weights(self) -> HeldWeights:
        """As ``read_weights``, under the names in the drafter's folder."""
        raise self._lacks("speculation")

    def restore_drafter(self) -> None:
        """Loads the drafter that the engine was built with again, where ``sleep`` dropped it."""

    def record_into(self, recorded: RecordedStates | None) -> None:
        """Keeps there what the drafter model reads of each request, while it ``records``; None: nowhere."""
        raise self._lacks("speculation")

    def _lacks(self, capability: str) -> RunError:
        return RunError(f"rollout.engine: {type(self).__name__} has no capability {capability!r}")
