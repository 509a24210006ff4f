"""A loss that may ignore the correction for tokens of other policies is refused where the config asks for one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_tlt.algorithms.loss_correction import correction_problems, declared_corrections
from megatron_tlt.algorithms.registry import LOSSES, build_loss
from megatron_tlt.cli.preflight import load_checked
from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError
from tests.config.test_loader import write
from tests.helpers.user_code import add_module

MODULE = "tlt_user_corrections"
SOURCE = """
from megatron_tlt.algorithms.clipped import ClippedPolicyLoss
from megatron_tlt.algorithms.grpo import Grpo
from megatron_tlt.algorithms.policy_loss import PolicyLoss


class Plain:
    def __init__(self, config):
        self.config = config

    def denominator(self, inputs):
        return inputs.mask_BT.sum()

    def __call__(self, log_probs_BT, entropy_BT, inputs):
        return -(inputs.mask_BT * inputs.advantages_BT * log_probs_BT).sum(), {}


class Weighted(Plain):
    corrections = ("weights",)

    def __call__(self, log_probs_BT, entropy_BT, inputs):
        return -(inputs.mask_BT * inputs.token_weights_BT * inputs.advantages_BT * log_probs_BT).sum(), {}


class Surrogate(PolicyLoss):
    def surrogate(self, log_probs_BT, inputs):
        return -inputs.advantages_BT * log_probs_BT, {}


class Ratio(PolicyLoss):
    corrections = ("weights", "bypass")

    def surrogate(self, log_probs_BT, inputs):
        return -inputs.advantages_BT * (log_probs_BT - inputs.old_log_probs_BT).exp(), {}


class Halved(ClippedPolicyLoss):
    def surrogate(self, log_probs_BT, inputs):
        loss, metrics = super().surrogate(log_probs_BT, inputs)
        return loss / 2, metrics


class Replaced(ClippedPolicyLoss):
    def __call__(self, log_probs_BT, entropy_BT, inputs):
        return log_probs_BT.sum(), {}


class Wrapped(Plain):
    def __init__(self, config):
        self.inner = ClippedPolicyLoss(config)
        self.corrections = self.inner.corrections

    def __call__(self, *arguments):
        return self.inner(*arguments)


class Denied(Weighted):
    corrections = ()


class Nothing(Weighted):
    corrections = None


class Text(Weighted):
    corrections = "weights"


class Misspelt(Weighted):
    corrections = ("weight",)


class WithPlain(Grpo):
    def loss(self):
        return Plain(self.config)


class Raises(Grpo):
    def loss(self):
        raise KeyError("absent")
"""
WEIGHTS = "algorithm.correction.weights=token"
SCHEDULE = "schedule={kind: partial}"
BYPASS = "algorithm.correction.bypass=true"
REPLAY = (
    "rollout.engine=replay",
    "rollout.engine_arguments={path: recorded}",
    "speculation.enabled=false",
    "reshard.method=none",
)


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_module(tmp_path_factory.mktemp("code"), MODULE, SOURCE, monkeypatch)
        yield


def problems(folder: Path, *overrides: str) -> list[str]:
    return correction_problems(load_config(write(folder), list(overrides), check_libraries=False))


def loss(name: str) -> str:
    return f"algorithm.loss={MODULE}.{name}"


@pytest.mark.parametrize(
    ("name", "applied"),
    [
        ("Plain", set()),
        ("Weighted", {"weights"}),
        ("Surrogate", {"weights", "opsm_delta"}),  # without a ratio to the old policy
        ("Ratio", {"weights", "bypass"}),
        ("Halved", {"weights", "opsm_delta"}),  # a surrogate of its own says so itself
        ("Replaced", set()),
        ("Wrapped", {"weights", "opsm_delta", "bypass"}),
        ("Denied", set()),
    ],
)
def test_a_loss_names_the_corrections_that_it_applies(name: str, applied: set[str], tmp_path: Path) -> None:
    asked = {
        (WEIGHTS, SCHEDULE): "weights",
        (WEIGHTS,): "weights",
        ("algorithm.correction.token_bounds=[0.5, 2]",): "weights",
        ("algorithm.correction.opsm_delta=0.1",): "opsm_delta",
        (BYPASS, SCHEDULE): "bypass",
        (BYPASS, "tail={eta_prompts: 2, deferred: continue}"): "bypass",
        (BYPASS, *REPLAY): "bypass",
    }
    for overrides, key in asked.items():
        assert (not problems(tmp_path, loss(name), *overrides)) is (key in applied), overrides


def test_the_lines_name_the_keys(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, loss("Plain"), WEIGHTS, SCHEDULE)
    assert line == (
        f"algorithm.loss: found '{MODULE}.Plain', which has no weights in its corrections; "
        "algorithm.correction.weights: token needs a loss that multiplies the loss of each token by token_weights_BT; "
        "allowed: clipped, gspo, cispo, or a class that does so, with corrections = ('weights',) (docs/extending.md)"
    )
    (line,) = problems(tmp_path, f"algorithm.name={MODULE}.WithPlain", WEIGHTS)
    assert line.startswith(f"algorithm.name: found '{MODULE}.WithPlain', whose loss Plain has no weights in its corr")
    (line,) = problems(tmp_path, f"algorithm.name={MODULE}.Raises", WEIGHTS)
    assert line == (
        f"algorithm.name: found '{MODULE}.Raises'; its loss() or corrections raises where tlt starts, "
        "without other ranks: KeyError: 'absent'"
    )


@pytest.mark.parametrize(("name", "found"), [("Nothing", "None"), ("Text", "'weights'"), ("Misspelt", "('weight',)")])
def test_what_is_no_tuple_of_corrections_is_named(name: str, found: str, tmp_path: Path) -> None:
    (line,) = problems(tmp_path, loss(name), WEIGHTS)
    assert line.endswith(f"has corrections = {found}; allowed: a tuple of bypass, opsm_delta, weights")


def test_without_a_correction_any_loss_may_train(tmp_path: Path) -> None:
    for overrides in ([], [BYPASS], ["algorithm.correction.max_k3=0.1"]):  # a rejection acts through the mask
        assert problems(tmp_path, loss("Plain"), *overrides) == []


def test_the_losses_by_name_apply_every_correction() -> None:
    for name in LOSSES:
        declared = declared_corrections(build_loss(AlgorithmConfig(loss=name)), "__call__", "surrogate")
        assert {*declared} == {"weights", "opsm_delta", "bypass"}


def test_it_is_said_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="Plain', which has no weights in its corrections"):
        load_checked(write(tmp_path), [loss("Plain"), WEIGHTS, SCHEDULE], starts=False)
    # an evaluation has no loss
    load_checked(write(tmp_path), [loss("Plain"), WEIGHTS, SCHEDULE], starts=False, trains=False)
    assert "note: for training: algorithm.loss: found" in capsys.readouterr().err


def test_losses_by_name_are_checked_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from megatron_tlt.algorithms.loss_correction import correction_problems\n"
        "from megatron_tlt.config.loader import load_config\n"
        f"config = load_config(Path({str(write(tmp_path))!r}), [{WEIGHTS!r}, {SCHEDULE!r}], check_libraries=False)\n"
        "assert correction_problems(config) == []\nsys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
