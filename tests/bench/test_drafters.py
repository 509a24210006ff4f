"""The benchmarks of drafters: what their command lines refuse, and which targets an adapted drafter is held to."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import pytest

from megatron_tlt.bench import drafter, export_drafter
from megatron_tlt.errors import ConfigError


def arguments_of(bench: ModuleType, *values: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(values)


def test_a_head_is_of_one_kind() -> None:
    with pytest.raises(ConfigError, match=r"--head runs/head: found --kinds eagle eagle3; allowed: the head's own"):
        drafter.run(arguments_of(drafter, "--head", "runs/head"))


@pytest.mark.parametrize("alone", ["--model", "--drafter"])
def test_a_target_comes_with_its_drafter(alone: str) -> None:
    with pytest.raises(ConfigError, match="--model and --drafter: found one; allowed: both or none"):
        export_drafter.run(arguments_of(export_drafter, alone, "runs/some"))


def test_a_drafter_is_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kinds: found eagle eagle3; allowed with --drafter: its own alone"):
        export_drafter.run(arguments_of(export_drafter, "--model", str(tmp_path), "--drafter", str(tmp_path)))


def test_an_adapted_drafter_is_held_against_the_frozen_one_and_one_of_as_many_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {}

    def measured(_: str, __: str, asked: dict[str, object], ___: float) -> list[dict[str, float]]:
        given.update(asked)
        first = {"step": 0, "frozen": 2.0, "more": 2.0, "tv": 2.0, "tv, reward-weighted": 1.8}
        return [first, {"step": 1, "frozen": 2.0, "more": 2.2, "tv": 2.42, "tv, reward-weighted": 2.2}]

    monkeypatch.setattr(drafter, "measure_in_worker", measured)
    options = ("--kinds", "eagle3", "--losses", "tv", "--weighted", "--more", "--seeds", "1", "--model", str(tmp_path))
    targets = drafter.run(arguments_of(drafter, *options)).targets
    assert given["losses"] == ["tv"] and given["weighted"] and given["more"] and given["head"] is None
    values = {name: target["value"] for name, target in targets.items()}
    assert values == {
        "eagle3, tv: adapted over frozen at the end": pytest.approx(1.21),
        "eagle3, tv: adapted over frozen, lowest on the way": pytest.approx(1.0),
        "eagle3, tv: adapted over more at the end": pytest.approx(1.1),
        "eagle3, tv, reward-weighted: adapted over frozen at the end": pytest.approx(1.1),
        "eagle3, tv, reward-weighted: adapted over frozen, lowest on the way": pytest.approx(0.9),
        "eagle3, tv, reward-weighted: adapted over more at the end": pytest.approx(1.0),
    }
