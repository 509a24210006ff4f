"""The comparison of restarts: what it needs to judge, and how."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench import elastic
from megatron_tlt.bench.elastic_layouts import SIZES, layout, name_of
from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.bench.workers import measure_in_worker
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError
from tests.helpers.launch import REPOSITORY


def trial(seconds: float, copy_s: float | None) -> dict[str, Any]:
    memory = {"bytes": 104, "planned_bytes": 100.0} if copy_s is not None else {"bytes": 0, "planned_bytes": 0.0}
    return {"seconds": seconds, "steps": [4.0, 5.0, 6.0], "copies": [] if copy_s is None else [copy_s] * 3, **memory}


def test_arms_differ_in_where_they_restart_from_and_how_ranks_start_alone() -> None:
    config = REPOSITORY / "launch" / "quickstart-deterministic.yaml"
    for arm in elastic.ARMS:
        found = load_config(config, elastic.ARMS[arm])
        assert found.launcher.preload is arm.endswith("forks")
        if arm.startswith("memory"):
            assert found.elastic is not None and found.trainer.save_every == 0
        else:
            assert found.elastic is None and found.trainer.save_every == 1 and not found.trainer.async_save


def test_a_restart_and_the_copies_are_judged() -> None:
    found = {
        "checkpoint": [trial(40.0, None), trial(44.0, None)],
        "memory": [trial(30.0, 0.02), trial(34.0, 0.04)],
        "checkpoint, forks": [trial(30.0, None), trial(30.0, None)],
        "memory, forks": [trial(28.0, 0.02), trial(28.0, 0.04)],
    }
    result = elastic.judge(found, repeats=2)
    met = [target["met"] for target in result.targets.values()]
    assert met == [False, True, False, True, True], "no layouts were measured, and 28 is more than half of 42"
    assert [row["ratio"] for row in result.rows[-2:]] == [32 / 42, 28 / 42] and result.rows[0]["copy (ms)"] is None
    assert result.rows[2]["copy (ms)"] == 20.0 and result.rows[2]["kill to next update (s)"] == 30.0
    found["memory"].pop()
    assert {target["op"] for target in elastic.judge(found, repeats=2).targets.values()} == {"incomplete"}


def test_arms_that_were_not_asked_for_have_no_target() -> None:
    memory = {"memory": [trial(30.0, 0.02), trial(34.0, 0.04)]}
    only = elastic.judge(memory, repeats=2, with_layouts=False)
    assert [name.partition(",")[0] for name in only.targets] == ["copies into memory", "memory of snapshots"]
    assert all(target["met"] for target in only.targets.values())
    memory["memory"][0]["bytes"] = 90
    again = elastic.judge(memory, 2, with_layouts=False).targets
    assert not again["memory of snapshots, difference from the plan"]["met"]
    assert elastic.judge({"checkpoint": [trial(9.0, None)] * 2}, 2, with_layouts=False).targets == {}


def test_a_kill_before_both_slots_are_there_is_refused(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    elastic.add_arguments(parser)
    with pytest.raises(ConfigError, match="--killed-after: found 1; allowed: at least 2"):
        elastic.run(parser.parse_args(["--killed-after", "1", "--folder", str(tmp_path)]))
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_with_other_bits_is_enough() -> None:
    def row(value: str) -> dict[str, Any]:
        return {"hashes": {"a": "1", "b": value}, "updates": [{}] * 4, "seconds": [9.0, 1.0, 2.0]}

    nothing: dict[str, list[dict[str, Any]]] = {arm: [] for arm in elastic.ARMS}
    layouts = {name_of(*size, strict=strict): row("2") for size in SIZES for strict in (True, False)}
    layouts[name_of(2, 2, strict=False)] = row("3")
    same = elastic.judge(nothing, 2, layouts)
    assert same.targets["tensors with other bits, at most, under any layout"]["met"]
    assert [each["other bits, plain"] for each in same.rows] == [0] * (len(SIZES) - 1) + [1]
    layouts[name_of(4, 1)] = row("3")
    assert not elastic.judge(nothing, 2, layouts).targets["tensors with other bits, at most, under any layout"]["met"]


@pytest.mark.distributed
def test_the_worker_of_layouts_is_a_program(tmp_path: Path) -> None:
    write_tiny_model("qwen2-untied", tmp_path / "model", num_hidden_layers=5, tie_word_embeddings=False)
    given = {"model": str(tmp_path / "model"), "layouts": {"one": layout(2)}, "batches": 1}
    found = measure_in_worker("one layout", "strict", given, 300.0)
    assert len(found["one"]["updates"]) == 1 and found["one"]["hashes"]
