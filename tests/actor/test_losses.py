"""An update's gradient is that of the whole mini-batch's loss, whatever the loss and the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_tlt.algorithms.losses import LossInputs
from megatron_tlt.algorithms.registry import build_loss
from tests.actor.workers import losses
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2

pytestmark = pytest.mark.distributed


def expected_gradient(folder: Path, name: str) -> torch.Tensor:
    """By transformers, on all samples at once."""
    samples, loss = losses.samples(), build_loss(losses.LOSSES[name])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    width = max(len(s.token_ids) - s.prompt_length for s in samples)
    columns = [torch.zeros(len(samples), width) for _ in range(7)]
    log_probs, entropy, mask, advantages, old, reference, weights = columns
    for row, sample in enumerate(samples):
        logits = model(torch.tensor([sample.token_ids])).logits[0, sample.prompt_length - 1 : -1]
        every = torch.log_softmax(logits, dim=-1)
        labels = torch.tensor(sample.token_ids[sample.prompt_length :])
        count = len(labels)
        log_probs[row, :count] = every.gather(1, labels[:, None])[:, 0]
        entropy[row, :count] = -(every.exp() * every).sum(dim=-1)
        mask[row, :count] = 1
        advantages[row] = sample.advantage
        given = (sample.old_log_probs, sample.reference_log_probs, sample.token_weights)
        for column, values in zip((old, reference, weights), given, strict=True):
            column[row, :count] = torch.tensor(values)
    inputs = LossInputs(mask, advantages, old, reference, weights)
    total, metrics = loss(log_probs, entropy, inputs)
    assert name == "dr_grpo" or 0 < float(metrics["clip_fraction"]) < float(mask.sum()), "some tokens, not all"
    (total / loss.denominator(inputs)).backward()
    gradient: torch.Tensor = model.get_parameter(losses.NAME).grad
    return gradient


def test_the_gradient_is_that_of_the_whole_mini_batch(tmp_path: Path) -> None:
    folder = build_qwen2(tmp_path / "model", vocab_size=losses.VOCABULARY, tie=False, scale=0.1)
    out = tmp_path / "rows.json"
    run_torchrun(Path(losses.__file__), 4, [str(folder), str(out)], timeout_s=240)
    rows = json.loads(out.read_text())
    assert len(rows) == len(losses.LAYOUTS) * len(losses.LOSSES)
    for name in losses.LOSSES:
        expected = expected_gradient(folder, name)
        assert float(expected.abs().max()) > 1e-3
        for layout in losses.LAYOUTS:
            found = torch.tensor(rows[f"{layout} {name}"])
            assert float((found - expected).abs().max()) <= 1e-6, f"{layout} {name}"
