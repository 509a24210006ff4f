"""A loss that may ignore a key of the section that the config sets is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_tlt.algorithms.loss_keys import applied_keys, ignored_keys
from megatron_tlt.algorithms.policy_loss import PolicyLoss
from megatron_tlt.algorithms.registry import LOSSES, build_loss
from megatron_tlt.cli.preflight import load_checked
from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError
from tests.config.test_loader import write
from tests.helpers.user_code import add_module

MODULE = "tlt_user_losses_of_keys"
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
    applies = ("correction.weights",)

    def __call__(self, log_probs_BT, entropy_BT, inputs):
        return -(inputs.mask_BT * inputs.token_weights_BT * inputs.advantages_BT * log_probs_BT).sum(), {}


class Surrogate(PolicyLoss):
    def surrogate(self, log_probs_BT, inputs):
        return -inputs.advantages_BT * log_probs_BT, {}


class Ratio(PolicyLoss):
    applies = ("correction.weights", "correction.bypass")

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
        self.applies = self.inner.applies

    def __call__(self, *arguments):
        return self.inner(*arguments)


class Denied(Weighted):
    applies = ()


class Nothing(Weighted):
    applies = None


class Text(Weighted):
    applies = "weights"


class Misspelt(Weighted):
    applies = ("weight",)


class WithPlain(Grpo):
    def loss(self):
        return Plain(self.config)


class Raises(Grpo):
    def loss(self):
        raise KeyError("absent")
"""
WEIGHTED, BYPASSED = "correction.weights", "correction.bypass"
CLIPS = {"clip_low", "clip_high", "dual_clip"}
CLIPS_OF_GSPO = ["clip_low", "clip_high"]
OF_POLICY_LOSS = {*PolicyLoss.applies}
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
    return ignored_keys(load_config(write(folder), list(overrides), check_libraries=False))


def loss(name: str) -> str:
    return f"algorithm.loss={MODULE}.{name}"


@pytest.mark.parametrize(
    ("name", "applied"),
    [
        ("Plain", set()),
        ("Weighted", {WEIGHTED}),
        ("Surrogate", OF_POLICY_LOSS),  # without a ratio to the old policy
        ("Ratio", {WEIGHTED, BYPASSED}),
        ("Halved", OF_POLICY_LOSS),  # a surrogate of its own says so itself
        ("Replaced", set()),
        ("Wrapped", {*OF_POLICY_LOSS, BYPASSED, *CLIPS}),
        ("Denied", set()),
    ],
)
def test_a_loss_names_the_keys_that_it_applies(name: str, applied: set[str], tmp_path: Path) -> None:
    asked = {
        (WEIGHTS, SCHEDULE): WEIGHTED,
        (WEIGHTS,): WEIGHTED,
        ("algorithm.correction.token_bounds=[0.5, 2]",): WEIGHTED,
        ("algorithm.correction.opsm_delta=0.1",): "correction.opsm_delta",
        (BYPASS, SCHEDULE): BYPASSED,
        (BYPASS, "tail={eta_prompts: 2, deferred: continue}"): BYPASSED,
        (BYPASS, *REPLAY): BYPASSED,
        ("algorithm.kl.coefficient=0.1",): "kl.coefficient",
        ("algorithm.entropy_coefficient=0.01",): "entropy_coefficient",
        ("algorithm.loss_aggregation=sequence_mean",): "loss_aggregation",
        ("algorithm.clip_low=0.1",): "clip_low",
        ("algorithm.clip_high=0.3",): "clip_high",
        ("algorithm.dual_clip=3",): "dual_clip",
    }
    for overrides, key in asked.items():
        assert (not problems(tmp_path, loss(name), *overrides)) is (key in applied), overrides


