"""Learning speed of drafters by kind, learning rate, unrolling, loss and vocabulary, over seconds of training."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.workers.quickstart import prepare_quickstart
from megatron_tlt.config.drafter import DrafterConfig, DrafterLossConfig
from megatron_tlt.config.drafter_kinds import KINDS, kind_of
from megatron_tlt.config.loader import load_config
from megatron_tlt.drafter import DrafterTrainer, Entry, Pair, TargetStates, aux_layers_of, drafter_from_target
from megatron_tlt.drafter.evaluation import teacher_forced_acceptance
from megatron_tlt.drafter.losses import LOSSES
from megatron_tlt.drafter.training import FAILURES
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.progress import Progress
from megatron_tlt.platform.device import initialize_distributed, prepare

HELD_OUT = 8
"""Every n-th response is held out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=Path("launch/smollm2-135m-cpu.yaml"), help="launch config")
    parser.add_argument("--model", type=Path, help="model folder (default: the config's)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--unrolls", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--losses", nargs="+", choices=tuple(LOSSES), default=["eagle", "kl"])
    parser.add_argument("--warmups", type=int, nargs="+", default=[0], help="steps in which the rate rises")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[0, 2048], help="of EAGLE-3; 0 is the whole one")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training for each")
    parser.add_argument("--turns", type=int, default=4, help="that these are divided into, all taking turns")
    parser.add_argument("--problems", type=int, default=96, help="one sampled response each")
    parser.add_argument("--entries", type=int, default=4, help="responses per step")
    parser.add_argument("--depth", type=int, default=5, help="successive drafts that are evaluated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)


@dataclass
class _GridArm:
    """One point of the grid: its trainer, its training time, and its results."""

    name: dict[str, Any]
    trainer: DrafterTrainer
    seconds: float = 0.0
    outcome: str = "trained"
    history: list[tuple[float, int, float]] = field(default_factory=list)

    def train(self, entries: Sequence[Entry], count: int, until_s: float, draw: random.Random) -> None:
        """Trains on random entries until its time is used or training fails."""
        while self.seconds < until_s and self.outcome not in FAILURES:
            began = time.perf_counter()
            self.outcome = self.trainer.train_step(draw.sample(list(entries), count)).outcome
            self.seconds += time.perf_counter() - began

    def evaluate(self, held_out: Sequence[Entry], depth: int) -> None:
        limit = self.trainer.config.max_tokens_per_micro_batch
        found = teacher_forced_acceptance(self.trainer.model, held_out, depth, limit)
        self.history.append((self.seconds, self.trainer.version, found.acceptance_length))


def _grid(arguments: argparse.Namespace, max_tokens: int) -> list[tuple[dict[str, Any], DrafterConfig]]:
    points = itertools.product(
        arguments.kinds,
        arguments.vocabularies,
        arguments.unrolls,
        arguments.losses,
        arguments.rates,
        arguments.warmups,
    )
    found = []
    for kind, vocabulary, unroll, loss, rate, warmup in points:
        if vocabulary and not kind_of(kind).own_head:
            continue
        config = DrafterConfig(
            kind=kind,
            lr=rate,
            warmup_steps=warmup,
            unroll_steps=unroll,
            loss=DrafterLossConfig(name=loss),
            draft_vocab_size=vocabulary or None,
            max_tokens_per_micro_batch=max_tokens,
        )
        name = {
            "kind": kind,
            "draft_vocab_size": vocabulary or None,
            "unroll_steps": unroll,
            "loss": loss,
            "lr": rate,
            "warmup_steps": warmup,
        }
        found.append((name, config))
    return found


def _entries(pairs: Sequence[Pair], states: TargetStates, kind: str, progress: Progress) -> list[Entry]:
    progress.start(f"hidden states, {kind}", len(pairs))
    found = []
    for i, pair in enumerate(pairs):
        tokens = torch.tensor(pair.prompt + pair.response, dtype=torch.int32)
        found.append(Entry(f"0/{i}", 0, tokens, len(pair.prompt), states(tokens).bfloat16(), 1.0))
        progress.advance()
    return found


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per point of the grid: held-out teacher-forced acceptance length by seconds of training.

    Raises:
        ConfigError: the model does not exist yet, or too few responses are requested.
    """
    if arguments.problems < HELD_OUT * 2:
        raise ConfigError(f"--problems is {arguments.problems}; allowed: at least {HELD_OUT * 2}")
    config = load_config(arguments.config, [])
    folder = arguments.model or model_folder(config)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no model; `tlt train {arguments.config}` builds it, or give --model")
    prepare()
    initialize_distributed()
    torch.set_num_threads(arguments.threads)
    pairs = [
        pair
        for pair in prepare_quickstart(str(arguments.config), folder, 1, arguments.problems, arguments.seed).pairs
        if len(pair.response) > 1
    ]
    limit = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    grid = _grid(arguments, max(2048, limit))
    result = BenchmarkResult(environment=describe_environment(), name="drafter-grid")
    with Progress(0, arguments.turns * len(arguments.kinds), stream=sys.stderr) as progress:
        for kind in arguments.kinds:
            arms = []
            for name, drafter in grid:
                if drafter.kind == kind:
                    model = drafter_from_target(folder, kind, 1, draft_vocab_size=drafter.draft_vocab_size)
                    arms.append(_GridArm(name, DrafterTrainer(model, drafter, arguments.seed)))
            states = TargetStates(folder, aux_layers_of(arms[0].trainer.model.config), torch.device("cpu"))
            entries = _entries(pairs, states, kind, progress)
            held_out = entries[HELD_OUT - 1 :: HELD_OUT]
            training = [entry for i, entry in enumerate(entries) if i % HELD_OUT != HELD_OUT - 1]
            for turn in range(1, arguments.turns + 1):
                for number, arm in enumerate(arms):
                    draw = random.Random(f"{arguments.seed}/{turn}/{number}")
                    arm.train(training, arguments.entries, arguments.seconds * turn / arguments.turns, draw)
                    arm.evaluate(held_out, arguments.depth)
                    progress.message(f"{arm.name}: {arm.history[-1]}")
            for arm in arms:
                _, steps, length = arm.history[-1]
                result.rows.append(
                    {
                        **arm.name,
                        "acceptance_length": length,
                        "steps": steps,
                        "outcome": arm.outcome,
                        "seconds": [row[0] for row in arm.history],
                        "lengths": [row[2] for row in arm.history],
                    }
                )
    result.rows.sort(key=lambda row: -row["acceptance_length"])
    return result
