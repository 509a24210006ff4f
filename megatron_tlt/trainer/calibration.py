"""``tlt calibrate``: the policy's own pass rate on problems, from which tiers of difficulty follow."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.platform.collectives import failing_together
from megatron_tlt.platform.device import rank, show
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.tasks.pool import TIERS, asked_digest, digest_of, first_different, tier_of
from megatron_tlt.tasks.sources import GeneratedSource, Split
from megatron_tlt.trainer.experience import StopRequested
from megatron_tlt.trainer.offline import OfflineRun
from megatron_tlt.trainer.requests import training_sampling
from megatron_tlt.trainer.step import StepResult
from megatron_tlt.trainer.stopping import Interrupted

_AT_A_TIME = 128
"""Problems of one rollout."""


@dataclass(frozen=True)
class CalibrationRequest:
    """A request to ``tlt calibrate``.

    Attributes:
        out: the file to write.
        problems: different problems of each task.
        samples: responses to each, sampled as in training.
        checkpoint: its folder; None: the newest of the run, otherwise the initial model.
        split: problems to train on, or held-out ones.
    """

    out: str
    problems: int
    samples: int
    checkpoint: str | None = None
    split: Split = "train"


class CalibrationRun(OfflineRun):
    """One rank that measures pass rates."""

    def calibrate(self, request: CalibrationRequest) -> None:
        """Writes the file and prints how many problems each tier has.

        Raises:
            ConfigError: a task has fewer different problems, or the engine cannot generate with a checkpoint's weights.
            Interrupted: a signal requested a stop; no file is written.
        """
        folder, state = self._restored(request.checkpoint, "a calibration")
        split = request.split
        sources = build_sources(self._config.tasks, split, self._config.run.seed, self._limit, pooled=False).sources
        generated = [(at, source) for at, source in enumerate(sources) if isinstance(source, GeneratedSource)]
        tasks: dict[str, list[dict[str, Any]]] = {}
        with self._progress(1) as progress, self._pool, self._pool.full_time():
            self.step.reshard(state.step, StepResult(), progress.start)
            for at, source in generated:
                indices = first_different(source, request.problems, f"--problems, tasks[{at}]")
                progress.start("evaluate", self._collector.num_own(len(indices), request.samples))
                try:
                    tasks[source.label] = self._rates(source, indices, request.samples, progress.advance)
                except StopRequested:
                    raise Interrupted(self._stop.signum or signal.SIGTERM, "while calibrating") from None
            found = {
                "source": "tlt calibrate",
                "model": str(folder or model_folder(self._config)),
                "step": state.step,
                "split": split,
                "seed": self._config.run.seed,
                "sampling": self._config.rollout.sampling.model_dump(mode="json"),
                "tasks": tasks,
            }
            with failing_together():
                if rank() == 0:
                    atomic_write_text(Path(request.out), _text(found))
        for label, rows in tasks.items():
            tiers = Counter(tier_of(row["passed"] / row["samples"]) for row in rows)
            show(f"{label}: {', '.join(f'{tiers[tier]} {tier}' for tier in TIERS)}")
        show(f"pass rates: {request.out}")
        self._watch.close()
        self.engine.shutdown()

    def _rates(self, source: GeneratedSource, indices: list[int], samples: int, advance: Any) -> list[dict[str, Any]]:
        sampling = training_sampling(self._config.rollout, self.tokenizer)
        rows: list[dict[str, Any]] = []
        for first in range(0, len(indices), _AT_A_TIME):
            own = indices[first : first + _AT_A_TIME]
            problems = [source.problem(index) for index in own]
            seeds = (self._config.run.seed, "calibrate", source.label, first)
            scored, _, _ = self._collector.collect(problems, samples, sampling, seeds, advance)
            passed = Counter(one.problem for one in scored if one.reward.correct)
            tokens = Counter[int]()
            for one in scored:
                tokens[one.problem] += one.length
            rows += [
                {
                    "index": index,
                    "digest": digest_of(problems[at]),
                    "asked": asked_digest(problems[at]),
                    "passed": passed[at],
                    "samples": samples,
                    "tokens": round(tokens[at] / samples, 1),
                }
                for at, index in enumerate(own)
            ]
        return rows


def calibrate(config: TltConfig, request: CalibrationRequest) -> None:
    """Entry point of a worker of ``tlt calibrate``."""
    CalibrationRun(config, read_only=True).calibrate(request)


def _text(found: dict[str, Any]) -> str:
    """A line per problem: readable in a diff."""
    tasks = found["tasks"]
    head = json.dumps({**found, "tasks": {}}, indent=1)
    lines = ",\n".join(
        f"  {json.dumps(label)}: [\n" + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
        for label, rows in tasks.items()
    )
    assert head.endswith('"tasks": {}\n}')
    return head.removesuffix("{}\n}") + "{\n" + lines + "\n }\n}\n"
