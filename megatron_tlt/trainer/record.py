"""The files that a run writes during and after training; rank 0 writes, the other ranks contribute data."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.observe.drafter_check import DrafterCheck
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.jsonl import JsonLinesFile
from megatron_tlt.observe.learning_check import LearningCheck
from megatron_tlt.observe.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatron_tlt.observe.progress import Progress, session_line
from megatron_tlt.observe.report import write_report
from megatron_tlt.observe.samples import SAMPLES_FILE, SampleLog, SampleRow
from megatron_tlt.observe.speculation_gain import RunGain
from megatron_tlt.observe.summary import describe_lengths, reward_summary, time_totals, tokens_per_s, write_summary
from megatron_tlt.observe.timeline import Timeline, write_trace
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, current_device, rank, warn, world_size
from megatron_tlt.reshard.interface import SyncReport
from megatron_tlt.trainer.checkpoints import TrainerState
from megatron_tlt.trainer.evaluation import Evaluation
from megatron_tlt.trainer.memory_ledger import MemoryLedger
from megatron_tlt.trainer.step import StepResult


class RunRecord:
    """Metrics, lengths, samples, timeline, report and summary of one run.

    Rows of steps that a resumed run repeats are dropped.
    """

    def __init__(self, folder: Path, config: TltConfig, done_steps: int, timeline: Timeline) -> None:
        self._folder = folder
        self._config = config
        self._timeline = timeline
        self._metrics: MetricsWriter | None = None
        self._lengths: JsonLinesFile | None = None
        self._samples: SampleLog | None = None
        self._learning, self._drafter = LearningCheck(), DrafterCheck()
        self._ledger: MemoryLedger | None = None
        self._memory_ratios: dict[str, float] = {}
        # No checkpoint exists before the first step: a run killed before it evaluates the initial model again.
        kept = done_steps or -1
        timeline.truncate_after(kept)
        if rank() == 0:
            self._metrics = MetricsWriter(
                folder, config.observe.tensorboard, config.observe.wandb, config.observe.aliases
            )
            self._metrics.truncate_after(kept)
            if (capacity := current_device().capacity_bytes) is not None:
                self._ledger = MemoryLedger.of_run(config, capacity)
            self._lengths = JsonLinesFile(folder / "lengths.jsonl")
            self._lengths.truncate_after(kept)
            # even if samples are disabled now: samples of repeated steps would contradict the metrics
            if config.observe.samples_per_task or (folder / SAMPLES_FILE).exists():
                self._samples = SampleLog(folder, kept)
            for row in read_metrics(folder / METRICS_FILE):  # a resumed run does not repeat its warnings
                self._learning.add(row)
                self._drafter.add(row)

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeline.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._lengths is not None:
            self._lengths.close()
        if self._samples is not None:
            self._samples.close()

    @property
    def memory_line(self) -> str | None:
        """The planned memory of each phase, on rank 0 of a run on GPUs; None elsewhere."""
        return None if self._ledger is None else self._ledger.at_start

    def step(self, step: int, result: StepResult, progress: Progress) -> None:
        """Records step number ``step`` (counted from 1); called before anything else that could end the run."""
        peak = max(result.memory.values(), default=0) + current_device().children_memory_bytes()
        mine = (peak, result.memory, result.reshard)
        ranks = all_gather_data(mine, tuple[int, dict[str, int], SyncReport | None])
        self._timeline.flush()
        if self._metrics is None or self._lengths is None:
            return
        metrics = {**result.metrics, "memory/peak_gib": sum(peak for peak, _, _ in ranks) / 2**30}
        fullest = {phase: max(phases[phase] for _, phases, _ in ranks) for phase in result.memory}
        metrics |= {f"memory/{phase}_gib": size / 2**30 for phase, size in fullest.items()}
        metrics.update(_reshard_metrics([report for _, _, report in ranks if report is not None]))
        warnings = self._learning.add(metrics) + self._drafter.add(metrics)
        metrics["learning/warnings"] = float(self._learning.active)
        metrics["speculation/warnings"] = float(self._drafter.active)
        self._metrics.log(step, metrics)
        row = {
            "step": step,
            "lengths": result.lengths,
            "finish_reasons": result.finish_reasons,
            "acceptance": [round(a, 3) for a in result.acceptance],
        }
        self._lengths.append([row])
        if self._samples is not None:
            self._samples.add(step, result.samples)
        progress.step_done(step, metrics)
        if self._ledger is not None:
            progress.message(self._ledger.after_step(fullest))
            self._memory_ratios, self._ledger = self._ledger.ratios(fullest), None
        if (line := session_line(metrics)) is not None:
            progress.message(line)
        for warning in warnings:
            warn(warning)

    def go_back(self, step: int) -> None:
        """Drops the rows of the steps after ``step``, which the run does again with other problems."""
        self._timeline.flush()
        self._timeline.truncate_after(step)
        if self._metrics is None or self._lengths is None:
            return
        self._metrics.truncate_after(step)
        self._lengths.truncate_after(step)
        if self._samples is not None:
            self._samples.truncate_after(step)
        self._learning, self._drafter = LearningCheck(), DrafterCheck()
        for row in read_metrics(self._folder / METRICS_FILE):
            self._learning.add(row)
            self._drafter.add(row)

    def evaluation(self, step: int, evaluation: Evaluation, seconds: float, samples: Sequence[SampleRow] = ()) -> None:
        """Records the evaluation after ``step``; a resumed run may evaluate the same step again."""
        if self._metrics is None:
            return
        metrics = {**_evaluation_metrics(evaluation), "time/evaluate": seconds}
        self._metrics.amend(step, metrics)
        if self._samples is not None:
            self._samples.add_evaluation(step, samples)

    def finish_partial(self) -> None:
        """Writes trace and report of an interrupted run."""
        self._timeline.flush()
        barrier()
        if rank() == 0:
            write_trace(self._folder)
            write_report(self._folder)

    def finish(self, state: TrainerState, layout: dict[str, int]) -> None:
        """Writes trace, summary and report of the finished run."""
        self._timeline.flush()
        barrier()
        if rank() == 0:
            write_trace(self._folder)
            write_summary(self._folder / "summary.json", self._summary(state, layout))
            write_report(self._folder)
        barrier()

    def _summary(self, state: TrainerState, layout: dict[str, int]) -> dict[str, Any]:
        config = self._config
        rows = [row for row in read_metrics(self._folder / "metrics.jsonl") if row["step"]]
        lengths: list[int] = []
        with (self._folder / "lengths.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                lengths.extend(json.loads(line)["lengths"])

        def column(name: str) -> list[float]:
            return [value for row in rows if (value := row.get(name)) is not None]

        evaluated = sorted(state.evaluations, key=int)  # empty if the engine takes no weights
        drafts = sum(column("speculation/draft_tokens"))
        gain = RunGain.of(rows)
        return {
            "world_size": world_size(),
            "steps": state.step,
            "tokens_seen": state.tokens_seen,
            "actor": {"backend": "megatron-core", "layout": layout},
            "rollout": {
                "backend": config.rollout.engine,
                "tensor_parallel_size": config.rollout.tensor_parallel_size,
                "length": describe_lengths(lengths),
                "acceptance_length": statistics.fmean(column("speculation/acceptance_length")),
                "draft_acceptance_rate": sum(column("speculation/accepted_tokens")) / drafts if drafts else None,
                "tokens_per_s": tokens_per_s(rows),
                "logprob_mismatch": {
                    # absent with algorithm.correction.bypass
                    "mean_abs": statistics.fmean(found) if (found := column("mismatch/mean_abs")) else None,
                    "max_abs": max(column("mismatch/max_abs"), default=None),
                    "k3_kl": statistics.fmean(found) if (found := column("mismatch/k3_kl")) else None,
                },
            },
            "eval": {when: state.evaluations[evaluated[at]] for when, at in (("start", 0), ("end", -1)) if evaluated},
            "reward": reward_summary(rows),
            "learning": {"warnings": len(LearningCheck().of_run(rows))},
            "reshard": {
                "tensors": int(column("reshard/tensors")[-1]),
                "verified_tensors": int(column("reshard/verified_tensors")[-1]),
                "seconds": statistics.median(column("time/reshard")),
                "transfer_seconds": statistics.median(column("reshard/transfer_s")),
                "sent_mib": next(iter(column("reshard/sent_mib")), None),
                "lower_bound_mib": next(iter(column("reshard/lower_bound_mib")), None),
                "staging_mib": next(iter(column("reshard/staging_mib")), None),
            },
            "time": time_totals(rows),
            "memory": {
                "peak_gib": max(column("memory/peak_gib")),
                "over_plan": self._memory_ratios or None,
            },
            "speculation": {
                "enabled": config.speculation.enabled,
                "drafter": config.speculation.drafter,
                "num_speculative_tokens": config.speculation.num_speculative_tokens,
                "gain": None if gain is None else gain.gain,
                "gain_steps": 0 if gain is None else gain.known_steps,
                "gain_unknown": None if gain is None else gain.unknown,
                "frozen_acceptance_length": next(iter(column("drafter/frozen_acceptance_length")), None),
                "adapted_acceptance_length": next(iter(column("drafter/adapted_acceptance_length")), None),
                "warnings": len(DrafterCheck().of_run(rows)),
            },
            "environment": describe_environment(),
        }


def _reshard_metrics(reports: list[SyncReport]) -> dict[str, float]:
    """Transfer metrics of one synchronization, aggregated over all ranks."""
    if not reports:
        return {}
    metrics = {
        "reshard/tensors": float(min(report.tensors for report in reports)),
        "reshard/verified_tensors": float(min(report.verified_tensors for report in reports)),
    }
    totals = {
        "sent": sum(report.sent_bytes or 0 for report in reports),
        "copied": sum(report.copied_bytes or 0 for report in reports),
        "lower_bound": reports[0].lower_bound_bytes or 0,
        "staging": max(report.staging_bytes or 0 for report in reports),
    }
    if reports[0].sent_bytes is not None:
        metrics |= {f"reshard/{name}_mib": amount / 2**20 for name, amount in totals.items()}
    return metrics


def _evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    metrics = {f"eval/{name}": value for name, value in evaluation.figures.items()}
    for name, figures in evaluation.sets.items():
        metrics |= {f"eval/{name}/{figure}": value for figure, value in figures.items()}
    return metrics | {f"task/{task}/eval_pass_at_1": value for task, value in evaluation.pass_at_1_by_task.items()}
