"""Drafter models on vLLM's second model runner, whose Triton kernels are interpreted.

Arguments: a folder with the package triton, a model's folder, a head's, how drafts are chosen, a file for the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.triton_interpreter import interpret_triton, replace_device_functions

triton_folder, model, head, method, out = sys.argv[1:6]
interpret_triton(triton_folder)

import torch  # noqa: E402

from megatron_tlt.config.speculation import AdaptiveConfig, NgramConfig, SpeculationConfig  # noqa: E402
from megatron_tlt.rollout.recorded_states import RecordedStates  # noqa: E402
from megatron_tlt.rollout.types import Request, SamplingSpec  # noqa: E402
from megatron_tlt.rollout.vllm_engine import VllmEngine  # noqa: E402
from megatron_tlt.speculation.strategy import OFF, Strategy  # noqa: E402
from megatron_tlt.speculation.suffix import SuffixDrafter  # noqa: E402
from tests.helpers.drafters import RandomChooser  # noqa: E402
from tests.helpers.tiny_models import greedy, load_qwen2, logits_of  # noqa: E402
from tests.rollout.workers.runner_v2_cases import ROLLOUT, VOCAB, greedy_requests, stats  # noqa: E402

SAMPLES, TEMPERATURE = 192, 2.0
"""So warm that a random head often draws what the target would."""


def main() -> None:
    name = Path(head).name
    pair = f"suffix+{name}"
    speculation = SpeculationConfig(
        drafter=name,
        path=Path(head),
        num_speculative_tokens=3,
        draft_sample_method=method,  # type: ignore[arg-type]
        ngram=NgramConfig(prompt_lookup_min=1, prompt_lookup_max=3),
        adaptive=AdaptiveConfig(strategies=["off", "suffix-3", f"{name}-3", f"{pair}-3", f"{name}-3-p50"]),
    )
    replace_device_functions()
    engine = VllmEngine(Path(model), ROLLOUT, speculation, 7, {"suffix": SuffixDrafter()})
    reference, found = load_qwen2(Path(model)), {}
    requests = greedy_requests(8)
    sure = Strategy(name, 3, least_percent=50)
    strategies = (OFF, Strategy(name, 3), Strategy(name, 1), Strategy(pair, 3), sure)
    expected: list[list[int]] = []
    for strategy in strategies:
        engine.set_strategy(strategy)
        responses = engine.generate(requests)
        tokens = [list(response.token_ids) for response in responses]
        expected = expected or tokens
        found[strategy.name] = {"same": tokens == expected, **stats(responses)}
    found["reference"] = all(
        greedy(reference, request.prompt_token_ids, tokens) == tokens
        for request, tokens in zip(requests[:8], expected, strict=False)
    )
    recorded = RecordedStates(1 << 26)
    engine.record_into(recorded)
    recorded.begin()
    chooser = RandomChooser(list(strategies), seed=5)
    responses = engine.generate(requests, chooser=chooser)
    found["changed"] = {
        "same": [list(response.token_ids) for response in responses] == expected,
        "strategies": sorted({step.strategy.name for step in chooser.records}),
        "by source": {each.source: chooser.drafts_of(each.source) for each in strategies},
        **stats(responses),
    }
    found["recorded"] = [
        (one.prompt_length, list(one.token_ids), one.hidden[:, -64:].float().tolist()) for one in recorded.take()[:3]
    ]
    engine.record_into(None)
    found["weights"] = sorted(held[0] for held in engine.read_drafter_weights())

    prompt = tuple(requests[0].prompt_token_ids)
    exact = (logits_of(reference, prompt)[-1] / TEMPERATURE).softmax(-1)
    nexts = torch.stack([logits_of(reference, (*prompt, token))[-1] for token in range(VOCAB)])
    second = exact @ (nexts / TEMPERATURE).softmax(-1)
    sampled = SamplingSpec(temperature=TEMPERATURE, max_tokens=3)
    for strategy in (Strategy(name, 2), Strategy(pair, 2)) if method == "probabilistic" else ():
        engine.set_strategy(strategy)
        responses = engine.generate([Request(f"s{i}", prompt, sampled, i, problem_key="s") for i in range(SAMPLES)])
        tokens_N2 = torch.tensor([list(response.token_ids[:2]) for response in responses])
        found[f"sampled {strategy.name}"] = {
            "counts": [torch.bincount(tokens_N2[:, at], minlength=VOCAB).tolist() for at in (0, 1)],
            "exact": [exact.tolist(), second.tolist()],
            **stats(responses),
        }
    Path(out).write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main()
