"""One engine under changing strategies: lossless, its head without gaps, and what was chosen in its records."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from megatron_tlt.config.speculation import AdaptiveConfig, SkippedConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.adaptive import build_controller
from megatron_tlt.rollout.engine_speculation import EngineSpeculation
from megatron_tlt.rollout.skipped_states import SkippedStates
from megatron_tlt.rollout.types import Request, Response, SamplingSpec
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.token_drafter import FinishedResponse
from tests.helpers.drafters import RandomChooser
from tests.helpers.eagle_heads import build_eagle_head
from tests.helpers.launch import run_torchrun
from tests.helpers.statistics import chi_squared_p_value
from tests.helpers.tiny_models import build_qwen2, greedy, load_qwen2

from .conftest import NGRAM, NUM_DRAFTS, ROLLOUT, SPECULATION, VOCAB, strategies_of
from .test_lossless import exact_marginals, greedy_requests, sampled_counts, total_draft
from .workers.layouts import PROMPTS

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine

WORKER = Path(__file__).parent / "workers" / "strategies.py"


@pytest.fixture(scope="module")
def many() -> list[Request]:
    """More prompts than run at once."""
    return [
        Request(f"p{i}", request.prompt_token_ids, request.sampling, i, problem_key=f"p{i}")
        for i, request in enumerate(greedy_requests(count=260, max_tokens=24))
    ]


@pytest.fixture(scope="module")
def expected(plain_engine: VllmEngine, many: list[Request]) -> list[tuple[int, ...]]:
    """The greedy responses of an engine without speculation."""
    return [response.token_ids for response in plain_engine.generate(many)]


@pytest.fixture(scope="module")
def remembering(drafting: VllmEngine, many: list[Request]) -> VllmEngine:
    """The engine, whose suffix drafter knows responses to the problems that are not the greedy ones all along."""
    spec = SamplingSpec(temperature=0.6, max_tokens=24)
    responses = drafting.generate([dataclasses.replace(request, sampling=spec) for request in many])
    for drafter in drafting.token_drafters.values():
        drafter.end_rollout(
            FinishedResponse(request.problem_key, response.prompt_token_ids, response.token_ids)
            for request, response in zip(many, responses, strict=True)
        )
    return drafting


def assert_nothing_decodes(engine: VllmEngine, folder: Path) -> None:
    """The suffix drafter refuses to take responses from a file while it holds a request."""
    suffix = engine.token_drafters["suffix"]
    assert isinstance(suffix, SuffixDrafter)
    suffix.save(folder / "suffix")
    suffix.load(folder / "suffix")


def test_greedy_is_that_of_a_plain_engine_whatever_the_switches(
    remembering: VllmEngine, many: list[Request], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    drafting = remembering
    head = drafting.strategy
    right, wrong = Counter[str](), Counter[str]()
    for seed in (1, 2, 3):
        chooser = RandomChooser(strategies_of(drafting), seed, every=2)
        before = drafting.skipped.filled
        responses = drafting.generate(many, chooser=chooser)
        assert [response.token_ids for response in responses] == expected
        total = total_draft(responses)
        verified = [step.num_draft_tokens for step in chooser.records]
        assert sum(verified) == total.num_draft_tokens
        for strategy in strategies_of(drafting):
            drafted, accepted = chooser.drafts_of(strategy.source)
            right[strategy.source] += accepted
            wrong[strategy.source] += drafted - accepted
        assert drafting.skipped.filled > before
    assert (right.pop("off"), wrong.pop("off")) == (0, 0)
    assert min(right.values()) > 0 and min(wrong.values()) > 20, (right, wrong)
    assert_nothing_decodes(drafting, tmp_path)
    drafting.set_strategy(head)


@pytest.mark.parametrize(
    ("tuner", "lengths"), [("static", None), ("beg_mab", None), ("beg_mab", "optimal"), ("solver", "classes")]
)
def test_greedy_is_that_of_a_plain_engine_under_every_tuner(
    remembering: VllmEngine,
    many: list[Request],
    expected: list[tuple[int, ...]],
    tuner: str,
    lengths: Literal["classes", "optimal"] | None,
) -> None:
    """By measured times, in which no two runs are alike: whatever is chosen, the responses are the same."""
    drafting = remembering
    head = drafting.strategy
    strategies = [head] if tuner == "static" else strategies_of(drafting)
    names = [strategy.name for strategy in strategies]
    adaptive = AdaptiveConfig(tuner=tuner, strategies=names, lengths=lengths, threshold=256, patience=1, hold_steps=2)
    section = SPECULATION.model_copy(update={"drafter": head.drafter, "adaptive": adaptive})
    chooser = EngineSpeculation(section, build_controller(section, 64, seed=1), probe_share=0.0)
    seen: list[StepRecord] = []
    chooser.begin_rollout(many)
    responses = drafting.generate(many, on_finished=chooser.finished, on_step=seen.append, chooser=chooser)
    chooser.end_rollout(many)
    drafting.set_strategy(head)
    assert [response.token_ids for response in responses] == expected
    assert total_draft(responses).num_accepted_tokens > 0
    assert len({step.strategy for step in seen}) >= min(3, 1 + len(strategies))


def test_the_suffix_drafter_learns_from_responses_whatever_they_were_drafted_by(
    engine: VllmEngine, many: list[Request], expected: list[tuple[int, ...]]
) -> None:
    """The first responses are generated without it; when they come again, it knows them."""
    engine.set_strategy(OFF)
    engine.generate(many[:60])
    engine.set_strategy(Strategy("suffix", NUM_DRAFTS))
    again = engine.generate([dataclasses.replace(request, request_id=f"b{i}") for i, request in enumerate(many[:60])])
    engine.set_strategy(NGRAM)
    assert [response.token_ids for response in again] == expected[:60]
    total = total_draft(again)
    assert total.num_accepted_tokens > 0.7 * total.num_draft_tokens > 500


def test_records_say_what_was_verified_and_what_was_drafted(drafting: VllmEngine, many: list[Request]) -> None:
    head = drafting.strategy
    chooser = RandomChooser(strategies_of(drafting), seed=5, every=1, budgets=False)
    seen: list[StepRecord] = []
    drafting.generate(many[:40], on_step=seen.append, chooser=chooser)
    assert drafting.strategy == chooser.records[-1].next_strategy  # the last one stays
    drafting.set_strategy(head)
    assert seen == chooser.records
    assert seen[0].strategy == OFF and seen[0].had_prefill and not seen[-1].had_prefill
    for before, after in itertools.pairwise(seen):
        assert after.strategy == before.next_strategy
        assert after.num_draft_tokens <= after.strategy.num_tokens * after.batch
    assert chooser.batches[0] == (40, 0)
    assert all(batch == requests for batch, requests in chooser.batches[1:])


def test_budgets_cut_each_request(drafting: VllmEngine, many: list[Request], expected: list[tuple[int, ...]]) -> None:
    head = drafting.strategy
    requests = many[:8]
    drafting.set_strategy(head, {request.request_id: index % 3 for index, request in enumerate(requests)})
    responses = drafting.generate(requests)
    drafting.set_strategy(head)
    assert [response.token_ids for response in responses] == expected[:8]
    for index, response in enumerate(responses):
        draft = response.draft
        # the last tokens of a response are drafted for as far as they can be of use
        assert draft.num_draft_tokens <= (index % 3) * draft.num_drafts
        assert (draft.num_drafts > 0) == (index % 3 > 0)
        assert not any(draft.accepted_per_position[index % 3 :])


def drafts_by_context(engine: VllmEngine, requests: list[Request], off: range) -> dict[tuple[str, int], list[int]]:
    """The head's drafts by (request, tokens behind which they were made), with strategy off in some of the steps."""
    head, found, steps = engine.strategy, {}, 0
    runner = engine._runner
    upstream = runner.propose_draft_token_ids

    def listen(scheduler_output: object, sampled: list[list[int]], *rest: object) -> list[list[int]]:
        drafts = upstream(scheduler_output, sampled, *rest)
        for row, internal_id in enumerate(runner.input_batch.req_ids):
            if drafts[row]:
                name = engine._switch.external_id(internal_id)
                found[name, int(runner.input_batch.num_tokens_no_spec[row])] = drafts[row]
        return drafts

    def switch(_: StepRecord) -> None:
        nonlocal steps
        steps += 1
        engine.set_strategy(OFF if steps in off else head)

    runner.propose_draft_token_ids = listen
    try:
        engine.generate(requests, on_step=switch)
    finally:
        runner.propose_draft_token_ids = upstream
        engine.set_strategy(head)
    return found


