"""The state of a drafter's training as plain tensors and numbers, without the target's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.rank_group import RankGroup, broadcast_plain

Number = int | float | bool


@dataclass(frozen=True)
class DrafterState:
    """The drafter's tensors, the optimizer's state, and their version.

    ``parameters`` by name, including the draft vocabulary's table (``d2t``). ``optimizer`` tensors by ``NAME/ENTRY``
    (``fc.weight/exp_avg``). ``numbers`` holds the optimizer's numbers under the same names, and those of its group
    (rate, decay) under ``/ENTRY``. A state from the trainer has the live tensors: copy them to keep them.
    """

    version: int
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    numbers: dict[str, Number]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors in one namespace, for a file."""
        named = {f"parameters/{name}": tensor for name, tensor in self.parameters.items()}
        return named | {f"optimizer/{name}": tensor for name, tensor in self.optimizer.items()}

    @classmethod
    def from_tensors(cls, version: int, tensors: dict[str, torch.Tensor], numbers: dict[str, Number]) -> DrafterState:
        """The inverse of :meth:`tensors`."""

        def below(folder: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(folder): x for name, x in tensors.items() if name.startswith(folder)}

        return cls(version, below("parameters/"), below("optimizer/"), numbers)


def capture_optimizer(
    optimizer: Optimizer, named: dict[str, torch.nn.Parameter]
) -> tuple[dict[str, torch.Tensor], dict[str, Number]]:
    """The tensors and numbers of an optimizer with one group.

    Raises:
        ConfigError: it has other state, which cannot be saved.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Number] = {}
    for name, parameter in named.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{entry}"] = value
            elif isinstance(value, (bool, int, float)):
                numbers[f"{name}/{entry}"] = value
            else:
                kind = type(value).__name__
                raise ConfigError(f"drafter.optimizer keeps {entry!r} as {kind}; allowed: tensors and numbers")
    for entry, value in optimizer.param_groups[0].items():
        if isinstance(value, (bool, int, float)):
            numbers[f"/{entry}"] = value
    return tensors, numbers


def restore_optimizer(optimizer: Optimizer, named: dict[str, torch.nn.Parameter], state: DrafterState) -> None:
    """Load a captured state into an optimizer of the same class over parameters of the same names."""
    slots: dict[int, dict[str, torch.Tensor | Number]] = {}
    index = {name: i for i, name in enumerate(named)}
    own: dict[str, torch.Tensor | Number] = {**state.optimizer, **state.numbers}
    group = optimizer.state_dict()["param_groups"][0]
    for key, value in own.items():
        name, _, entry = key.rpartition("/")
        if name:
            slots.setdefault(index[name], {})[entry] = value.clone() if isinstance(value, torch.Tensor) else value
        else:
            group[entry] = value
    optimizer.load_state_dict({"state": slots, "param_groups": [group]})


def broadcast_state(state: DrafterState, source: int, device: torch.device, group: RankGroup) -> DrafterState:
    """Copy global rank ``source``'s state to every rank of ``group``; a rank may have missed any number of sessions.

    All ranks receive copies, the source too, so that an abandoned collective never writes to live tensors.

    Raises:
        GroupFailed: a member is gone, or the group was abandoned.
        RunError: a rank's drafter has other parameters.
    """
    mine = group.rank == source
    own = state.tensors()
    header: dict[str, Any] = {
        "version": state.version,
        "numbers": state.numbers,
        "tensors": {name: (list(x.shape), str(x.dtype)) for name, x in own.items()},
    }
    header = broadcast_plain(group, header, dict[str, Any], source, device)
    parameters = {name.removeprefix("parameters/") for name in header["tensors"] if name.startswith("parameters/")}
    if parameters != set(state.parameters):
        differing = sorted(parameters.symmetric_difference(state.parameters))
        raise RunError(f"drafters differ between ranks: only some have {', '.join(differing[:5])}")
    received: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in header["tensors"].items():
        if mine:
            tensor = own[name].detach().to(device, copy=True).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        group.broadcast([tensor], source)
        received[name] = tensor
    return DrafterState.from_tensors(header["version"], received, header["numbers"])
