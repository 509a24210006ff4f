"""Weight decay: matrices shrink by the schedule's, norms and biases do not, whatever the class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_tlt.actor import whole_tensor_state
from megatron_tlt.actor.megatron_optimizer import ElementWiseDistributedOptimizer
from megatron_tlt.actor.whole_tensors import TensorPart, WholeTensorOptimizer
from megatron_tlt.optim.choice import OptimizerChoice, TensorOptimizerChoice, choose_optimizer

OWN = "tests.helpers.coupled_optimizer.DecaysVectors"


def steps(path: str, arguments: dict[str, float], decay: float) -> dict[str, torch.Tensor]:
    """A matrix and a vector after three steps."""
    choice = choose_optimizer(path, arguments, decay, sharding="tensor")
    assert isinstance(choice, TensorOptimizerChoice)
    part = TensorPart(choice, {"m": (4, 3), "v": (3,)}, lr=0.1, min_lr=0.0, weight_decay=decay)
    generator = torch.Generator().manual_seed(0)
    masters = {
        name: torch.nn.Parameter(1 + torch.rand(shape, generator=generator)) for name, shape in part.shapes.items()
    }
    part.own(masters)
    for _ in range(3):
        for master in masters.values():
            master.grad = torch.rand(master.shape, generator=generator)
        part.step(None)
    return {name: master.detach().clone() for name, master in masters.items()}


@pytest.mark.parametrize("path", [OWN, "torch.optim.AdamW", "torch.optim.Adafactor", "pytorch_optimizer.SOAP"])
def test_vectors_do_not_decay(path: str) -> None:
    without, decayed = steps(path, {}, 0.0), steps(path, {}, 0.5)
    assert torch.equal(without["v"], decayed["v"])
    assert (decayed["m"] < without["m"]).all()


def test_vectors_decay_by_an_argument_of_the_class() -> None:
    without, decayed = steps(OWN, {}, 0.0), steps(OWN, {"adam_weight_decay": 0.5}, 0.0)
    assert torch.equal(without["m"], decayed["m"]) and (decayed["v"] < without["v"]).all()


@pytest.mark.parametrize(("arguments", "decay_of_vectors"), [({}, 0.0), ({"adam_weight_decay": 0.3}, 0.3)])
def test_a_resumed_class_has_the_decay_of_the_config(arguments: dict[str, float], decay_of_vectors: float) -> None:
    choice = choose_optimizer(OWN, arguments, 0.5, sharding="tensor")
    assert isinstance(choice, TensorOptimizerChoice)
    part = TensorPart(choice, {"m": (4, 3), "v": (3,)}, lr=0.1, min_lr=0.0, weight_decay=0.5)
    part.own({name: torch.nn.Parameter(torch.ones(shape)) for name, shape in part.shapes.items()})
    assert part.optimizer is not None
    saved: dict[str, Any] = {
        "class": OWN,
        "tensors": {n: {"param": {"dtype": "float32", "shape": list(s)}} for n, s in part.shapes.items()},
        # of a class that was built with the decay of matrices
        "options": {group: {"adam_weight_decay": 0.5, "steps": 7} for group in ("several dimensions", "vectors")},
        "further": {},
    }
    optimizer = cast(WholeTensorOptimizer, SimpleNamespace(parts=[part], write_back=lambda: None))
    loaded = {f"optimizer.whole.{name}.param": torch.full(shape, 2.0) for name, shape in part.shapes.items()}
    whole_tensor_state.restore(optimizer, [saved], loaded)
    for group in part.optimizer.param_groups:
        assert (group["adam_weight_decay"], group["steps"]) == (decay_of_vectors, 7)
    assert torch.equal(part.masters["v"], torch.full((3,), 2.0))


def test_a_resumed_class_of_slices_has_the_decay_of_the_config() -> None:
    choice = choose_optimizer("tests.helpers.coupled_optimizer.SignDecaysVectors", {}, sharding="element")
    assert isinstance(choice, OptimizerChoice)
    which = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    built = choice.build([{"params": [torch.nn.Parameter(torch.ones(3))], **which}], 0.1)
    optimizer = object.__new__(ElementWiseDistributedOptimizer)
    optimizer.optimizer, optimizer.grad_scaler = built, None
    # of a class that was built with the decay of matrices
    saved = {**which, "lr": 0.3, "weight_decay": 0.5, "adam_weight_decay": 0.5, "steps": 7}
    optimizer.load_state_dict({"optimizer": {"param_groups": [saved], "numbers": None}})
    (group,) = built.param_groups
    assert (group["weight_decay"], group["adam_weight_decay"], group["lr"], group["steps"]) == (0.0, 0.0, 0.3, 7)
