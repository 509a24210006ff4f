"""What the update of a policy adds up, against the plain formulas on transformers' models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_tlt.bench.tiny_models import write_tiny_model
from tests.actor.workers import numerics
from tests.helpers.launch import run_torchrun
from tests.helpers.samples import Sample
from tests.helpers.tiny_models import build_qwen2, response_log_probs

pytestmark = pytest.mark.distributed
WORKER = Path(numerics.__file__)
EXPERTS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A mixture of experts, and a dense model whose vocabulary no two ranks can share evenly."""
    root = tmp_path_factory.mktemp("numerics")
    write_tiny_model("qwen3-moe", root / "moe")
    build_qwen2(root / "odd", vocab_size=numerics.VOCABULARY, tie=False, scale=0.1)
    return root / "moe", root / "odd"


@pytest.fixture(scope="module")
def rows(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("rows") / "rows.json"
    run_torchrun(WORKER, 2, [*map(str, folders), str(out)], timeout_s=240)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def auxiliary_gradients(folder: Path, sample: Sample) -> dict[str, torch.Tensor]:
    """Of the routers' weights, for a batch of one sequence: ``c E sum f_i P_i / k`` and the mean squared log-sum-exp.

    f_i: choices of expert i per token; P_i: its mean probability (Switch Transformer, 2101.03961; ST-MoE, 2202.08906).
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([sample.token_ids[:-1]])
    loss = torch.zeros(())
    for logits in model(tokens, output_router_logits=True).router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(TOP_K).indices, 1.0)
        balance = EXPERTS * (chosen.mean(0) * probabilities.mean(0)).sum() / TOP_K
        loss = loss + numerics.AUXILIARY["moe_aux_loss_coeff"] * balance
        loss = loss + numerics.AUXILIARY["moe_z_loss_coeff"] * logits.logsumexp(-1).square().mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if "mlp.gate." in name and p.grad is not None}


def differences(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> float:
    """The largest, over the largest entry."""
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((torch.tensor(found[name]) - expected[name]).abs().max()) for name in found) / scale


def test_a_router_has_its_auxiliary_gradient_whatever_the_aggregation_micro_batches_and_layout(
    rows: dict[str, Any], folders: tuple[Path, Path]
) -> None:
    expected = auxiliary_gradients(folders[0], numerics.repeated()[0])
    found = {name: row for name, row in rows["auxiliary"].items() if name.startswith("repeated")}
    assert len(found) == len(numerics.LAYOUTS) * 2 * 2
    assert {name: e for name, row in found.items() if (e := differences(row, expected)) > 2e-4} == {}


def test_micro_batches_enter_the_auxiliary_gradient_by_their_tokens(
    rows: dict[str, Any], folders: tuple[Path, Path]
) -> None:
    samples = numerics.mixed()
    tokens = [len(sample.token_ids) - 1 for sample in samples]
    parts = [auxiliary_gradients(folders[0], sample) for sample in samples]
    expected = {
        name: sum(n * part[name] for n, part in zip(tokens, parts, strict=True)) / sum(tokens) for name in parts[0]
    }
    found = {name: row for name, row in rows["auxiliary"].items() if name.startswith("mixed")}
    assert len(found) == len(numerics.LAYOUTS) * 2
    assert {name: e for name, row in found.items() if (e := differences(row, expected)) > 2e-4} == {}


def test_rows_that_pad_the_vocabulary_are_in_no_softmax_and_no_gradient(
    rows: dict[str, Any], folders: tuple[Path, Path]
) -> None:
    found, whole = rows["vocabulary"]["tp2sp"], rows["vocabulary"]["dp2"]
    assert (found["padded"], whole["padded"]) == (1, 0)
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    for i, (length, seed) in enumerate(((9, 3), (14, 4))):
        sample = numerics.sample(length, seed)
        expected = response_log_probs(model, sample.token_ids, sample.prompt_length, 0.7)
        assert found["log_probs"][i] == pytest.approx(expected, abs=2e-5)
        assert found["entropies"][i] == pytest.approx(whole["entropies"][i], abs=1e-4)  # sums over tokens
    gradient, expected = (torch.tensor(row["gradient"]["lm_head.weight"]) for row in (found, whole))
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
    # what a drafter's LM head is made of
    assert found["exported"] == [[numerics.VOCABULARY, 64]]


def test_an_update_that_is_not_finite_ends_the_run(rows: dict[str, Any]) -> None:
    assert "gradient norm nan; it must be finite" in rows["refused"]
