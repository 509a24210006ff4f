"""Weight decay of whole tensors: matrices shrink by the schedule's, norms and biases do not, whatever the class."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.actor.whole_tensors import TensorPart
from megatron_tlt.optim.choice import TensorOptimizerChoice, choose_optimizer

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
