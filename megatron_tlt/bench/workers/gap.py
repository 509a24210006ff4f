"""Acceptance of heads after steps without them, with the gap filled and not."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_tlt.bench.engines import one_of_several
from megatron_tlt.bench.workers.quickstart import prepare_quickstart, train_head
from megatron_tlt.config.speculation import SkippedConfig, SpeculationConfig
from megatron_tlt.platform.device import initialize_distributed, prepare
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.rollout.types import Request
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy


class Turns:
    """Alternates ``gap`` steps without drafts and ``drafting`` steps with the head; counts tokens of the latter."""

    def __init__(self, strategy: Strategy, gap: int, drafting: int) -> None:
        self._strategy, self._gap, self._period = strategy, gap, gap + drafting
        self._step = 0
        self.requests = 0
        self.accepted = 0

    def next(self, batch: int, requests: Mapping[str, int]) -> tuple[Strategy, None]:
        strategy = OFF if self._step % self._period < self._gap else self._strategy
        self._step += 1
        return strategy, None

    def observe(self, step: StepRecord) -> None:
        if step.strategy == self._strategy:
            self.requests += step.batch
            self.accepted += step.num_accepted_tokens


def measure(
    engines: Mapping[str, VllmEngine], strategy: Strategy, pool: Sequence[Request], given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row per repeat, gap and arm."""
    rows = []
    for repeat in range(given["repeats"]):
        asked = [replace(request, seed=request.seed + repeat) for request in pool]
        for gap in (0, *given["gaps"]):
            for arm, engine in engines.items():
                if gap or arm == "filled":  # without a gap both are the same
                    chooser = Turns(strategy, gap, given["drafting"])
                    engine.generate(asked, chooser=chooser)
                    length = 1.0 + chooser.accepted / max(1, chooser.requests)
                    rows.append({"repeat": repeat, "gap": gap, "arm": arm, "acceptance_length": length})
    return rows


def main(given_json: str, work: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    given = json.loads(given_json)
    prepare()
    initialize_distributed(600)
    model = Path(given["model"])
    quickstart = prepare_quickstart(given["config"], model, given["requests"], given["warm_problems"], given["seed"])
    rows = []
    for kind in given["kinds"]:
        head = train_head(quickstart, kind, given["warm_steps"], Path(work))
        speculation = SpeculationConfig(drafter=kind, path=head, num_speculative_tokens=given["drafts"])
        engines = {
            "filled": VllmEngine(model, one_of_several(quickstart.config.rollout), speculation, given["seed"]),
            "not filled": VllmEngine(
                model,
                one_of_several(quickstart.config.rollout),
                speculation.model_copy(update={"skipped": SkippedConfig(window=0)}),
                given["seed"],
            ),
        }
        strategy = Strategy(kind, given["drafts"])
        rows += [{"kind": kind, **row} for row in measure(engines, strategy, quickstart.pool, given)]
        for engine in engines.values():
            engine.shutdown()
    atomic_write_text(Path(out), json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
