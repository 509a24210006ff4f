"""``tlt bench hetero`` in small: its figures are what its methods found."""

from __future__ import annotations

import argparse

import pytest

from megatron_tlt.bench import hetero


def test_figures_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hetero, "_MODELS", ("Qwen2.5-7B",))
    parser = argparse.ArgumentParser()
    hetero.add_arguments(parser)
    small = ["--instances", "2", "--seeds", "2", "--small-evaluations", "200", "--evaluations", "40"]
    result = hetero.run(parser.parse_args([*small, "--sequences", "256"]))
    assert not result.targets["small_instances"]["met"]  # 2 are too few to say anything
    assert result.targets["small_worst_over_optimum"]["value"] >= 1 - 1e-12
    rows = {(row["case"], row["method"]): row for row in result.rows}
    for case in ("Qwen2.5-7B, synchronous", "Qwen2.5-7B, asynchronous"):
        own = rows[case, "search"]
        for method in ("random", "without swaps"):
            row = rows[case, method]
            assert row["over_search"]["ratio"] == pytest.approx(row["seconds"]["median"] / own["seconds"]["median"])
            assert (row["evaluations"], len(row["runs"])) == (40, 2)
        assert "actor" in rows[case, "uniform"]["plan"]
    ratios = [rows[case, "random"]["over_search"]["ratio"] for case, method in rows if method == "random"]
    assert result.targets["random_over_search_smallest_case"]["value"] == min(ratios)
