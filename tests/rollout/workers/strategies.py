"""One engine over two ranks whose strategy the first rank chooses; writes ``rank<r>.json`` of what each saw."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_tlt.config.speculation import AdaptiveConfig, SpeculationConfig
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy
from tests.helpers.drafters import RandomChooser
from tests.rollout.conftest import ROLLOUT
from tests.rollout.workers.layouts import PROMPTS

STRATEGIES = [OFF, Strategy("ngram", 3), Strategy("ngram", 1), Strategy("eagle", 3), Strategy("eagle", 2)]


def main(model_folder: str, head: str, out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rollout = ROLLOUT.model_copy(update={"tensor_parallel_size": 2})
    adaptive = AdaptiveConfig(strategies=[strategy.name for strategy in STRATEGIES])
    speculation = SpeculationConfig(drafter="eagle", path=Path(head), num_speculative_tokens=3, adaptive=adaptive)
    engine = VllmEngine(Path(model_folder), rollout, speculation, seed=7)
    greedy = SamplingSpec(temperature=0.0, max_tokens=48)
    requests = [Request(str(i), prompt, greedy, seed=0) for i, prompt in enumerate(PROMPTS)]
    # the ranks' own choices would differ from the first step on
    chooser = RandomChooser(STRATEGIES, seed=dist.get_rank(), every=2)
    steps: list[StepRecord] = []
    responses = engine.generate(requests, on_step=steps.append, chooser=chooser)
    record = {
        "asked": len(chooser.batches),
        "strategies": [step.next_strategy.name for step in steps],
        "drafts": [step.num_draft_tokens for step in steps],
        "tokens": [list(response.token_ids) for response in responses],
        "accepted": [response.draft.num_accepted_tokens for response in responses],
        "filled": engine.skipped.filled,
    }
    (Path(out) / f"rank{dist.get_rank()}.json").write_text(json.dumps(record))
    engine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
