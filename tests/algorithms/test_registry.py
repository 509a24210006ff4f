"""Which class ``algorithm.name`` selects, what it does, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.algorithms.advantages import group_relative_advantages
from megatron_tlt.algorithms.clipped import ClippedPolicyLoss
from megatron_tlt.algorithms.losses import LossInputs
from megatron_tlt.algorithms.registry import ALGORITHMS, algorithm_problems, build_algorithm, build_loss
from megatron_tlt.config.algorithm import AlgorithmConfig, KlConfig
from megatron_tlt.config.loader import compare_resolved, dump_resolved, load_config
from megatron_tlt.errors import ConfigError, RunError
from tests.config.test_loader import violations, write
from tests.helpers.user_code import add_module

MODULE = "tlt_user_algorithms"
SOURCE = """
from megatron_tlt.algorithms.algorithm import Algorithm
from megatron_tlt.algorithms.clipped import ClippedPolicyLoss
from megatron_tlt.algorithms.grpo import Grpo


class Scaled(Grpo):
    def __init__(self, config, scale=1.0):
        super().__init__(config)
        if scale <= 0:
            raise ValueError(f"scale is {scale}; above 0 is needed")
        self.scale = scale

    def advantages(self, rewards, lengths):
        return [self.scale * value for value in super().advantages(rewards, lengths)]


class Anything(Grpo):
    def __init__(self, config, **options):
        super().__init__(config)
        self.options = options


class Short(Grpo):
    def advantages(self, rewards, lengths):
        return rewards[1:]


class Infinite(Grpo):
    def advantages(self, rewards, lengths):
        return [float("inf") for _ in rewards]


class NoCredit(Algorithm):
    pass


class Halved(ClippedPolicyLoss):
    def surrogate(self, log_probs_BT, inputs):
        loss, metrics = super().surrogate(log_probs_BT, inputs)
        return loss / 2, metrics


def not_a_loss(config):
    return None


def function(config):
    return Grpo(config)
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_module(tmp_path_factory.mktemp("code"), MODULE, SOURCE, monkeypatch)
        yield


def algorithm(name: str, **options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(name=name, **options)


@given(st.lists(st.floats(-5, 5), min_size=8, max_size=8), st.booleans())
def test_grpo_gives_what_the_options_say_to_the_bit(rewards: list[float], normalize: bool) -> None:
    grpo = build_algorithm(AlgorithmConfig(group_size=4, normalize_by_std=normalize))
    assert grpo.assign_credit(rewards, [1] * 8) == group_relative_advantages(rewards, 4, normalize)
    assert isinstance(grpo.loss(), ClippedPolicyLoss)


@given(st.lists(st.floats(-5, 5), min_size=8, max_size=8))
def test_dr_grpo_is_grpo_without_the_standard_deviation(rewards: list[float]) -> None:
    plain = build_algorithm(AlgorithmConfig(group_size=4, normalize_by_std=False))
    lengths = [3] * 8
    dr_grpo = build_algorithm(algorithm("dr_grpo", group_size=4))
    assert dr_grpo.assign_credit(rewards, lengths) == plain.assign_credit(rewards, lengths)


def test_the_default_loss_is_the_clipped_surrogate_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(3, 7, generator=generator) > 0.3).float()
    columns = [torch.randn(3, 7, generator=generator) for _ in range(6)]
    inputs = LossInputs(mask, *columns[:4])
    config = AlgorithmConfig(kl=KlConfig(coefficient=0.1), entropy_coefficient=0.01)
    found, metrics = build_algorithm(config).loss()(columns[4], columns[5], inputs)
    expected, others = ClippedPolicyLoss(config)(columns[4], columns[5], inputs)
    assert torch.equal(found, expected) and metrics == others
    clipped = {"clip_fraction", "clip_fraction_low", "clip_fraction_high"}
    assert set(metrics) == {"loss", "entropy", "policy_kl", "kl", *clipped}