@pytest.mark.parametrize("forward", [8192, 13])
def test_a_filled_gap_leaves_no_trace_in_the_drafts(
    drafting: VllmEngine, monkeypatch: pytest.MonkeyPatch, forward: int
) -> None:
    """Behind a gap the head drafts what it drafts without one, in one forward or in many; unfilled it does not."""
    requests = greedy_requests(12, 40)
    off = range(6, 24)
    whole = drafts_by_context(drafting, requests, range(0))
    drafting.sleep()  # what earlier tests left in memory has no part in it
    drafting.wake_up()
    monkeypatch.setattr(type(drafting._switch._head), "max_tokens", forward)
    start = drafting.skipped
    filled = drafts_by_context(drafting, requests, off)
    after = drafting.skipped
    assert after.filled - start.filled == after.skipped - start.skipped >= len(off) * len(requests)
    assert after.dropped == start.dropped
    both = [key for key in filled if key in whole]
    assert len(both) > 12 * 10
    assert [filled[key] for key in both] == [whole[key] for key in both]

    store = SkippedStates(SkippedConfig(window=0), 1)
    monkeypatch.setattr(drafting._switch, "_skipped", store)
    unfilled = drafts_by_context(drafting, requests, off)
    assert store.counts.dropped == store.counts.skipped > 0
    differing = sum(unfilled[key] != whole[key] for key in unfilled if key in whole)
    assert differing > 10


