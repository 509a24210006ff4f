"""Every layout computes what transformers computes, and what one layout computes the others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.actor.conftest import rows_of
from tests.helpers.tiny_models import response_log_probs

pytestmark = [pytest.mark.distributed, pytest.mark.representative("actor layouts")]
WORKER = Path(__file__).parent / "workers" / "layouts.py"


@pytest.fixture(scope="module")
def rows(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return rows_of(WORKER, models, tmp_path_factory.mktemp("layouts"))


def test_log_probs_equal_transformers(rows: dict[str, dict[str, Any]], models: Path) -> None:
    from tests.actor.workers.layouts import TEMPERATURE, model_of, samples

    for name, row in rows.items():
        model = AutoModelForCausalLM.from_pretrained(model_of(models, name), dtype=torch.float32).eval()
        for sample, found in zip(samples(), row["log_probs"], strict=True):
            expected = response_log_probs(model, sample.token_ids, sample.prompt_length, TEMPERATURE)
            assert found == pytest.approx(expected, abs=2e-5), name


def test_every_layout_packed_or_padded_has_the_same_loss_and_gradient_norm(rows: dict[str, dict[str, Any]]) -> None:
    from tests.actor.workers.layouts import LAYOUTS

    assert set(rows) == set(LAYOUTS)
    for name, row in rows.items():
        reference = rows["moe-dp2" if name.startswith("moe") else "dp2"]
        assert row["loss"] == pytest.approx(reference["loss"], rel=2e-5), name
        assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2e-5), name
        assert row["loss"][1] < row["loss"][0], name


def test_weights_survive_the_way_in_and_out(rows: dict[str, dict[str, Any]]) -> None:
    assert {name for name, row in rows.items() if not row["exported_equals_loaded"]} == set()


def test_a_resumed_policy_goes_on_bit_for_bit(rows: dict[str, dict[str, Any]]) -> None:
    assert {name for name, row in rows.items() if not row["resume_is_bit_equal"]} == set()


def test_a_collective_of_any_group_waits_as_long_as_was_asked_for(rows: dict[str, dict[str, Any]]) -> None:
    from tests.actor.workers.layouts import TIMEOUT_S

    assert {name: row["timeouts"] for name, row in rows.items()} == {name: [TIMEOUT_S] for name in rows}
