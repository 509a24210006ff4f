"""Optimizers by import path: what is taken, what is refused and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.errors import ConfigError
from megatron_tlt.optim.choice import OptimizerChoice, TensorOptimizerChoice, choose_optimizer
from megatron_tlt.optim.element_wise import SHAPE, StateLayout, probe

Rule = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]
HERE = "tests.optim.test_optim"


class ByRule(torch.optim.Optimizer):
    """Moves each tensor by what the class's rule says."""

    rule: Rule

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * type(self).rule(p, p.grad, self.state[p])


class NormOfTensor(ByRule):
    rule = staticmethod(lambda p, g, state: g / g.norm())


class Noise(ByRule):
    rule = staticmethod(lambda p, g, state: g + torch.randn_like(g))


class Neighbours(ByRule):
    rule = staticmethod(lambda p, g, state: torch.roll(g.flatten(), 1).view_as(g))


def _keeps(name: str, value: Callable[[torch.Tensor, dict[str, Any]], Any]) -> Rule:
    def rule(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        kept = value(g, state)
        if kept is not None:
            state[name] = kept
        state["count"] = state.get("count", 0) + 1
        return g

    return rule


class KeepsNorm(ByRule):
    rule = staticmethod(_keeps("norm", lambda g, state: float(g.norm())))


class KeepsHistory(ByRule):
    rule = staticmethod(_keeps("history", lambda g, state: [g]))


class KeepsRows(ByRule):
    rule = staticmethod(_keeps("rows", lambda g, state: g.new_zeros(g.shape[0], 1)))


class KeepsDouble(ByRule):
    rule = staticmethod(_keeps("sum", lambda g, state: g.double()))


class KeepsLate(ByRule):
    rule = staticmethod(_keeps("late", lambda g, state: g if state.get("count") else None))


class FixedRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


ELEMENT_WISE: list[tuple[str, dict[str, Any], set[str], set[str]]] = [
    ("torch.optim.SGD", {}, set(), set()),
    ("torch.optim.SGD", {"momentum": 0.9, "nesterov": True}, {"momentum_buffer"}, set()),
    ("torch.optim.Adam", {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}),
    ("torch.optim.AdamW", {"betas": (0.9, 0.98)}, {"exp_avg", "exp_avg_sq"}, {"step"}),
    ("torch.optim.RAdam", {}, {"exp_avg", "exp_avg_sq"}, {"step"}),
    ("torch.optim.NAdam", {}, {"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
    ("torch.optim.Adamax", {}, {"exp_avg", "exp_inf"}, {"step"}),
    ("torch.optim.Adagrad", {"initial_accumulator_value": 0.1}, {"sum"}, {"step"}),
    ("torch.optim.Adadelta", {}, {"square_avg", "acc_delta"}, {"step"}),
    ("torch.optim.RMSprop", {"centered": True}, {"square_avg", "grad_avg"}, {"step"}),
]


@pytest.mark.parametrize(("path", "arguments", "tensors", "numbers"), ELEMENT_WISE)
def test_element_wise_classes_are_taken_with_what_they_keep(
    path: str, arguments: dict[str, Any], tensors: set[str], numbers: set[str]
) -> None:
    choice = choose_optimizer(path, arguments)
    assert isinstance(choice, OptimizerChoice)
    assert (set(choice.layout.tensors), set(choice.layout.numbers)) == (tensors, numbers)
    optimizer = choice.build([{"params": [torch.zeros(3)]}], 0.25)
    assert type(optimizer) is choice.cls
    assert {key: optimizer.defaults[key] for key in arguments} == arguments
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.25, 0.0), "the schedule sets it"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("torch.optim.LBFGS", "its step needs a closure"),
        ("torch.optim.SparseAdam", "does not support dense gradients"),
        ("torch.optim.Muon", "it does not accept a flat slice of a parameter: Muon only supports 2D parameters"),
        ("torch.optim.Adafactor", "it keeps 'row_var' (of shape (96, 1)), which is neither"),
        (f"{HERE}.NormOfTensor", "its step on a slice of a parameter differs"),
        (f"{HERE}.Noise", "its step on a slice of a parameter differs"),
        (f"{HERE}.Neighbours", "its step on a slice of a parameter differs"),
        (f"{HERE}.KeepsNorm", "it keeps 'norm', one number that differs"),
        (f"{HERE}.KeepsHistory", "it keeps 'history' (list), which is neither"),
        (f"{HERE}.KeepsRows", "it keeps 'rows' (of shape (96, 1))"),
        (f"{HERE}.KeepsDouble", "it keeps 'sum' as torch.float64"),
        (f"{HERE}.KeepsLate", "it keeps late at some steps or for some parameters only"),
    ],
)
def test_others_are_refused_with_the_reason(path: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_optimizer(path, {}, sharding="element")
    message = str(caught.value)
    assert message.startswith(f"actor.optimizer.optimizer: {path} cannot run under the distributed optimizer: ")
    assert reason in message and len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "arguments", "weight_decay", "said"),
    [
        ("no_such_package.Adam", {}, 0.0, "'no_such_package' cannot be imported"),
        ("torch.optim.RAdm", {}, 0.0, "no class 'RAdm' in torch.optim; did you mean RAdam"),
        ("torch.nn.Linear", {}, 0.0, "not a torch.optim.Optimizer class"),
        ("torch.optim.Optimizer", {}, 0.0, "not a torch.optim.Optimizer class"),
        ("torch.optim.RAdam", {"beta": 0.9}, 0.0, "optimizer_arguments.beta: torch.optim.RAdam does not take it"),
        ("torch.optim.SGD", {"lr": 0.1}, 0.0, "lr: torch.optim.SGD does not take it; allowed: dampening, different"),
        ("torch.optim.RAdam", {"betas": [2.0, 0.9]}, 0.0, "Invalid beta parameter at index 0"),
        ("torch.optim.RAdam", {"betas": 0.9}, 0.0, "torch.optim.RAdam refuses {'betas': 0.9}"),
        ("torch.optim.Rprop", {}, 0.1, "actor.optimizer.weight_decay: found 0.1; torch.optim.Rprop takes none"),
        (f"{HERE}.FixedRate", {}, 0.0, "takes no lr"),
    ],
)
def test_wrong_paths_and_arguments_are_said(
    path: str, arguments: dict[str, Any], weight_decay: float, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_optimizer(path, arguments, weight_decay)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_decay_that_groups_of_slices_cannot_set_is_not_given_to_slices() -> None:
    own, vectors = (f"tests.helpers.coupled_optimizer.Sign{name}" for name in ("DecayOfItsOwn", "DecaysVectors"))
    refused = r"^actor\.optimizer\.weight_decay: found 0\.1; .* does not heed the weight_decay .*; allowed: 0$"
    for path in (own, vectors):
        assert isinstance(choose_optimizer(path, {}), OptimizerChoice)
        with pytest.raises(ConfigError, match=refused):
            choose_optimizer(path, {}, 0.1, sharding="element")
    with pytest.raises(ConfigError, match=refused):
        choose_optimizer(own, {}, 0.1)
    assert isinstance(choose_optimizer(vectors, {}, 0.1), TensorOptimizerChoice), "it heeds that of whole matrices"
    assert isinstance(choose_optimizer("torch.optim.AdamW", {}, 0.1), OptimizerChoice)


@settings(max_examples=25)
@given(
    cuts=st.lists(st.integers(0, SHAPE[0] * SHAPE[1]), min_size=1, max_size=5).map(sorted),
    case=st.sampled_from(ELEMENT_WISE),
)
def test_wherever_shards_are_cut_an_element_wise_class_is_found_to_be_one(
    cuts: list[int], case: tuple[str, dict[str, Any], set[str], set[str]]
) -> None:
    path, arguments, tensors, numbers = case
    cls = getattr(torch.optim, path.rpartition(".")[2])
    layout = probe(lambda parameters: cls(parameters, lr=0.1, weight_decay=0.01, **arguments), cuts=cuts)
    assert (set(layout.tensors), set(layout.numbers)) == (tensors, numbers)


@given(st.floats(width=32, allow_nan=False), st.integers(-1000, 1000))
def test_a_number_comes_back_in_the_form_it_had(value: float, count: int) -> None:
    layout = StateLayout({}, {"product": torch.tensor(1.0), "steps": torch.tensor(3), "k": 2})
    product = layout.number("product", value)
    assert isinstance(product, torch.Tensor) and product.dtype == torch.float32 and product.item() == value
    steps = layout.number("steps", count)
    assert isinstance(steps, torch.Tensor) and steps.dtype == torch.int64 and steps.item() == count
    assert layout.number("k", count) == count and type(layout.number("k", count)) is int


def test_the_probe_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    choose_optimizer("torch.optim.RAdam", {})
    assert torch.equal(torch.get_rng_state(), before)