def test_the_lines_name_the_keys(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, loss("Plain"), WEIGHTS, SCHEDULE)
    assert line == (
        f"algorithm.loss: found '{MODULE}.Plain', which does not name correction.weights in applies; "
        "algorithm.correction.weights: token needs a loss that multiplies the loss of each token by token_weights_BT; "
        "allowed: clipped, gspo, cispo, or a class that does so, with applies = ('correction.weights',) "
        "(docs/extending.md)"
    )
    (line,) = problems(tmp_path, f"algorithm.name={MODULE}.WithPlain", WEIGHTS)
    assert line.startswith(f"algorithm.name: found '{MODULE}.WithPlain', whose loss Plain does not name correction.we")
    (line,) = problems(tmp_path, f"algorithm.name={MODULE}.Raises", WEIGHTS)
    assert line == (
        f"algorithm.name: found '{MODULE}.Raises'; its loss() or applies raises where tlt starts, "
        "without other ranks: KeyError: 'absent'"
    )


@pytest.mark.parametrize(("name", "found"), [("Nothing", "None"), ("Text", "'weights'"), ("Misspelt", "('weight',)")])
def test_what_is_no_tuple_of_keys_is_named(name: str, found: str, tmp_path: Path) -> None:
    (line,) = problems(tmp_path, loss(name), WEIGHTS)
    assert f"has applies = {found}; allowed: a tuple of correction.weights, correction.opsm_delta, " in line


def test_without_a_correction_any_loss_may_train(tmp_path: Path) -> None:
    for overrides in ([], [BYPASS], ["algorithm.correction.max_k3=0.1"]):  # a rejection acts through the mask
        assert problems(tmp_path, loss("Plain"), *overrides) == []


def test_what_a_recipe_sets_is_not_asked_of_a_loss(tmp_path: Path) -> None:
    recipe = (loss("Plain"), "algorithm.name=gspo")
    assert problems(tmp_path, *recipe) == []
    assert "does not name clip_low in applies" in problems(tmp_path, *recipe, "algorithm.clip_low=0.1")[0]


@pytest.mark.parametrize(
    ("name", "unapplied"),
    [("Plain", ["loss_aggregation", *CLIPS_OF_GSPO]), ("Surrogate", CLIPS_OF_GSPO), ("Wrapped", [])],
)
def test_what_a_recipe_sets_and_a_loss_ignores_is_said(
    name: str, unapplied: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_checked(write(tmp_path), [loss(name), "algorithm.name=gspo"], starts=False)
    notes = capsys.readouterr().err.splitlines()
    sets = "".join(line for line in notes if line.startswith("note: algorithm.name: gspo sets "))
    for key in ("loss_aggregation", *CLIPS_OF_GSPO):
        assert (f"{key}: " in sets) is (key not in unapplied)
    said = f"note: algorithm.loss: found '{MODULE}.{name}', which does not name "
    lines = [line.removeprefix(said) for line in notes if line.startswith(said)]
    assert lines == ([f"{', '.join(unapplied)} in applies; what gspo sets there has no effect"] if unapplied else [])


def test_a_penalty_in_the_reward_needs_nothing_of_the_loss(tmp_path: Path) -> None:
    assert problems(tmp_path, loss("Plain"), "algorithm.kl={coefficient: 0.1, placement: reward}") == []


def test_the_losses_by_name_apply_every_correction() -> None:
    for name in LOSSES:
        declared = applied_keys(build_loss(AlgorithmConfig(loss=name)), "__call__", "surrogate")
        assert {*declared} == {*OF_POLICY_LOSS, BYPASSED, *CLIPS} - ({"dual_clip"} if name != "clipped" else set())


def test_it_is_said_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"does not name correction\.weights in applies"):
        load_checked(write(tmp_path), [loss("Plain"), WEIGHTS, SCHEDULE], starts=False)
    # an evaluation has no loss
    load_checked(write(tmp_path), [loss("Plain"), WEIGHTS, SCHEDULE], starts=False, trains=False)
    assert "note: for training: algorithm.loss: found" in capsys.readouterr().err


def test_losses_by_name_are_checked_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from megatron_tlt.algorithms.loss_keys import ignored_keys\n"
        "from megatron_tlt.config.loader import load_config\n"
        f"config = load_config(Path({str(write(tmp_path))!r}), [{WEIGHTS!r}, {SCHEDULE!r}], check_libraries=False)\n"
        "assert ignored_keys(config) == []\nsys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