def letters(tokens: tuple[int, ...]) -> str:
    return "".join(chr(ord("a") + token) if token < 26 else chr(ord("A") + token - 26) for token in tokens)


def cut_at(text: str, stop: str, shortest: int) -> int:
    """Tokens (letters) of the shortest beginning that ends in ``stop`` and is longer than ``shortest``; else all."""
    ends = (end for end in range(shortest + 1, len(text) + 1) if text[:end].endswith(stop))
    return next(ends, len(text))


@pytest.mark.parametrize("min_tokens", [0, 7])
def test_stop_strings_end_responses_where_they_end_without_speculation(
    drafting: VllmEngine, many: list[Request], expected: list[tuple[int, ...]], min_tokens: int
) -> None:
    head = drafting.strategy
    requests, ends = [], []
    for request, tokens in zip(many[:60], expected, strict=False):
        stop = letters(tokens)[9:11]
        spec = SamplingSpec(0.0, max_tokens=24, stop=("??", stop), min_tokens=min_tokens)
        requests.append(Request(request.request_id, request.prompt_token_ids, spec, 0, request.problem_key))
        ends.append(cut_at(letters(tokens), stop, min_tokens))
    chooser = RandomChooser([s for s in strategies_of(drafting) if s != OFF], seed=8)
    responses = drafting.generate(requests, chooser=chooser)
    drafting.set_strategy(head)
    assert [response.token_ids for response in responses] == [
        tokens[:end] for tokens, end in zip(expected, ends, strict=False)
    ]
    assert {response.finish_reason for response in responses} == {"stop"}
    assert all(
        len(response.log_probs) == response.draft.num_tokens == end
        for response, end in zip(responses, ends, strict=True)
    )
    # more where tests before this one left their responses in the suffix drafter
    assert total_draft(responses).num_accepted_tokens > 20


