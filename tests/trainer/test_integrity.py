"""When replicas are compared, and what is said where they differ."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_tlt.actor.megatron_replicas import OddWeights
from megatron_tlt.config.integrity import IntegrityConfig
from megatron_tlt.errors import RunError
from megatron_tlt.trainer.integrity import ReplicaCheck, difference


class Comparison:
    """Finds the differences that it is given."""

    def __init__(self, odd: dict[int, OddWeights]) -> None:
        self.odd, self.runs = odd, 0

    def run(self) -> dict[int, OddWeights]:
        self.runs += 1
        return self.odd


def check_of(comparison: Comparison, **settings: Any) -> ReplicaCheck:
    check = ReplicaCheck(IntegrityConfig(), None)  # type: ignore[arg-type]
    check._config, check._comparison = IntegrityConfig(**settings), comparison  # type: ignore[assignment]
    return check


def test_steps_between_are_not_compared_but_every_save_is() -> None:
    comparison = Comparison({})
    check = check_of(comparison, replicas_every=3)
    assert [sorted(check.after_update(step)) for step in (1, 2)] == [[], []] and comparison.runs == 0
    assert sorted(check.after_update(3)) == ["integrity/odd_ranks", "integrity/replicas_ms"]
    check.before_save(4)
    assert comparison.runs == 2


def test_it_costs_nothing_if_it_is_off() -> None:
    check = ReplicaCheck(IntegrityConfig(), None)  # type: ignore[arg-type]
    assert check.after_update(4) == {}
    check.before_save(4)


def test_a_warning_is_given_once_per_difference(capfd: pytest.CaptureFixture[str]) -> None:
    comparison = Comparison({3: OddWeights("b", ["w"], True)})
    check = check_of(comparison, replicas_every=1, on_difference="warn")
    assert check.after_update(1)["integrity/odd_ranks"] == 1.0
    check.before_save(1)
    assert capfd.readouterr().err.count("warning: after step 1 ") == 1
    check.after_update(2)
    assert capfd.readouterr().err.count("warning: after step 2 ") == 1
    with pytest.raises(RunError, match=r"after step 1 .* rank 3 on b in w: "):
        check_of(comparison, replicas_every=1).after_update(1)


def test_a_message_names_whom_a_majority_convicts() -> None:
    found = difference(7, {1: OddWeights("a", ["norm", "bias"], True), 2: OddWeights("c", ["expert"], False)})
    assert "rank 1 on a in norm (and 1 more tensors): " in found and "rank 2" not in found
    assert "sbatch --exclude=a)" in found and "\n" not in found


def test_without_a_majority_all_are_suspected() -> None:
    found = difference(7, {rank: OddWeights(f"host{rank}", ["w"], False) for rank in range(10)})
    assert "rank 7 on host7 in w; 2 more ranks: no majority tells" in found
    assert "tlt doctor" in found and "exclude" not in found
