"""Tensors that our code reads on the host in an engine step: on a GPU the host waits for each.

The numbers may neither grow with the batch, nor with the length of drafts, nor beyond those noted here.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.overrides import TorchFunctionMode

import megatron_tlt
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy

if TYPE_CHECKING:
    from megatron_tlt.rollout.vllm_engine import VllmEngine

OURS = tuple(str(Path(megatron_tlt.__file__).parents[1] / folder) for folder in ("megatron_tlt", "tests/helpers"))
READS = {"item", "tolist", "cpu", "__bool__", "__int__", "__index__", "__float__", "nonzero", "masked_select", "unique"}
ALLOWED = {
    "off": {},
    # all drafts of a step together
    "head": {"vllm_draft_sampling.py:end": 1},
    "head, unsure drafts ended": {"vllm_draft_sampling.py:end": 1},
}


class HostReads(TorchFunctionMode):
    """Counts reads by the function of this package that asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and not _is_of_the_processor(sys._getframe(1)):
            code = sys._getframe(1).f_code
            if code.co_filename.startswith(OURS):
                self.counts[f"{Path(code.co_filename).name}:{code.co_name}"] += 1
        return func(*args, **(kwargs or {}))


def _is_of_the_processor(frame: Any) -> bool:
    """Whether a draft's early end asks for the counts, which it does not on a GPU."""
    return frame.f_code.co_name == "_end_unsure"


def reads_of(engine: VllmEngine, strategy: Strategy, requests: int, prompt: tuple[int, ...]) -> Counter[str]:
    """The most reads of a step by function, in a rollout of that many sampled responses."""
    before = engine.strategy
    engine.set_strategy(strategy)
    most: Counter[str] = Counter()
    with HostReads() as reads:

        def on_step(step: StepRecord) -> None:
            for name, count in reads.counts.items():
                most[name] = max(most[name], count)
            reads.counts.clear()

        spec = SamplingSpec(temperature=0.8, max_tokens=8)
        engine.generate([Request(f"r{i}", prompt, spec, seed=i) for i in range(requests)], on_step=on_step)
    engine.set_strategy(before)
    return most


@pytest.mark.parametrize("kind", ALLOWED)
def test_an_engine_step_reads_as_little_as_noted(drafting: VllmEngine, prompt: tuple[int, ...], kind: str) -> None:
    head = drafting.drafters[-1]
    least = 5 if kind.endswith("ended") else 0
    strategies = [OFF] if kind == "off" else [Strategy(head, length, least_percent=least) for length in (2, 3)]
    found = [reads_of(drafting, strategy, requests, prompt) for strategy in strategies for requests in (2, 24)]
    assert all(each == ALLOWED[kind] for each in found), f"host reads by function: {found}; allowed: {ALLOWED[kind]}"
