"""Whatever a loss calls its metrics, an update logs them, added up exactly under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.actor.workers import metrics
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks logged."""
    out = tmp_path_factory.mktemp("metrics")
    build_qwen2(out / "model", num_layers=2, num_heads=2, num_kv_heads=2, scale=0.1)
    run_torchrun(Path(metrics.__file__), 2, [str(out / "model"), str(out)], timeout_s=120)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_metrics_of_any_name_are_means_over_all_response_tokens(found: list[dict[str, Any]]) -> None:
    batch = metrics.samples()
    tokens = [batch.response_length(i) for i in range(batch.num_samples)]
    rows = found[0]["rows"]
    assert len(rows) == len(metrics.LAYOUTS) * len(metrics.MAX_TOKENS)
    for name, row in rows.items():
        assert set(row) == {"advantage", "nll", "rewarded/tokens", "tokens", "grad_norm", "lr"}, name
        assert row["tokens"] == sum(tokens), name
        assert row["rewarded/tokens"] == tokens[-1] / sum(tokens), name
        assert row["advantage"] == (tokens[-1] - sum(tokens[:-1])) / sum(tokens), name
        assert row["nll"] == pytest.approx(rows["dp2-24"]["nll"], rel=1e-5), name


def test_every_rank_has_them(found: list[dict[str, Any]]) -> None:
    assert found[0]["rows"] == found[1]["rows"]


def test_what_is_no_number_or_has_a_taken_name_is_refused(found: list[dict[str, Any]]) -> None:
    for name, shape in (("each", "(3, "), ("lr", "()")):
        said = found[0]["refused"][name]
        assert said.startswith(f"metric '{name}' of the loss: found shape {shape}"), said
        assert said.endswith(
            "allowed: one number, a sum over response tokens, under another name than tokens, grad_norm, lr, "
            "router_agreement"
        )
