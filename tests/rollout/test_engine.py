"""The engine's contract on one process: log-probs, accounts, determinism, weights, refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rollout.types import Request, Response, SamplingSpec
from megatron_tlt.rollout.vllm_weights import read_weights
from megatron_tlt.speculation.strategy import OFF, StepRecord
from tests.helpers.launch import run_python
from tests.helpers.tiny_models import build_qwen2, greedy, load_qwen2, logits_of, processed_log_probs

from .conftest import NGRAM, ROLLOUT, SPECULATION, VOCAB

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine

WORKERS = Path(__file__).parent / "workers"


def mixed_requests(count: int = 24, max_tokens: int = 32) -> list[Request]:
    """Sampled and greedy requests with repetitive prompts, different filters and lengths."""
    rng = random.Random(5)
    specs = [
        SamplingSpec(temperature=1.0, max_tokens=max_tokens),
        SamplingSpec(temperature=0.7, top_p=0.9, max_tokens=max_tokens),
        SamplingSpec(temperature=1.3, top_k=8, max_tokens=max_tokens // 2),
        SamplingSpec(temperature=0.0, max_tokens=max_tokens),
    ]
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(rng.randint(2, 10))) * 4 for _ in range(count)]
    return [Request(f"m{i}", prompt, specs[i % 4], seed=1000 + i) for i, prompt in enumerate(prompts)]


def outcome(responses: list[Response]) -> list[tuple[tuple[int, ...], tuple[float, ...], str]]:
    return [(tuple(r.token_ids), tuple(r.log_probs), r.finish_reason) for r in responses]


def expected_log_probs(reference: Qwen2ForCausalLM, response: Response, spec: SamplingSpec) -> list[float]:
    tokens = (*response.prompt_token_ids, *response.token_ids)
    logits = logits_of(reference, tokens)[len(response.prompt_token_ids) - 1 : -1]
    if spec.top_k > 0:
        smallest = logits.topk(spec.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    log_probs = processed_log_probs(logits, spec.temperature or 1.0, spec.top_p)
    return log_probs[torch.arange(len(response.token_ids)), torch.tensor(response.token_ids)].tolist()


def test_log_probs_are_those_of_transformers(engine: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    requests = mixed_requests()
    responses = engine.generate(requests)
    assert sum(response.draft.num_accepted_tokens for response in responses) > 0
    for request, response in zip(requests, responses, strict=True):
        assert response.request_id == request.request_id
        assert len(response.log_probs) == len(response.token_ids) == request.sampling.max_tokens
        expected = expected_log_probs(reference, response, request.sampling)
        assert response.log_probs == pytest.approx(expected, abs=1e-4)


def test_rows_that_pad_the_vocabulary_are_in_no_softmax(engine: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    head = engine._runner.get_model().lm_head.weight
    assert len(head) > VOCAB
    padding = head[VOCAB:].clone()
    try:
        with torch.no_grad():
            # either sign: one of them would win every softmax
            head[VOCAB::2], head[VOCAB + 1 :: 2] = 3.0, -3.0
        requests = mixed_requests(8)
        for request, response in zip(requests, engine.generate(requests), strict=True):
            assert max(response.token_ids) < VOCAB
            expected = expected_log_probs(reference, response, request.sampling)
            assert response.log_probs == pytest.approx(expected, abs=1e-4)
    finally:
        with torch.no_grad():
            head[VOCAB:] = padding


def test_accounts_add_up(engine: VllmEngine) -> None:
    steps: list[StepRecord] = []
    order: list[str] = []
    responses = engine.generate(mixed_requests(), lambda response: order.append(response.request_id), steps.append)
    assert sorted(order) == sorted(response.request_id for response in responses)
    for response in responses:
        draft = response.draft
        assert draft.num_tokens == len(response.token_ids)
        assert len(draft.accepted_per_position) == SPECULATION.num_speculative_tokens
        assert sum(draft.accepted_per_position) == draft.num_accepted_tokens
        assert list(draft.accepted_per_position) == sorted(draft.accepted_per_position, reverse=True)
        assert draft.accepted_per_position[0] <= draft.num_drafts < draft.num_steps
        # each step emits its accepted drafts and one token more, but for what the length limit cut off
        assert 0 <= draft.num_steps + draft.num_accepted_tokens - draft.num_tokens <= SPECULATION.num_speculative_tokens
    assert sum(step.num_tokens for step in steps) == sum(response.draft.num_tokens for response in responses)
    assert sum(step.num_draft_tokens for step in steps) == sum(r.draft.num_draft_tokens for r in responses)
    assert sum(step.num_accepted_tokens for step in steps) == sum(r.draft.num_accepted_tokens for r in responses)
    assert steps[0].batch == len(responses)
    assert sum(step.batch for step in steps) == sum(response.draft.num_steps for response in responses)
    ends = [step.start + step.duration for step in steps]
    assert all(end <= step.start for end, step in zip(ends, steps[1:], strict=False))
    assert {response.finished_at for response in responses} <= set(ends) | {max(r.finished_at for r in responses)}


def test_a_stop_token_ends_the_response(engine: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    prompt = (1, 2, 3, 4) * 5
    (response,) = engine.generate([Request("full", prompt, SamplingSpec(temperature=0.0, max_tokens=30), seed=0)])
    full = list(response.token_ids)
    assert full == greedy(reference, prompt, full)
    stop = full[12]
    spec = SamplingSpec(temperature=0.0, max_tokens=30, stop_token_ids=(stop,))
    (response,) = engine.generate([Request("stop", prompt, spec, seed=0)])
    assert list(response.token_ids) == full[: full.index(stop) + 1]
    assert response.finish_reason == "stop"
    (response,) = engine.generate([Request("length", prompt, SamplingSpec(temperature=0.0, max_tokens=5), seed=0)])
    assert (list(response.token_ids), response.finish_reason) == (full[:5], "length")


def test_a_reused_engine_repeats_itself_bit_for_bit(engine: VllmEngine) -> None:
    requests = mixed_requests()
    first = outcome(engine.generate(requests))
    engine.generate(mixed_requests(count=9, max_tokens=20))  # something else in between
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert outcome(engine.generate(requests)) == first
    assert torch.equal(torch.get_rng_state(), state)  # and the caller's generator is left alone


def test_a_request_does_not_depend_on_who_else_is_in_the_batch(engine: VllmEngine) -> None:
    requests = mixed_requests()
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests[:4]]
    assert [response.token_ids for response in alone] == [response.token_ids for response in together[:4]]


@pytest.mark.distributed
def test_a_fresh_process_gives_the_same_bits(engine: VllmEngine, model_folder: Path, tmp_path: Path) -> None:
    here = outcome(engine.generate(mixed_requests()))
    arguments = [str(model_folder), str(tmp_path / "out.json")]
    run_python(WORKERS / "generate_once.py", arguments, 300, {"OMP_NUM_THREADS": "1"}, fresh=True)
    there = json.loads((tmp_path / "out.json").read_text())
    assert [(tuple(tokens), tuple(log_probs), reason) for tokens, log_probs, reason in there] == here


def test_read_weights_are_the_files(engine: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    expected = reference.state_dict()
    read = {name: tensor for name, tensor, shard in engine.read_weights() if shard is None}
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_load_weights_changes_what_is_generated(
    engine: VllmEngine, reference: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    other = load_qwen2(build_qwen2(tmp_path / "other", vocab_size=VOCAB, tie=False, scale=0.16, seed=99))
    prompts = [(5, 6, 7) * 4, (9, 1, 1, 2) * 3]
    spec = SamplingSpec(temperature=0.0, max_tokens=24)
    requests = [Request(f"w{i}", prompt, spec, seed=0) for i, prompt in enumerate(prompts)]
    before = [list(response.token_ids) for response in engine.generate(requests)]
    try:
        count = engine.load_weights(other.state_dict().items())
        assert count == len(other.state_dict())
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor, _ in engine.read_weights())
        after = [list(response.token_ids) for response in engine.generate(requests)]
    finally:
        engine.load_weights(reference.state_dict().items())
    assert after == [greedy(other, prompt, tokens) for prompt, tokens in zip(prompts, after, strict=True)] != before
    assert [list(response.token_ids) for response in engine.generate(requests)] == before


def test_bad_weights_are_refused_by_name(engine: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    state = reference.state_dict()
    try:
        with pytest.raises(RunError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            engine.load_weights((n, t) for n, t in state.items() if n != "model.layers.1.mlp.up_proj.weight")
        with pytest.raises(RunError, match="no_such_thing"):
            engine.load_weights([("model.no_such_thing.weight", torch.zeros(2, 2))])
        with pytest.raises(RunError, match=r"model\.norm\.weight"):
            engine.load_weights([("model.norm.weight", torch.zeros(3))])
    finally:
        engine.load_weights(state.items())


def test_an_update_that_failed_leaves_an_engine_that_does_not_generate(
    engine: VllmEngine, reference: Qwen2ForCausalLM
) -> None:
    state = reference.state_dict()
    request = Request("u", (1, 2, 3), SamplingSpec(temperature=0.0, max_tokens=4), seed=0)
    engine.load_weights(state.items())
    (before,) = outcome(engine.generate([request]))
    version = engine.versions["policy"]
    assert version is not None

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(state.items()):
            if index == 5:
                raise OSError("the link is down")
            yield name, torch.zeros_like(tensor)

    with pytest.raises(OSError, match="the link is down"):
        engine.load_weights(broken())
    assert engine.versions == {"policy": None}
    with pytest.raises(RunError, match=rf"the policy's weights are not completely loaded \(last version: {version}\)"):
        engine.generate([request])
    engine.load_weights(state.items())
    assert engine.versions == {"policy": version + 1}
    assert outcome(engine.generate([request])) == [before]

    with pytest.raises(RunError, match="no update of the policy's weights was started"):
        engine.finish_update("policy", version + 2)
    engine.begin_update("policy")
    with pytest.raises(RunError, match="the policy's weights are half-written: an update was started but not finished"):
        engine.generate([request])
    engine.load_weights(state.items())
    assert engine.versions == {"policy": None}  # a part of the update
    engine.finish_update("policy", version + 7)
    assert engine.versions == {"policy": version + 7}
    assert outcome(engine.generate([request])) == [before]


def test_an_update_in_the_middle_of_a_rollout_stops_it(engine: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    begun: list[StepRecord] = []

    def begin(step: StepRecord) -> None:
        begun.append(step)
        engine.begin_update("policy")
        with pytest.raises(RunError, match="requests are still running"):
            engine.finish_update("policy", 1)

    request = Request("m", (1, 2, 3), SamplingSpec(temperature=0.0, max_tokens=30), seed=0)
    try:
        with pytest.raises(RunError, match="the policy's weights are half-written"):
            engine.generate([request], on_step=begin)
        assert len(begun) == 1
    finally:
        engine.load_weights(reference.state_dict().items())
        engine.finish_update("policy", 1)
    assert len(engine.generate([request])) == 1


def test_weights_in_a_layer_of_an_unknown_kind_are_named(engine: VllmEngine) -> None:
    model = engine._runner.get_model()
    model.model.extra = torch.nn.LayerNorm(4)
    try:
        with pytest.raises(RunError, match=r"model\.extra\.weight is in a layer of kind LayerNorm"):
            list(read_weights(model))
    finally:
        del model.model.extra
    scales = model.model.layers[0].mlp.down_proj
    scales.register_parameter("weight_scale", torch.nn.Parameter(torch.ones(1), requires_grad=False))
    try:
        with pytest.raises(RunError, match=r"layers\.0\.mlp\.down_proj\.weight_scale"):
            list(read_weights(model))
    finally:
        del scales.weight_scale


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("long", (1,) * 81, SamplingSpec(max_tokens=4), 0), "request long: its prompt has 81 tokens.* 80"),
        (Request("empty", (), SamplingSpec(max_tokens=4), 0), "request empty: its prompt has 0 tokens"),
        (
            Request("far", (1,) * 80, SamplingSpec(max_tokens=65), 0),
            "request far: .* max_tokens 65; allowed are 1 to 64",
        ),
        (Request("hot", (1,), SamplingSpec(temperature=-1.0, max_tokens=4), 0), "request hot: .*temperature"),
        (Request("alien", (VOCAB + 5,), SamplingSpec(max_tokens=4), 0), "request alien: "),
    ],
)
def test_requests_that_do_not_fit_are_refused(engine: VllmEngine, request_: Request, message: str) -> None:
    good = Request("good", (1, 2, 3), SamplingSpec(temperature=0.0, max_tokens=4), 0)
    finished: list[Response] = []
    with pytest.raises(ConfigError, match=message):
        engine.generate([good, request_], finished.append)
    assert finished == []
    assert len(engine.generate([good])[0].token_ids) == 4  # and the engine is as good as before


def test_an_id_used_twice_is_refused(engine: VllmEngine) -> None:
    twice = [Request("same", (1, 2), SamplingSpec(max_tokens=2), 0)] * 2
    with pytest.raises(ConfigError, match="request same: the id is used twice"):
        engine.generate(twice)


def test_a_callback_that_raises_leaves_the_engine_usable(engine: VllmEngine) -> None:
    requests = mixed_requests()
    expected = outcome(engine.generate(requests))

    def interrupt(step: StepRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests, on_step=interrupt)
    assert outcome(engine.generate(requests)) == expected


def test_speculation_switches_between_steps(engine: VllmEngine, reference: Qwen2ForCausalLM) -> None:
    prompt = tuple(range(VOCAB)) * 2  # every token is found in it, so that each step has a draft
    records: list[StepRecord] = []

    def switch(step: StepRecord) -> None:
        records.append(step)
        engine.set_strategy(NGRAM if len(records) < 3 or len(records) > 12 else OFF)

    (response,) = engine.generate(
        [Request("switch", prompt, SamplingSpec(temperature=0.0, max_tokens=60), 0)], on_step=switch
    )
    engine.set_strategy(NGRAM)
    drafting = [step.num_draft_tokens > 0 for step in records]
    assert any(drafting[:3]) and not any(drafting[4:12]) and any(drafting[13:])
    assert list(response.token_ids) == greedy(reference, prompt, response.token_ids)


def test_an_engine_without_speculation_says_so(plain_engine: VllmEngine) -> None:
    with pytest.raises(ConfigError, match=r"strategy ngram-3; this engine's drafters: off$"):
        plain_engine.set_strategy(NGRAM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm": {"seed": 3}}, "rollout.vllm.seed is managed by run.seed"),
        ({"vllm": {"no_such_field": 3}}, "rollout.vllm.no_such_field: vLLM's EngineArgs has no such field"),
        ({"tensor_parallel_size": 3}, "rollout.tensor_parallel_size is 3; allowed are divisors of the world size, 1"),
        ({"max_response_tokens": 5000}, "vLLM refused"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    engine: VllmEngine, model_folder: Path, changes: dict[str, object], message: str
) -> None:
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    with pytest.raises(ConfigError, match=message):
        VllmEngine(model_folder, RolloutConfig(**{**dict(ROLLOUT), **changes}), SpeculationConfig(), seed=0)


def test_a_missing_model_folder_is_refused(engine: VllmEngine, tmp_path: Path) -> None:
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    with pytest.raises(ConfigError, match=r"no config\.json"):
        VllmEngine(tmp_path / "nothing", ROLLOUT, SpeculationConfig(), seed=0)