def test_a_users_class_takes_its_arguments() -> None:
    scaled = build_algorithm(algorithm(f"{MODULE}.Scaled", group_size=2, arguments={"scale": 3}))
    assert scaled.assign_credit([1.0, 0.0], [2, 3]) == pytest.approx([3.0, -3.0], rel=1e-5)
    anything = build_algorithm(algorithm(f"{MODULE}.Anything", arguments={"a": 1}))
    assert vars(anything)["options"] == {"a": 1}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "gpro",
            {},
            "algorithm.name: found 'gpro'; allowed: cispo, dapo, distillation, dr_grpo, grpo, gspo, "
            "reinforce, reinforce++, reinforce++_baseline, rloo, or a class's import path such as mypackage",
        ),
        (
            "no_such_package.Mine",
            {},
            "algorithm.name: found 'no_such_package.Mine'; 'no_such_package' cannot be imported",
        ),
        (
            f"{MODULE}.Scald",
            {},
            f"algorithm.name: found '{MODULE}.Scald'; no class 'Scald' in {MODULE}; did you mean Scal",
        ),
        (
            f"{MODULE}.function",
            {},
            "not a subclass of megatron_tlt.algorithms.algorithm.Algorithm with advantages",
        ),
        (
            f"{MODULE}.NoCredit",
            {},
            "not a subclass of megatron_tlt.algorithms.algorithm.Algorithm with advantages",
        ),
        (
            f"{MODULE}.Scaled",
            {"scal": 1},
            f"algorithm.arguments.scal: {MODULE}.Scaled does not take it; did you mean sca",
        ),
        (
            f"{MODULE}.Scaled",
            {"scale": 0},
            "found {'scale': 0}; " + MODULE + ".Scaled refuses them: ValueError: scale is 0",
        ),
        ("grpo", {"scale": 1}, "algorithm.arguments.scale: grpo does not take it; allowed: no arguments"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_key(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_algorithm(algorithm(name, arguments=arguments))
    (line,) = algorithm_problems(algorithm(name, arguments=arguments))
    assert said in line and str(caught.value) == line


def test_a_users_loss_is_a_class_by_import_path() -> None:
    loss = build_algorithm(AlgorithmConfig(loss=f"{MODULE}.Halved")).loss()
    ones, zeros = torch.ones(1, 2), torch.zeros(1, 2)
    inputs = LossInputs(ones, ones, zeros, zeros, ones)
    assert (
        float(loss(zeros, zeros, inputs)[0]) == -1.0
        and float(ClippedPolicyLoss(AlgorithmConfig())(zeros, zeros, inputs)[0]) == -2.0
    )
    with pytest.raises(ConfigError, match=rf"algorithm.loss: found '{MODULE}.not_a_loss'; not a class"):
        build_loss(AlgorithmConfig(loss=f"{MODULE}.not_a_loss"))


def test_credit_that_cannot_be_used_stops_the_run() -> None:
    with pytest.raises(RunError, match=rf"{MODULE}\.Short returned 1 advantages for 2 responses; allowed: one each"):
        build_algorithm(algorithm(f"{MODULE}.Short")).assign_credit([1.0, 0.0], [2, 3])
    with pytest.raises(RunError, match="response 0: advantage inf; it must be finite"):
        build_algorithm(algorithm(f"{MODULE}.Infinite")).assign_credit([1.0, 0.0], [2, 3])
    with pytest.raises(RunError, match="response 1: reward nan; it must be finite"):
        build_algorithm(algorithm(f"{MODULE}.Scaled", group_size=2)).assign_credit([1.0, float("nan")], [2, 3])


def test_dr_grpo_sets_what_makes_it_and_refuses_the_rest(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["algorithm.name=dr_grpo"], check_libraries=False)
    assert config.algorithm.normalize_by_std is False
    lines = violations(
        write(tmp_path),
        "algorithm={name: dr_grpo, normalize_by_std: true, loss_aggregation: sequence_mean}",
    )
    assert [line.split(": ", 1)[1] for line in lines] == [
        "algorithm.normalize_by_std: found true; dr_grpo never divides by it; allowed: false, or absent",
        "algorithm.loss_aggregation: found sequence_mean; dr_grpo weights tokens equally; allowed: token_mean, "
        "sequence_sum_norm",
    ]


def test_adapters_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    lora = "actor={transformer_impl: local, lora: {rank: 4}}"
    config = load_config(write(tmp_path), [lora], check_libraries=False)
    assert config.actor.lora is not None and config.actor.lora.targets == ("attention", "mlp")
    local, kl = "actor.transformer_impl=local", "algorithm.kl={coefficient: 0.1, update_every: 2}"
    for overrides, said in {
        (lora, kl): "algorithm.kl.update_every: found 2; with actor.lora the reference is the policy without adapters",
        ("actor={transformer_impl: transformer_engine, lora: {rank: 4}}",): "allowed with adapters: local",
        (local, "actor.lora={targets: [router]}"): "actor.lora.targets",
    }.items():
        assert said in "\n".join(violations(write(tmp_path), *overrides))


def test_a_run_of_a_release_without_arguments_goes_on_and_another_algorithm_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "config.resolved.yaml"
    path.write_text(dump_resolved(load_config(write(tmp_path), check_libraries=False)).replace("  arguments: {}\n", ""))
    assert compare_resolved(path, load_config(write(tmp_path), check_libraries=False)) == []
    other = load_config(write(tmp_path), ["algorithm.name=dr_grpo"], check_libraries=False)
    assert compare_resolved(path, other) == [
        "algorithm.name: 'grpo' -> 'dr_grpo'",
        "algorithm.normalize_by_std: True -> False",
    ]


def test_names_are_checked_without_torch() -> None:
    code = (
        "import sys\n"
        "from megatron_tlt.algorithms.registry import ALGORITHMS, algorithm_problems\n"
        "from megatron_tlt.config.algorithm import AlgorithmConfig\n"
        "print([algorithm_problems(AlgorithmConfig(name=name)) for name in [*ALGORITHMS, 'x']])\n"
        "print('torch' in sys.modules)\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.startswith("[" + "[], " * len(ALGORITHMS) + "[\"algorithm.name: found 'x'") and printed.endswith(
        "\nFalse\n"
    )
