"""The actor's routers take given experts, with the gradients of a model that has these, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_tlt.bench.tiny_models import write_tiny_model
from tests.actor.workers import routing
from tests.helpers.launch import run_torchrun
from tests.helpers.sequences import samples

pytestmark = pytest.mark.distributed


class Forced:
    """A transformers gate with fixed experts and, if ``weighted``, fixed weights."""

    def __init__(self, gate: Any, *, weighted: bool) -> None:
        self.gate, self.ids, self.weights, self.agreed = gate, torch.empty(0), torch.empty(0), list[torch.Tensor]()
        self.weighted = weighted

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.gate.weight.t()
        own = logits.topk(2).indices.sort(dim=1).values
        self.agreed.append((own == self.ids.sort(dim=1).values).all(dim=1))
        found = logits.gather(1, self.ids)
        if self.weighted:
            found = found - found.detach() + self.weights.log()
        return logits, found.softmax(dim=1), self.ids


@pytest.mark.parametrize("kind", ["ids", "weighted"])
def test_the_experts_are_those_given_and_gradients_go_through_them(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model("qwen3-moe", folder, vocab_size=routing.VOCABULARY)
    run_torchrun(Path(routing.__file__), 4, [str(folder), str(tmp_path), kind], timeout_s=300)
    found = {layout: load_file(tmp_path / f"{layout}.safetensors") for layout in routing.LAYOUTS}

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gates = [Forced(layer.mlp.gate, weighted=kind == "weighted") for layer in model.model.layers]
    for layer, gate in zip(model.model.layers, gates, strict=True):
        layer.mlp.gate.forward = gate
    scored, loss = [], torch.zeros(())
    for i, sample in enumerate(samples(routing.VOCABULARY)):
        length = len(sample.token_ids) - 1
        ids, weights = routing.experts(i, length), routing.weights(i, length)
        for number, gate in enumerate(gates):
            gate.ids, gate.weights = ids[:, number], weights[:, number]
        logits = model(torch.tensor([sample.token_ids[:-1]])).logits[0, sample.prompt_length - 1 :]
        labels = torch.tensor(sample.token_ids[sample.prompt_length :])
        values = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
        scored.append(values.detach())
        loss = loss - sample.advantage * values.sum()
    expected = torch.cat(scored)
    (loss / len(expected)).backward()
    agreement = float(torch.cat([row for gate in gates for row in gate.agreed]).float().mean())
    assert 0.05 < agreement < 0.5, "two of four experts at random"
    router = "model.layers.0.mlp.gate.weight"
    step = -routing.RATE * model.get_parameter(router).grad
    assert float(step.abs().max()) > 1e-3
    before = load_file(folder / "model.safetensors")[router]
    for layout, rows in found.items():
        assert float((rows["replayed"] - expected).abs().max()) < 2e-5, layout
        assert float((rows["own"] - expected).abs().max()) > 1e-2, "other experts, other log-probs"
        assert float(rows["agreement"]) == pytest.approx(agreement, abs=1e-6), layout
        assert float((rows[f"after {router}"] - before - step).abs().max()) < 1e-5, layout
        for key in rows:
            assert float((rows[key] - found["dp4"][key]).abs().max()) < 2e-5, f"{layout}: {key}"