def test_abort_in_mid_draft_leaves_the_others_alone(
    remembering: VllmEngine, many: list[Request], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    drafting = remembering
    head = drafting.strategy
    done: list[Response] = []
    steps = 0

    def abort(step: StepRecord) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            assert step.num_draft_tokens > 0
            for name in ("p0", "p5", "p59"):
                drafting.abort(name)

    drafting.set_strategy(Strategy("suffix", 2))
    responses = drafting.generate(many[:60], done.append, abort)
    drafting.set_strategy(head)
    assert len(done) == len(responses) == 60
    assert_nothing_decodes(drafting, tmp_path)
    for index, (response, tokens) in enumerate(zip(responses, expected, strict=False)):
        aborted = index in (0, 5, 59)
        assert response.finish_reason == ("abort" if aborted else "length")
        assert response.token_ids == (tokens[: len(response.token_ids)] if aborted else tokens)
        assert not aborted or 4 <= len(response.token_ids) == len(response.log_probs) < 24


def test_drafts_go_up_to_the_models_last_position(
    drafting: VllmEngine, many: list[Request], expected: list[tuple[int, ...]]
) -> None:
    """A sequence that ends at the engine's longest does not keep the others from being drafted for."""
    longest = drafting.max_model_len
    prompt = tuple(range(VOCAB)) * 2
    far = Request("far", prompt, SamplingSpec(0.0, max_tokens=longest - len(prompt)), 0)
    steps: list[StepRecord] = []
    alone, *others = drafting.generate([far, *many[:6]], on_step=steps.append)
    assert len(alone.token_ids) == longest - len(prompt)
    assert [response.token_ids for response in others] == expected[:6]
    assert steps[-3].num_draft_tokens > 0


def test_strategies_that_the_engine_lacks_are_refused(drafting: VllmEngine) -> None:
    other = "eagle" if drafting.strategy.drafter == "eagle3" else "eagle3"
    with pytest.raises(ConfigError, match=f"strategy {other}-2; this engine's drafters: off, ngram, suffix"):
        drafting.set_strategy(Strategy(other, 2))
    with pytest.raises(ConfigError, match=f"strategy ngram-4; this engine was built for up to {NUM_DRAFTS} tokens"):
        drafting.set_strategy(Strategy("ngram", 4))
    with pytest.raises(ConfigError, match="draft budgets"):
        drafting.set_strategy(NGRAM, {"a": -1})


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_preempted_requests_go_on_as_before(
    method: str,
    tmp_path: Path,
    model_folder: Path,
    reference: Qwen2ForCausalLM,
    plain_engine: VllmEngine,
    many: list[Request],
    expected: list[tuple[int, ...]],
) -> None:
    """Greedy responses are the same; samples, whose drafts the probabilistic head draws, have the exact marginals."""
    from megatron_tlt.config.speculation import SpeculationConfig
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    head = build_eagle_head("eagle3", model_folder, tmp_path / "eagle3")
    rollout = ROLLOUT.model_copy(update={"vllm": {**ROLLOUT.vllm, "num_gpu_blocks_override": 24}})
    speculation = SpeculationConfig(
        drafter=head.name, path=head, num_speculative_tokens=NUM_DRAFTS, draft_sample_method=method
    )
    small = VllmEngine(model_folder, rollout, speculation, seed=7)
    preempted: list[str] = []
    upstream = small._scheduler._preempt_request

    def preempt(request: Any, *rest: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return upstream(request, *rest, **options)

    small._scheduler._preempt_request = preempt
    try:
        chooser = RandomChooser(strategies_of(small), seed=6, every=2)
        responses = small.generate(many[:60], chooser=chooser)
        assert [response.token_ids for response in responses] == expected[:60]
        assert len(preempted) > 5
        assert small.skipped.filled > 0
        preempted.clear()
        full_block = tuple(range(32 - NUM_DRAFTS))  # with its drafts; the second token needs a block more
        sampled = [Request(f"s{i}", full_block, SamplingSpec(max_tokens=3), seed=i) for i in range(6400)]
        small.set_strategy(Strategy(head.name, NUM_DRAFTS))
        counts = sampled_counts(small.generate(sampled))
        assert len(preempted) > 100
        for observed, exact in zip(counts, exact_marginals(reference, full_block, 1.0, 1.0, -1), strict=True):
            assert chi_squared_p_value(observed, exact) > 1e-4
    finally:
        small.shutdown()


@pytest.mark.representative("losslessness across ranks")
@pytest.mark.distributed
def test_ranks_of_one_engine_take_the_first_ones_choices(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2}
    target = build_qwen2(tmp_path / "target", vocab_size=48, tie=False, scale=0.12, **shape)
    head = build_eagle_head("eagle", target, tmp_path / "eagle")
    run_torchrun(WORKER, 2, [str(target), str(head), str(tmp_path)], timeout_s=240)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["asked"] and not second["asked"]
    del first["asked"], second["asked"]
    assert first == second
    assert len(set(first["strategies"])) > 3
    model = load_qwen2(target)
    for prompt, tokens in zip(PROMPTS, first["tokens"], strict=True):
        assert len(tokens) == 48 and tokens == greedy(model, prompt, tokens)
    assert sum(first["accepted"]) > 0
