"""An engine on vLLM's second model runner, whose Triton kernels are interpreted: greedy identity and exact marginals.

Arguments: a folder with the package triton, a model's folder, a file for the results.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from tests.helpers.triton_interpreter import interpret_triton

triton_folder, model, out = sys.argv[1:4]
interpret_triton(triton_folder)

import torch  # noqa: E402

from megatron_tlt.config.speculation import NgramConfig, SpeculationConfig  # noqa: E402
from megatron_tlt.rollout.types import Request, SamplingSpec  # noqa: E402
from megatron_tlt.rollout.vllm_engine import VllmEngine  # noqa: E402
from megatron_tlt.rollout.vllm_runner_v2 import SwitchV2  # noqa: E402
from megatron_tlt.speculation.strategy import OFF, Strategy  # noqa: E402
from megatron_tlt.speculation.suffix import SuffixDrafter  # noqa: E402
from tests.helpers.drafters import RandomChooser  # noqa: E402
from tests.helpers.tiny_models import greedy, load_qwen2, logits_of  # noqa: E402
from tests.rollout.host_reads import reads_of  # noqa: E402
from tests.rollout.workers.runner_v2_cases import ROLLOUT, TEMPERATURE, VOCAB, greedy_requests, stats  # noqa: E402

SAMPLES = 300
SPECULATION = SpeculationConfig(num_speculative_tokens=3, ngram=NgramConfig(prompt_lookup_min=1, prompt_lookup_max=3))


def main() -> None:
    engine = VllmEngine(Path(model), ROLLOUT, SPECULATION, 7, {"suffix": SuffixDrafter()})
    assert type(engine._runner).__mro__[1].__module__ == "vllm.v1.worker.gpu.model_runner"
    assert isinstance(engine._switch, SwitchV2)
    reference, found = load_qwen2(Path(model)), {}
    requests = greedy_requests(12)
    strategies = (OFF, Strategy("ngram", 3), Strategy("suffix", 2), Strategy("ngram", 1))
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
    steps: list[str] = []
    unknown = [replace(request, request_id=f"c{i}", problem_key=None) for i, request in enumerate(requests)]
    responses = engine.generate(
        unknown, on_step=lambda step: steps.append(step.strategy.name), chooser=RandomChooser(list(strategies), seed=5)
    )
    found["changed"] = {
        "same": [list(response.token_ids) for response in responses] == expected,
        "strategies": sorted({*steps}),
        **stats(responses),
    }

    # what follows is likely to be what followed before
    prompt = (*requests[0].prompt_token_ids, *expected[0], *requests[0].prompt_token_ids)
    exact = (logits_of(reference, prompt)[-1] / TEMPERATURE).softmax(-1)
    nexts = torch.stack([logits_of(reference, (*prompt, token))[-1] for token in range(VOCAB)])
    second = exact @ (nexts / TEMPERATURE).softmax(-1)
    sampled = SamplingSpec(temperature=TEMPERATURE, max_tokens=3)
    for strategy in (Strategy("ngram", 2), OFF):
        engine.set_strategy(strategy)
        responses = engine.generate([Request(f"s{i}", prompt, sampled, i) for i in range(SAMPLES)])
        tokens_N2 = torch.tensor([list(response.token_ids[:2]) for response in responses])
        found[f"sampled {strategy.name}"] = {
            "counts": [torch.bincount(tokens_N2[:, at], minlength=VOCAB).tolist() for at in (0, 1)],
            "exact": [exact.tolist(), second.tolist()],
            **stats(responses),
        }
    repeated = engine.generate([Request(f"s{i}", prompt, sampled, i) for i in range(20)])
    found["repeats"] = [list(a.token_ids) for a in repeated] == [list(a.token_ids) for a in responses[:20]]
    # prompts that repeat themselves: drafts are found
    found["host reads"] = {
        f"{strategy.name}, {count} requests": reads_of(engine, strategy, count, requests[0].prompt_token_ids)
        for strategy in (OFF, Strategy("ngram", 2), Strategy("ngram", 3))
        for count in (2, 8)
    }
    Path(out).write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main()
