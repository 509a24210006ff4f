"""The experts that an engine records are those of the model, whatever drafts and cached prefixes there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import NgramConfig, SpeculationConfig
from megatron_tlt.data.routes import RouteFormat, Routes
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.types import Request, Response, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.speculation.strategy import OFF, Strategy
from tests.helpers.tiny_models import build_qwen2, write_lively_model

FORMAT = RouteFormat(layers=2, top_k=2, experts=4)
PROMPTS = [(5, 9, 7, 11), tuple(range(20, 60)), (3, 4)]
VLLM: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively_model("qwen3-moe", tmp_path_factory.mktemp("moe") / "model", vocab_size=64)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()  # a dense model's groups, of an earlier test in this process, have none for experts
    rollout = RolloutConfig(max_prompt_tokens=48, max_response_tokens=64, router_replay="ids_and_weights", vllm=VLLM)
    drafting = SpeculationConfig(drafter="ngram", num_speculative_tokens=3, ngram=NgramConfig(prompt_lookup_min=1))
    built = VllmEngine(folder, rollout, drafting, seed=7)
    yield built
    built.shutdown()


@torch.no_grad()
def chosen(folder: Path, response: Response) -> Routes:
    """transformers' experts of each token, ascending."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*response.prompt_token_ids, *response.token_ids]])
    logits = model(ids, output_router_logits=True).router_logits
    scores_TLE = torch.stack([layer.view(ids.shape[1], -1) for layer in logits], dim=1)
    found_TLK = scores_TLE.topk(2).indices.sort(dim=2).values
    return Routes(found_TLK, torch.ones(ids.shape[1]), scores_TLE.gather(2, found_TLK).softmax(dim=2))


@pytest.mark.parametrize("strategy", [OFF, Strategy("ngram", 3)], ids=["off", "drafts"])
def test_recorded_experts_are_those_of_the_model(strategy: Strategy, engine: VllmEngine, folder: Path) -> None:
    engine.set_strategy(strategy)
    sampling = SamplingSpec(temperature=1.0, max_tokens=40)
    asked = [Request(f"{p}-{i}", prompt, sampling, seed=10 * p + i) for p, prompt in enumerate(PROMPTS) for i in (0, 1)]
    responses = engine.generate(asked)
    drafted = sum(one.draft.num_draft_tokens for one in responses)
    accepted = sum(one.draft.num_accepted_tokens for one in responses)
    assert (drafted, accepted) == (0, 0) if strategy == OFF else 0 < accepted < drafted, "some drafts are rejected"
    for one in responses:
        assert one.routes is not None and one.routes.dtype == torch.uint8
        expected = chosen(folder, one)
        found = FORMAT.decode(one.routes)
        assert len(found.ids_TLK) == len(expected.ids_TLK) - 1 and bool(found.is_known_T.all())
        assert found.weights_TLK is not None and expected.weights_TLK is not None
        ids, order = found.ids_TLK.sort(dim=2)
        assert torch.equal(ids, expected.ids_TLK[:-1]), one.request_id
        weights = found.weights_TLK.gather(2, order)
        assert float((weights - expected.weights_TLK[:-1]).abs().max()) < 2.0**-10, "rounded to float16"
    choices = {tuple(row) for row in FORMAT.decode(responses[0].routes).ids_TLK[:, 0].tolist()}  # type: ignore[arg-type]
    assert len(choices) > 3, "tokens choose different experts"


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    dense = build_qwen2(tmp_path / "model", vocab_size=64)
    rollout = RolloutConfig(max_prompt_tokens=8, max_response_tokens=8, router_replay="ids", vllm=VLLM)
    with pytest.raises(ConfigError, match=r"rollout.router_replay: found ids; the model has no experts; allowed: none"):
        VllmEngine(dense, rollout, SpeculationConfig(enabled=False), seed=7)


@pytest.mark.parametrize("experts", [4, 254, 255, 600])
def test_experts_are_bytes_and_back(experts: int) -> None:
    form = RouteFormat(3, 2, experts)
    ids = torch.randint(experts, (5, 3, 2), generator=torch.Generator().manual_seed(1))
    ids[0, 0, 0] = experts - 1
    weights = torch.rand(5, 3, 2, generator=torch.Generator().manual_seed(2))
    for given in (None, weights):
        rows = form.encode(ids, given)
        width = form.width + (0 if given is None else 12)
        assert rows.shape == (5, width) and form.width == 6 * (1 if experts < 255 else 2)
        found = form.decode(torch.cat([rows, torch.full((1, width), 255, dtype=torch.uint8)]))
        assert torch.equal(found.ids_TLK[:5], ids) and found.is_known_T.tolist() == [True] * 5 + [False]
        assert found.ids_TLK[5].tolist() == [[0, 1]] * 3
        assert form.decode(rows[:0]).ids_TLK.shape == (0, 3, 2)
        assert (found.weights_TLK is None) == (given is None)
        if given is not None and found.weights_TLK is not None:
            assert float((found.weights_TLK[:5] / given - 1).abs().max()) < 2.0**-10
