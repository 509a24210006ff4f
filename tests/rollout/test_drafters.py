"""EAGLE and EAGLE-3 heads as drafters: lossless, switchable, and their weights read and written in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.errors import RunError
from megatron_tlt.rollout.recorded_states import RecordedStates
from megatron_tlt.rollout.types import DraftStats, Request, Response, SamplingSpec
from megatron_tlt.speculation.strategy import OFF, StepRecord
from tests.helpers.eagle_heads import build_eagle_head
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2, greedy, load_qwen2

from .conftest import NUM_DRAFTS, ROLLOUT, VOCAB
from .test_lossless import greedy_requests, sampled_p_values, total_draft
from .workers.layouts import PROMPTS

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine

WORKER = Path(__file__).parent / "workers" / "drafters.py"


@pytest.fixture(scope="module")
def expected(plain_engine: VllmEngine) -> list[tuple[int, ...]]:
    """The greedy responses without speculation."""
    return tokens_of(plain_engine.generate(greedy_requests(24, 40)))


def tokens_of(responses: list[Response]) -> list[tuple[int, ...]]:
    return [response.token_ids for response in responses]


def drafts_of(responses: list[Response]) -> list[DraftStats]:
    return [response.draft for response in responses]


def test_greedy_is_that_of_a_plain_engine_and_the_accounts_add_up(
    drafting: VllmEngine, expected: list[tuple[int, ...]]
) -> None:
    steps: list[StepRecord] = []
    responses = drafting.generate(greedy_requests(24, 40), on_step=steps.append)
    assert tokens_of(responses) == expected
    for response in responses:
        draft = response.draft
        assert draft.num_tokens == len(response.token_ids)
        assert draft.num_draft_tokens <= NUM_DRAFTS * draft.num_drafts and draft.num_drafts < draft.num_steps
        assert sum(draft.accepted_per_position) == draft.num_accepted_tokens
        assert 0 <= draft.num_steps + draft.num_accepted_tokens - draft.num_tokens <= NUM_DRAFTS
    total = total_draft(responses)
    assert 0 < total.num_accepted_tokens < total.num_draft_tokens  # some right, some wrong
    assert sum(step.num_draft_tokens for step in steps) == total.num_draft_tokens
    assert sum(step.num_accepted_tokens for step in steps) == total.num_accepted_tokens
    per_position = zip(*(step.accepted_per_position for step in steps), strict=True)
    assert tuple(map(sum, per_position)) == total.accepted_per_position


def test_switching_off_and_on(drafting: VllmEngine, expected: list[tuple[int, ...]]) -> None:
    requests = greedy_requests(24, 40)
    head = drafting.strategy
    first = drafting.generate(requests)
    drafting.set_strategy(OFF)
    off = drafting.generate(requests)
    assert tokens_of(off) == expected and total_draft(off).num_draft_tokens == 0
    drafted: list[int] = []

    def switch(step: StepRecord) -> None:
        drafted.append(step.num_draft_tokens)
        if len(drafted) in (8, 16):
            drafting.set_strategy(head if drafting.strategy == OFF else OFF)

    switched = drafting.generate(requests, on_step=switch)  # on in the middle of the rollout, off again
    drafting.set_strategy(head)
    assert tokens_of(switched) == expected
    assert sum(drafted[:8]) == 0 and min(drafted[9:16]) > 0 and sum(drafted[17:]) == 0
    again = drafting.generate(requests)
    assert (tokens_of(again), drafts_of(again)) == (tokens_of(first), drafts_of(first))


def test_up_to_the_longest_sequence(drafting: VllmEngine, plain_engine: VllmEngine) -> None:
    """Drafts go on up to the last token, though none fits behind the longest sequence itself."""
    spec = SamplingSpec(temperature=0.0, max_tokens=ROLLOUT.max_response_tokens)
    requests = [Request(f"l{i}", (*range(VOCAB), *range(i, VOCAB), *range(16 + i)), spec, seed=0) for i in range(3)]
    assert {len(request.prompt_token_ids) for request in requests} == {ROLLOUT.max_prompt_tokens}
    expected = tokens_of(plain_engine.generate(requests))
    head = drafting.strategy
    assert tokens_of(drafting.generate(requests)) == expected
    drafting.set_strategy(OFF)
    off = drafting.generate(requests)
    drafting.set_strategy(head)
    assert tokens_of(off) == expected
    assert total_draft(off).num_draft_tokens == 0


def test_weights_are_the_folders_and_new_ones_change_the_drafts_only(
    drafting: VllmEngine, head: Path, expected: list[tuple[int, ...]]
) -> None:
    state = load_file(head / "model.safetensors")
    read = {name: tensor for name, tensor, shard in drafting.read_drafter_weights() if shard is None}
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)
    assert drafting.versions == {"policy": 0, "drafter": 0}
    requests = greedy_requests(24, 40)
    before = drafting.generate(requests)

    drafting.begin_update("drafter")
    for tensor in read.values():
        tensor.copy_(tensor.flip(0))
    assert drafting.versions == {"policy": 0, "drafter": None}
    with pytest.raises(RunError, match="the drafter's weights are half-written"):
        drafting.generate(requests)
    strategy = drafting.strategy
    drafting.set_strategy(OFF)
    assert tokens_of(drafting.generate(requests)) == expected  # the drafter has no part in it
    drafting.set_strategy(strategy)
    drafting.finish_update("drafter", 5)
    assert drafting.versions == {"policy": 0, "drafter": 5}
    after = drafting.generate(requests)
    assert tokens_of(after) == expected
    assert drafts_of(after) != drafts_of(before)

    drafting.begin_update("drafter")
    for name, tensor in read.items():
        tensor.copy_(state[name])
    drafting.finish_update("drafter", 6)
    assert drafts_of(drafting.generate(requests)) == drafts_of(before)

    drafting.begin_update("drafter")  # as after a sleep that drops weights
    for tensor in read.values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    drafting.restore_drafter()
    assert drafting.versions["drafter"] == 0
    assert all(torch.equal(read[name], state[name]) for name in state)
    assert drafts_of(drafting.generate(requests)) == drafts_of(before)


def test_recorded_states_are_those_of_the_target(drafting: VllmEngine, reference: Qwen2ForCausalLM, head: Path) -> None:
    """Under drafts, without, and behind prompts that came from the prefix cache."""
    recorded = RecordedStates(1 << 28)
    drafting.record_into(recorded)
    prompt = tuple(i % VOCAB for i in range(70))  # two blocks of the cache
    cached = [Request(f"c{i}", prompt, SamplingSpec(temperature=1.0, max_tokens=9), seed=i) for i in range(3)]
    strategy, steps = drafting.strategy, 0

    def switch(_: StepRecord) -> None:
        nonlocal steps
        steps += 1
        drafting.set_strategy(OFF if steps // 4 % 2 else strategy)

    # whatever is decoded outside of a recorded rollout, such as an evaluation, is no part of it
    recorded.end()
    drafting.generate([Request("before", prompt, SamplingSpec(temperature=1.0, max_tokens=9), seed=9)])
    recorded.begin()
    responses = drafting.generate([*greedy_requests(6, 20), *cached], on_step=switch)
    drafting.set_strategy(strategy)
    drafting.record_into(None)
    found = {one.request_id: one for one in recorded.take()}
    layers = json.loads((head / "config.json").read_text()).get("eagle_aux_hidden_state_layer_ids", [])
    assert found.keys() == {response.request_id for response in responses} and recorded.dropped == 0
    for response in responses:
        one = found[response.request_id]
        assert one.token_ids == (*response.prompt_token_ids, *response.token_ids)
        assert one.prompt_length == len(response.prompt_token_ids)
        before_norm: list[torch.Tensor] = []  # transformers gives the normed ones at its place
        hook = reference.model.norm.register_forward_pre_hook(lambda _, given, kept=before_norm: kept.append(given[0]))
        with torch.no_grad():
            states = [*reference(torch.tensor([one.token_ids[:-1]]), output_hidden_states=True).hidden_states]
        hook.remove()
        final, states[-1] = states[-1], before_norm[0]
        expected = torch.cat([*(states[layer][0] for layer in layers), final[0]], dim=-1)
        assert one.hidden.float() == pytest.approx(expected, abs=2e-2, rel=2e-2)


def test_policy_and_drafter_are_read_apart(drafting: VllmEngine, plain_engine: VllmEngine) -> None:
    assert {name for name, _, _ in drafting.read_weights()} == {name for name, _, _ in plain_engine.read_weights()}
    policy = {tensor.data_ptr() for _, tensor, _ in drafting.read_weights()}
    assert policy.isdisjoint(tensor.data_ptr() for _, tensor, _ in drafting.read_drafter_weights())
    with pytest.raises(RunError, match=r"no drafter model; allowed: speculation\.drafter eagle or eagle3"):
        plain_engine.read_drafter_weights()
    with pytest.raises(RunError, match="no part 'drafter' in this engine; allowed: policy"):
        plain_engine.begin_update("drafter")


@pytest.mark.cpu_patch
def test_samples_have_the_exact_marginals(drafting: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    joint_p, third_p, drafts = sampled_p_values(drafting, reference, (*range(VOCAB), 3), 0.7, 0.9)
    assert drafts.num_accepted_tokens > 50
    assert min(joint_p, third_p) > 1e-4, f"p-values {joint_p:.3g} (tokens 1 and 2), {third_p:.3g} (token 3)"


def test_drafts_are_drawn_from_the_distribution_that_they_are_verified_with(
    drafting: VllmEngine, head_and_method: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By token, as often as the sum of its probabilities says; certain drafts have no distribution."""
    runner = drafting._runner
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    upstream = runner._get_spec_decode_draft_probs

    def watch(metadata: Any) -> torch.Tensor | None:
        probs = upstream(metadata)
        if probs is not None:
            seen.append((metadata.draft_token_ids.clone(), probs.clone()))
        return probs

    monkeypatch.setattr(runner, "_get_spec_decode_draft_probs", watch)
    spec = SamplingSpec(temperature=1.0, max_tokens=40)
    requests = [Request(f"d{i}", tuple(range(VOCAB)), spec, seed=i) for i in range(200)]
    first = drafting.generate(requests)
    if head_and_method[1] == "greedy":
        assert not seen
        return
    tokens, probs = (torch.cat(column) for column in zip(*seen, strict=True))
    assert probs.shape == (total_draft(first).num_draft_tokens, VOCAB)
    assert torch.allclose(probs.sum(-1), torch.ones(len(probs)), atol=1e-5)
    assert (probs.gather(1, tokens.long()[:, None]) > 0.0).all()
    expected, spread = probs.double().sum(0), (probs * (1 - probs)).double().sum(0).sqrt()
    counts = torch.bincount(tokens.long(), minlength=VOCAB)
    assert ((counts - expected).abs() < 4.5 * spread + 1e-9).all()
    assert tokens_of(drafting.generate(requests)) == tokens_of(first)  # by the requests' seeds alone


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_over_two_ranks_from_dummy_weights(kind: str, tmp_path: Path) -> None:
    """The drafter comes from its folder where the policy does not; the policy's weights go in slice by slice."""
    shape = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2}
    target = build_qwen2(tmp_path / "target", vocab_size=48, tie=False, scale=0.12, **shape)
    head = build_eagle_head(kind, target, tmp_path / kind)
    run_torchrun(WORKER, 2, [str(target), str(head), str(tmp_path)], timeout_s=240)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    model = load_qwen2(target)
    for prompt, tokens in zip(PROMPTS, first["tokens"], strict=True):
        assert len(tokens) == 48 and tokens == greedy(model, prompt, tokens)
    assert sum(first["accepted"]) > 0
