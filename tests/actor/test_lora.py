"""Adapters learn what PEFT's learn, the same under every layout, and a checkpoint keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.models.lora_weights import LORA_A
from tests.actor.workers import lora
from tests.helpers.launch import run_torchrun
from tests.helpers.sequences import samples
from tests.helpers.tiny_models import build_qwen2, response_log_probs

pytestmark = pytest.mark.distributed
SAME = 5e-6
"""Ten units in the last place of a log-prob of 4 to 8 nats; how sums are ordered depends on the processor too."""


def results(folder: Path, kind: str, out: Path) -> dict[str, dict[str, torch.Tensor]]:
    run_torchrun(Path(lora.__file__), 4, [str(folder), kind, str(out)], timeout_s=400)
    return {path.stem: load_file(path) for path in out.glob("*.safetensors")}


def assert_the_layouts_agree(found: dict[str, dict[str, torch.Tensor]]) -> None:
    first = found["dp4"]
    for name, row in found.items():
        for key, value in row.items():
            assert float((value - first[key]).abs().max()) <= SAME, f"{name}: {key}"
    down = next(key for key in first if key.startswith("first ") and key.endswith(LORA_A))
    assert not torch.equal(first[down], first[down.removeprefix("first ")]), "A learns too"


def assert_scores_are_those_of_the_merged_model(folder: Path, found: dict[str, torch.Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tied = {key.removeprefix("merged "): value for key, value in found.items() if key.startswith("merged ")}
    scored = []
    for weights in ({}, tied):
        missing = model.load_state_dict(weights, strict=False).unexpected_keys
        if missing:  # experts are one tensor in transformers' modules, and several in the file
            pytest.fail(f"no place for {missing[0]}")
        values = [response_log_probs(model, s.token_ids, s.prompt_length, 1.0) for s in samples(lora.VOCABULARY)]
        scored.append(torch.tensor([value for one in values for value in one]))
    assert float((scored[1] - found["scores"]).abs().max()) < 2e-5
    assert float((scored[1] - scored[0]).abs().max()) > 1e-2, "the adapters change what the model says"


def test_adapters_learn_as_pefts_do_under_every_layout(tmp_path: Path) -> None:
    folder = build_qwen2(tmp_path / "model", vocab_size=lora.VOCABULARY, tie=False, scale=0.1, num_kv_heads=2)
    found = results(folder, "dense", tmp_path)
    assert_the_layouts_agree(found)
    assert_scores_are_those_of_the_merged_model(folder, found["dp4"])

    config = LoraConfig(
        r=lora.RANK,
        lora_alpha=int(lora.ALPHA),
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    parameters = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(found["dp4"][f"first {name}"])
    optimizer = torch.optim.SGD(parameters.values(), lr=lora.RATE)
    for step in range(lora.STEPS):
        loss, count = torch.zeros(()), 0
        for sample in samples(lora.VOCABULARY):
            logits = model(torch.tensor([sample.token_ids])).logits[0, sample.prompt_length - 1 : -1]
            labels = torch.tensor(sample.token_ids[sample.prompt_length :])
            loss = loss - sample.advantage * torch.log_softmax(logits, -1).gather(1, labels[:, None]).sum()
            count += len(labels)
        optimizer.zero_grad()
        (loss / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        assert float(found["dp4"]["norms"][step]) == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
    for name, parameter in parameters.items():
        assert float((parameter.detach() - found["dp4"][name]).abs().max()) <= 1e-5, name


def test_experts_learn_the_same_under_every_layout(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model("qwen3-moe", folder, vocab_size=lora.VOCABULARY)
    found = results(folder, "experts", tmp_path)
    assert_the_layouts_agree(found)
    assert any(".experts.1.up_proj.lora_B" in name for name in found["dp4"])
