"""What an optimizer couples, what it needs, which rank owns what, and its state as leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.optim.choice import OptimizerChoice, TensorOptimizerChoice, choose_actor_optimizers, choose_optimizer
from megatron_tlt.optim.flat_state import flatten, unflatten
from megatron_tlt.optim.owners import assign_owners
from tests.helpers.coupled_optimizer import CoupledRnn
from tests.optim.test_optim import ByRule

HERE = "tests.optim.test_whole_tensor"


class NormOfAll(torch.optim.Optimizer):
    """Divides every gradient by the norm of all."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        tensors = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in tensors]).norm()
        for p in tensors:
            p.sub_(self.param_groups[0]["lr"] * p.grad / norm)


class KeepsObject(ByRule):
    @staticmethod
    def rule(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["rows"] = {1, 2}
        return g / g.norm()


class NoHub(torch.optim.Optimizer):
    """As a learned optimizer without its weights."""

    def __init__(self, params: Any, lr: float = 0.1, folder: str = "some/where") -> None:
        raise OSError(f"cannot reach the hub for {folder}\nsecond line")


@pytest.mark.parametrize(
    ("path", "coupled", "matrices_only", "needs_loss"),
    [
        ("torch.optim.Muon", False, True, False),
        ("torch.optim.Adafactor", False, False, False),
        ("pytorch_optimizer.SOAP", False, False, False),
        ("megatron_tlt.bench.learned_optimizer.FactoredMlp", False, False, False),
        ("tests.helpers.coupled_optimizer.CoupledRnn", True, False, True),
        (f"{HERE}.NormOfAll", True, False, False),
    ],
)
def test_what_a_class_couples_is_found_by_running_it(
    path: str, coupled: bool, matrices_only: bool, needs_loss: bool
) -> None:
    choice = choose_optimizer(path, {})
    assert isinstance(choice, TensorOptimizerChoice)
    traits = choice.traits
    assert (traits.coupled, traits.matrices_only, traits.needs_loss) == (coupled, matrices_only, needs_loss)
    assert choice.coupled == coupled
    assert choose_optimizer(path, {}, sharding="coupled").coupled  # type: ignore[union-attr]


def test_an_element_wise_class_may_own_whole_tensors() -> None:
    assert isinstance(choose_optimizer("torch.optim.AdamW", {}), OptimizerChoice)
    choice = choose_optimizer("torch.optim.AdamW", {}, sharding="tensor")
    assert isinstance(choice, TensorOptimizerChoice) and choice.traits.state_bytes == pytest.approx(8.0, abs=0.01)


@pytest.mark.parametrize(
    ("path", "sharding", "reason"),
    [
        ("torch.optim.LBFGS", "auto", "its step needs a closure that recomputes the loss"),
        (f"{HERE}.KeepsObject", "auto", "it keeps 'rows' (set), which no checkpoint can hold"),
        ("pytorch_optimizer.Prodigy", "coupled", "its steps change 'd_numerator' of its parameter groups"),
        (f"{HERE}.NoHub", "auto", "refuses {}: cannot reach the hub for some/where"),
        ("tests.helpers.coupled_optimizer.CoupledRnn", "tensor", "a step of .* on one tensor depends on the others"),
        ("tests.helpers.coupled_optimizer.CoupledRnn", "element", "its step needs the loss of the batch"),
    ],
)
def test_the_true_reason_is_given(path: str, sharding: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("(", r"\(").replace(")", r"\)").replace("{}", r"\{\}")):
        choose_optimizer(path, {}, sharding=sharding)


def test_a_decay_that_groups_cannot_set_is_refused() -> None:
    path = "tests.helpers.coupled_optimizer.DecayOfItsOwn"
    assert choose_optimizer(path, {})
    with pytest.raises(
        ConfigError, match=r"^actor\.optimizer\.weight_decay: found 0\.1; .* does not heed.*allowed: 0$"
    ):
        choose_optimizer(path, {}, 0.1)


def test_a_split_with_a_coupled_class_is_refused_by_its_key() -> None:
    actor = ActorConfig.model_validate(
        {
            "transformer_impl": "local",
            "optimizer": {"optimizer": "torch.optim.Muon"},
            "optimizer_split": {"lr": 0.1, "optimizer": "tests.helpers.coupled_optimizer.CoupledRnn"},
        }
    )
    with pytest.raises(ConfigError, match=r"^actor.optimizer_split.optimizer: found .*CoupledRnn, but a step"):
        choose_actor_optimizers(actor, None)


def test_the_stand_in_saves_what_concerns_all_tensors() -> None:
    from megatron_tlt.optim.whole_tensor import further_state

    found = flatten(further_state(CoupledRnn([torch.nn.Parameter(torch.zeros(2, 2))])))
    assert found["num_steps"] == 100 and {"hidden/(0)", "hidden/(1)", "loss_buffer/mean"} <= found.keys()


leaves = st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=3)
keys = st.text("abc", min_size=1, max_size=3)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=12) | st.tuples(inner, inner) | st.dictionaries(keys, inner)
)


@given(st.dictionaries(keys, trees))
def test_a_state_comes_back_from_its_leaves(state: dict[str, Any]) -> None:
    assert unflatten(flatten(state)) == state


@pytest.mark.parametrize("state", [{"a": {1: 2}}, {"a": {"b/c": 2}}, {"a": object()}, {"a": [b"x"]}, {"a/b": 1}])
def test_what_cannot_be_stored_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        flatten(state)


sizes = st.dictionaries(st.text("abcdef", min_size=1), st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1)


@settings(max_examples=200)
@given(sizes, st.integers(1, 9), st.data())
def test_every_tensor_has_an_owner_and_no_rank_much_more_than_its_share(
    shapes: dict[str, tuple[int, int]], world: int, data: st.DataObject
) -> None:
    owners = assign_owners(shapes, world)
    assert owners.keys() == shapes.keys() and set(owners.values()) <= set(range(world))
    loads = [sum(a * b for name, (a, b) in shapes.items() if owners[name] == rank) for rank in range(world)]
    longest = max(a * b for a, b in shapes.values())
    assert max(loads) <= sum(loads) / world + longest * (1 - 1 / world) + 1e-9  # Graham's bound for any list rule
    together = data.draw(st.sets(st.sampled_from(sorted(shapes))))
    coupled = assign_owners(shapes, world, together)
    assert all(coupled[name] == 0 for name in together)
