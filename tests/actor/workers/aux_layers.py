"""Scores samples under several layouts in the same processes and writes each rank's hidden states."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.device import barrier, initialize_distributed, rank, world_size
from tests.actor.workers.layouts import CP2, EP2, PP2, TEMPERATURE, TP2SP, VP2, batch, model_of, samples
from tests.helpers.samples import batch_of

# isort: split
from megatron.core import parallel_state

from megatron_tlt.actor import hidden_states, megatron_aux_layers
from megatron_tlt.platform.host_copies import HostCopies

TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "one-padded": {}},
    2: {
        "dp2": {},
        "tp2": TP2,
        "tp2sp": TP2SP,
        "tp2sp-padded": TP2SP,
        "pp2": PP2,
        "pp2vp2": PP2 | VP2,
        "pp2vp2-padded": PP2 | VP2,
        "cp2": CP2,
        "cp2-padded": CP2,
        "moe-ep2": EP2,
    },
    4: {"tp2pp2": TP2SP | PP2, "pp2cp2-padded": PP2 | CP2, "tp2vp2": TP2 | PP2 | VP2, "moe-ep2pp2": EP2 | PP2},
}
# All samples in several micro-batches; one alone, for which some ranks or rounds of a pipeline have nothing.
SAMPLES = {"all": slice(None), "alone": slice(1, 2)}


def aux_layers_of(name: str) -> dict[str, tuple[int, ...]]:
    """Every layer's input and the last one's output, and behind them the final norm's; that one alone."""
    return {"layers": (0, 1, 2) if name.startswith("moe") else (0, 1, 2, 3, 4), "final": ()}


def policy_of(folder: Path, name: str, megatron: dict[str, Any]) -> Policy:
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    actor = ActorConfig(
        transformer_impl="local",
        megatron=megatron,
        packing=not name.endswith("-padded"),
        max_tokens_per_micro_batch=40,
    )
    return Policy(model_of(folder, name), actor, seed=0)


class LateCopies(HostCopies):
    """Like a device's stream at its slowest: a copy is NaN until it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        host = torch.full(tensor.shape, float("nan"), dtype=dtype)
        self._late.append((host, super().copy(tensor, dtype)))
        return host

    def wait(self) -> None:
        for host, arrived in self._late:
            host.copy_(arrived)


def main(folder: str, out: str) -> None:
    initialize_distributed(120)
    for module in (megatron_aux_layers, hidden_states):
        module.HostCopies = LateCopies  # type: ignore[attr-defined]
    states, same_scores = {}, {}
    for name, megatron in LAYOUTS[world_size()].items():
        policy = policy_of(Path(folder), name, megatron)
        for which, chosen in SAMPLES.items():
            data = batch_of(samples()[chosen])
            plain = policy.log_probs(data, TEMPERATURE)
            for kind, aux_layers in aux_layers_of(name).items():
                scores, found = policy.log_probs_and_states(
                    data, TEMPERATURE, aux_layers=aux_layers, dtype=torch.float32
                )
                same_scores[f"{name}/{which}/{kind}"] = all(
                    torch.equal(a, b) for a, b in zip(scores[1:], plain[1:], strict=True)
                )
                states |= {f"{name}/{which}/{kind}/{index}": tensor for index, tensor in found.items()}
        rounded = policy.log_probs_and_states(batch(), aux_layers=())[1]
        states |= {f"{name}/all/bf16/{index}": tensor for index, tensor in rounded.items()}
        with pytest.raises(ConfigError, match=r"auxiliary layers \[9\]; allowed: 0 to"):
            policy.log_probs_and_states(batch(), aux_layers=(1, 9))
        assert not any(m._forward_hooks or m._forward_pre_hooks for c in policy.model.chunks for m in c.modules()), name
    save_file(states, Path(out, f"rank{rank()}.safetensors"))
    Path(out, f"rank{rank()}.json").write_text(json.dumps(same_scores))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
