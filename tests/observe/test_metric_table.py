"""The table of metrics: complete, without dead entries, and the source of other libraries' names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_tlt.observe import metric_table
from megatron_tlt.observe.metric_table import METRICS, aliases_of, find_metric
from megatron_tlt.observe.metrics import MetricsWriter, read_metrics
from tests.helpers.launch import REPOSITORY


def source() -> str:
    package = REPOSITORY / "megatron_tlt"
    files = [path for path in package.rglob("*.py") if path.name != Path(metric_table.__file__).name]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_every_entry_is_written_by_something() -> None:
    text = source()
    dead = []
    for name in METRICS:
        parts = [part for part in re.split(r"<[a-z]+>", name.rpartition("/")[2] or name) if part]
        if not all(part.removesuffix("_mib") in text for part in parts):
            dead.append(name)
    assert dead == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("reward/mean", "reward/mean"),
        ("task/gsm8k/main/reward", "task/<task>/reward"),
        ("eval/aime/pass_at_1", "eval/<set>/<figure>"),
        ("memory/log_probs_gib", "memory/<phase>_gib"),
        ("reward/meann", None),
    ],
)
def test_a_metric_is_found_by_name_or_pattern(name: str, key: str | None) -> None:
    assert find_metric(name) == key


def test_no_name_of_a_library_stands_for_two_metrics() -> None:
    for library in ("verl", "slime", "trl"):
        names = [alias for metric in METRICS.values() for alias in getattr(metric, library).split()]
        assert len(names) == len(set(names)) and len(names) > 10
        assert not set(names) & METRICS.keys() or library == "verl"  # verl has some names in common


def test_aliases_are_written_beside_our_names(tmp_path: Path) -> None:
    row = {"reward/mean": 0.5, "length/mean": 12.0, "actor/grad_norm": 2.0}
    with MetricsWriter(tmp_path, tensorboard=False, aliases=["verl", "trl"]) as writer:
        writer.log(1, row)
    (found,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row.items() <= found.items()
    assert found["response_length/mean"] == found["completions/mean_length"] == 12.0
    assert found["critic/rewards/mean"] == found["reward"] == 0.5 and found["grad_norm"] == 2.0
    assert not any(name.startswith(("rollout/", "train/")) for name in found), "slime was not asked for"
    assert aliases_of(row, []) == {}
