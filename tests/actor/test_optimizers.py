"""Every optimizer under the distributed optimizer steps as it does in plain torch, and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.actor.conftest import rows_of

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "optimizers.py"


@pytest.fixture(scope="module")
def rows(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return rows_of(WORKER, models, tmp_path_factory.mktemp("optimizers"))


def plain_torch_losses(models: Path, name: str) -> list[float]:
    """The same training with transformers and torch alone, in one process."""
    from tests.actor.workers.layouts import samples
    from tests.actor.workers.optimizers import CASES, STEPS, WARMUP, WEIGHT_DECAY

    data = samples()
    model = AutoModelForCausalLM.from_pretrained(models / CASES[name].model, dtype=torch.float32)
    cls, arguments = CASES[name].reference
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = cls(groups, lr=0.0, **arguments)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = CASES[name].lr * (step + 1) / WARMUP
        log_probs = []
        for sample in data:
            rows = torch.log_softmax(model(torch.tensor([list(sample.token_ids)])).logits[0], dim=-1)
            log_probs += [rows[t - 1, sample.token_ids[t]] for t in range(sample.prompt_length, len(rows))]
        loss = -torch.stack(log_probs).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_losses_equal_plain_torch(rows: dict[str, dict[str, Any]], models: Path) -> None:
    from tests.actor.workers.optimizers import CASES

    assert set(rows) == set(CASES)
    for name, row in rows.items():
        expected = plain_torch_losses(models, name)
        assert expected[-1] < 0.999 * expected[0], name
        tolerance = 2e-2 if name.endswith("bf16") else 1e-5
        assert row["losses"] == pytest.approx(expected, rel=tolerance), name


def test_a_resumed_optimizer_goes_on_bit_for_bit(rows: dict[str, dict[str, Any]]) -> None:
    assert {name for name, row in rows.items() if not row["resume_is_bit_equal"]} == set()


def test_saved_before_the_first_step_it_begins_bit_for_bit(rows: dict[str, dict[str, Any]]) -> None:
    assert {name for name, row in rows.items() if not row["fresh_is_bit_equal"]} == set()


def test_state_saved_under_data_parallel_loads_under_tensor_parallel(rows: dict[str, dict[str, Any]]) -> None:
    from tests.actor.workers.optimizers import RESHARDED

    for name in RESHARDED:
        assert rows[name]["resharded_losses"] == pytest.approx(rows[name]["losses"][2:], rel=1e-5), name
