"""A run that trains adapters: it resumes with the same bits, and others load what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.launch import run_logged, run_python
from tests.trainer.conftest import Runs, rows_of
from tests.trainer.workers.stock_lora import PROMPTS

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]

WORKER = Path(__file__).parent / "workers" / "stock_lora.py"
LORA = (
    "actor.lora={rank: 4, dropout: 0.1}",
    "actor.optimizer.lr=2.0e-2",
    "actor.megatron.hidden_dropout=0.0",
    "algorithm.kl.coefficient=0.01",
    "evaluation.every=0",
)


@torch.no_grad()
def log_probs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of each token after the prompt."""
    every = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return every.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_a_run_of_adapters_resumes_and_peft_and_vllm_load_what_it_writes(runs: Runs, tmp_path: Path) -> None:
    runs.train("adapters", *LORA)
    whole, again = runs.folder / "adapters", runs.folder / "adapters-resumed"
    runs.train("adapters-resumed", *LORA, "trainer.steps=2")
    said = runs.train("adapters-resumed", *LORA)
    assert "from the checkpoint of step 2" in said
    for name in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name
    rows = rows_of(whole)
    assert rows[0]["actor/kl"] == pytest.approx(0, abs=1e-6), "the reference is the base"
    assert rows[-1]["actor/kl"] > 1e-5
    adapters = load_file(whole / "adapter" / "adapter_model.safetensors")
    moved = json.loads((whole / "summary.json").read_text())["reshard"]["tensors"]
    assert moved == len(adapters) == 2 * 7 * 2, "A and B of seven projections in two layers, and nothing else"

    base = json.loads((whole / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(whole / "hf", dtype=torch.float32).eval()
    run_python(WORKER, [base, str(whole / "adapter"), str(tmp_path / "said.json")], timeout_s=300, fresh=True)
    without, with_adapter = json.loads((tmp_path / "said.json").read_text())
    for prompt, one in zip(PROMPTS, without, strict=True):
        assert (log_probs(plain, prompt, one["tokens"]) - torch.tensor(one["log_probs"])).abs().max() < 1e-4
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), whole / "adapter"
    ).eval()
    for prompt, one in zip(PROMPTS, with_adapter, strict=True):
        theirs = torch.tensor(one["log_probs"])
        for model in (adapted, merged):
            assert (log_probs(model, prompt, one["tokens"]) - theirs).abs().max() < 1e-4
        assert (log_probs(plain, prompt, one["tokens"]) - theirs).abs().max() > 1e-2, "the adapter changes what is said"

    checkpoint = whole / "checkpoints" / "step_000004"
    said = run_logged(runs.command("from-adapters", f"model={{path: {checkpoint}}}"), timeout_s=200, expect_status=None)
    assert "a checkpoint with LoRA adapters; allowed: the folder hf of its run" in said
