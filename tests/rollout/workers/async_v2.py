"""Asynchronous scheduling on vLLM's second model runner, whose Triton kernels are interpreted.

Arguments: a folder with the package triton, a model's folder, a head's, a file for the results.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.triton_interpreter import interpret_triton

triton_folder, model, head, out = sys.argv[1:5]
interpret_triton(triton_folder)

from vllm.platforms.cpu import CpuPlatform  # noqa: E402

from megatron_tlt.config.speculation import SpeculationConfig  # noqa: E402
from megatron_tlt.errors import ConfigError  # noqa: E402
from megatron_tlt.rollout.recorded_states import RecordedStates  # noqa: E402
from megatron_tlt.rollout.vllm_engine import VllmEngine  # noqa: E402
from megatron_tlt.speculation.strategy import OFF, Strategy  # noqa: E402
from tests.helpers.drafters import RandomChooser  # noqa: E402
from tests.helpers.tiny_models import greedy, load_qwen2  # noqa: E402
from tests.rollout.host_reads import reads_of  # noqa: E402
from tests.rollout.workers.runner_v2_cases import ROLLOUT, greedy_requests, stats  # noqa: E402


@contextmanager
def asynchronous_on_a_cpu() -> Iterator[None]:
    """vLLM's CPU platform turns asynchronous scheduling off."""
    upstream = CpuPlatform.check_and_update_config

    def update(config: Any) -> None:
        upstream(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(update)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = upstream


def main() -> None:
    name = Path(head).name
    found: dict[str, Any] = {}
    rollout = ROLLOUT.model_copy(update={"async_scheduling": True})
    speculation = SpeculationConfig(drafter=name, path=Path(head), num_speculative_tokens=3)
    try:
        VllmEngine(Path(model), rollout, SpeculationConfig(enabled=False), 7)
    except ConfigError as error:
        found["turned off"] = str(error)
    with asynchronous_on_a_cpu():
        engine = VllmEngine(Path(model), rollout, speculation, 7)
    assert engine._llm.vllm_config.scheduler_config.async_scheduling
    reference = load_qwen2(Path(model))
    requests = greedy_requests(6)
    strategies = (OFF, Strategy(name, 3), Strategy(name, 1))
    expected: list[list[int]] = []
    for strategy in strategies:
        engine.set_strategy(strategy)
        responses = engine.generate(requests)
        tokens = [list(response.token_ids) for response in responses]
        expected = expected or tokens
        found[strategy.name] = {"same": tokens == expected, **stats(responses)}
    found["reference"] = all(
        greedy(reference, request.prompt_token_ids, tokens) == tokens
        for request, tokens in zip(requests, expected, strict=True)
    )
    recorded = RecordedStates(1 << 26)
    engine.record_into(recorded)
    recorded.begin()
    chooser = RandomChooser(list(strategies), seed=5, budgets=False)
    responses = engine.generate(requests, chooser=chooser)
    found["changed"] = {
        "same": [list(response.token_ids) for response in responses] == expected,
        "strategies": sorted({step.strategy.name for step in chooser.records}),
        # a step verifies drafts of its own strategy alone, as many as that has for each request
        "consistent": all(
            step.num_draft_tokens == step.num_drafts * step.strategy.num_tokens for step in chooser.records
        ),
        "tokens": sum(step.num_tokens for step in chooser.records),
        "drafts": {
            one.name: sum(step.num_drafts for step in chooser.records if step.strategy == one) for one in strategies
        },
        **stats(responses),
    }
    found["recorded"] = [
        (one.prompt_length, list(one.token_ids), one.hidden[:, -64:].float().tolist()) for one in recorded.take()[:3]
    ]
    found["host reads"] = {}
    for recording in (False, True):
        for strategy, count in itertools.product(strategies, (2, 8)):
            if recording:
                recorded.begin()
            reads = reads_of(engine, strategy, count, requests[0].prompt_token_ids)
            found["host reads"][f"{strategy.name}, {count} requests, recording {recording}"] = reads
            assert len(recorded.take()) == count * recording
    engine.record_into(None)
    ended: list[str] = []
    engine.generate(
        requests[:4],
        on_step=lambda step: engine.abort("g1") if len(ended) == 0 and not ended.append("g1") else None,
        on_finished=lambda response: ended.append(f"{response.request_id} {response.finish_reason}"),
    )
    found["aborted"] = ended
    try:
        engine.set_strategy(Strategy(name, 3), {"g1": 1})
    except ConfigError as error:
        found["refused"] = str(error)
    engine.reset()  # raises if a step is still under way
    engine.shutdown()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
