"""Offline warm-up of a drafter on fixed responses; it can be killed and resumed at any time.

Its folder contains ``warmup.json`` (the settings), ``data`` (the target's hidden states), ``training`` (the
checkpoint), and, at the end, ``drafter`` (the folder that vLLM loads) and ``report.json`` (the gain).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.checkpoint.manifest import rewriting
from megatron_tlt.checkpoint.weights import verify_weights
from megatron_tlt.config.drafter import ENTRY_OVERHEAD_BYTES, DrafterBufferConfig, DrafterConfig
from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.drafter.buffer import DataBuffer
from megatron_tlt.drafter.checkpoint import STATE, read_checkpoint, write_checkpoint
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.evaluation import teacher_forced_acceptance
from megatron_tlt.drafter.folder import save_drafter
from megatron_tlt.drafter.model import DraftModel
from megatron_tlt.drafter.pairs import Pair, digest_of
from megatron_tlt.drafter.session import train_session
from megatron_tlt.drafter.training import FAILURES, DrafterTrainer
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.progress import Progress
from megatron_tlt.platform.files import atomic_write_text

DRAFTER, TRAINING, DATA, REPORT, ABOUT = "drafter", "training", "data", "report.json", "warmup.json"
HiddenStates = Callable[[torch.Tensor], torch.Tensor]
_BYTES_PER_FEATURE = 2  # bfloat16
_IN_MEMORY = 1 << 30
_FLUSH_EVERY = 32


@dataclass(frozen=True)
class WarmupPlan:
    """Length and schedule of a warm-up.

    Attributes:
        steps: total optimizer steps; a larger number continues a finished warm-up.
        entries_per_step: responses per step.
        save_every: steps between checkpoints.
        evaluate_every: steps between evaluations on the held-out responses.
        held_out_every: one of this many responses is held out.
        depth: evaluated consecutive drafts (K).
        seed: of the sampling of responses and of the feature noise.
    """

    steps: int
    entries_per_step: int = 16
    save_every: int = 50
    evaluate_every: int = 100
    held_out_every: int = 10
    depth: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        lowest = {"held_out_every": 2, "seed": 0}
        wrong = [
            f"warm-up: {name} is {value}; allowed: at least {lowest.get(name, 1)}"
            for name, value in asdict(self).items()
            if value < lowest.get(name, 1)
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))


@dataclass(frozen=True)
class WarmupReport:
    """``history``: step, acceptance_length, accepted_per_depth and (after step 0) the last step's losses.

    ``loss`` is the training loss; ``loss_per_depth`` the distribution losses by draft depth.
    """

    kind: str
    depth: int
    training_responses: int
    held_out_responses: int
    held_out_chains: int
    history: list[dict[str, Any]]

    @property
    def line(self) -> str:
        """The gain in one line."""
        first, last = (f"{self.history[i]['acceptance_length']:.3f}" for i in (0, -1))
        return (
            f"acceptance length (K = {self.depth}, greedy, teacher-forced, on {self.held_out_responses} held-out "
            f"responses): {first} at the start, {last} after {self.history[-1]['step']} steps"
        )


def check_same(folder: Path, about: dict[str, Any]) -> None:
    """Record the settings of a folder's warm-up; later calls require the same settings.

    Raises:
        ConfigError: the settings differ; lists each differing key with both values.
    """
    file = folder / ABOUT
    if not file.is_file():
        atomic_write_text(file, json.dumps(about, indent=2, sort_keys=True) + "\n")
        return
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    with contextlib.suppress(KeyError, ValueError):  # files of earlier releases lack newer keys
        known["drafter"] = DrafterConfig.model_validate(known["drafter"]).model_dump(mode="json")
    with contextlib.suppress(KeyError, TypeError, ValueError):
        sampled = known["sampled"]
        sampled["rollout"] = RolloutConfig.model_validate(sampled["rollout"]).model_dump(mode="json")
    about = json.loads(json.dumps(about))
    wrong = [
        f"{file}: {key} is {known.get(key)!r}; asked for now: {about.get(key)!r} (another warm-up needs another folder)"
        for key in sorted(known.keys() | about.keys())
        if known.get(key) != about.get(key)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def warm_up(
    model: DraftModel,
    config: DrafterConfig,
    pairs: Sequence[Pair],
    hidden_states: HiddenStates,
    folder: Path,
    plan: WarmupPlan,
    progress: Progress,
    should_stop: Callable[[], bool] = lambda: False,
    about: dict[str, Any] | None = None,
) -> WarmupReport | None:
    """Train ``model`` in place. Called again with the same arguments, it continues and gives a bit-equal result.

    Args:
        model: the initial drafter, on the training device.
        config: training settings.
        pairs: responses of the target; ``plan`` selects the held-out ones.
        hidden_states: returns the target's states of a sequence, (T) -> (T, E); called once per pair and cached.
        folder: used by this warm-up only.
        plan: length and schedule.
        progress: display of progress.
        should_stop: called between micro-batches; True saves and returns early.
        about: further plain data that must be equal when continuing (the target).

    Returns:
        The report, also written to the folder; None if stopped.

    Raises:
        ConfigError: the pairs cannot be trained on, or the folder is of another warm-up.
        RunError: training ended with a failure outcome, or the disk is full.
    """
    _check_pairs(pairs, model, config)
    kept = {name: value for name, value in asdict(plan).items() if name not in ("steps", "save_every")}
    own = {"plan": kept, "drafter": config.model_dump(mode="json"), "pairs": digest_of(pairs)}
    check_same(folder, {**own, **(about or {})})
    data = _cache(pairs, hidden_states, folder / DATA, model, plan, progress, should_stop)
    if data is None:
        return None
    training, held_out_buffer = data
    held_out = [entry for item in held_out_buffer.descriptions if (entry := held_out_buffer.get(item.key)) is not None]
    if not len(training) or not held_out:
        raise ConfigError(
            f"warm-up: {len(training)} responses to train on and {len(held_out)} held out can be drafted from; "
            "allowed: at least one of each (of three tokens or more)"
        )
    trainer = DrafterTrainer(model, config, plan.seed)
    history: list[dict[str, Any]] = []
    if (folder / TRAINING / STATE).is_file():
        verify_weights(folder / TRAINING)
        state, extra = read_checkpoint(folder / TRAINING)
        trainer.load_state(state)
        history = extra["history"]
        progress.message(f"warm-up continues after step {trainer.version}")
    if trainer.version > plan.steps:
        raise ConfigError(f"warm-up: steps is {plan.steps}; {folder} has already completed step {trainer.version}")
    if not _train(trainer, training, held_out, folder / TRAINING, plan, progress, should_stop, history):
        return None
    save_drafter(model, folder / DRAFTER)
    chains = sum(entry.num_drafted for entry in held_out)
    report = WarmupReport(model.kind, plan.depth, len(training), len(held_out), chains, history)
    atomic_write_text(folder / REPORT, json.dumps(asdict(report) | {"line": report.line}, indent=2) + "\n")
    return report


def _check_pairs(pairs: Sequence[Pair], model: DraftModel, config: DrafterConfig) -> None:
    allowed = min(config.max_tokens_per_micro_batch, int(model.config.max_position_embeddings))
    wrong = [
        f"warm-up: pair {i} has {pair.length} tokens; allowed: {allowed} (max_tokens_per_micro_batch and the target's "
        "positions)"
        for i, pair in enumerate(pairs)
        if pair.length > allowed
    ]
    if wrong:
        raise ConfigError("\n".join(wrong[:10]))


def _cache(
    pairs: Sequence[Pair],
    hidden_states: HiddenStates,
    folder: Path,
    model: DraftModel,
    plan: WarmupPlan,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> tuple[DataBuffer, DataBuffer] | None:
    """The training and held-out buffers, with an entry for each pair; None if stopped."""
    per_token = model.entry_size * _BYTES_PER_FEATURE + torch.int32.itemsize
    size = sum(pair.length * per_token + ENTRY_OVERHEAD_BYTES for pair in pairs)
    bounds = DrafterBufferConfig(memory_bytes=min(size, _IN_MEMORY), disk_bytes=size)
    training, held_out = (
        DataBuffer(folder / name, bounds, plan.seed, model.entry_size) for name in ("train", "held_out")
    )
    progress.start("hidden states", len(pairs))
    for i, pair in enumerate(pairs):
        buffer = held_out if i % plan.held_out_every == plan.held_out_every - 1 else training
        if f"0/{i}" not in buffer:
            if should_stop():
                break
            tokens = torch.tensor(pair.prompt + pair.response, dtype=torch.int32)
            hidden = hidden_states(tokens).bfloat16()
            buffer.add(Entry(f"0/{i}", 0, tokens, len(pair.prompt), hidden, 1.0))
        if i % _FLUSH_EVERY == 0:
            training.flush()
            held_out.flush()
        progress.advance()
    training.flush()
    held_out.flush()
    return None if should_stop() else (training, held_out)


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _train(
    trainer: DrafterTrainer,
    training: DataBuffer,
    held_out: Sequence[Entry],
    folder: Path,
    plan: WarmupPlan,
    progress: Progress,
    should_stop: Callable[[], bool],
    history: list[dict[str, Any]],
) -> bool:
    """Train up to the plan's steps, with saves and evaluations; False if stopped."""

    def evaluate(metrics: dict[str, float]) -> None:
        found = teacher_forced_acceptance(
            trainer.model, held_out, plan.depth, trainer.config.max_tokens_per_micro_batch
        )
        accepted = list(found.accepted_per_depth)
        per_depth = [value for name, value in metrics.items() if name.startswith("loss_depth_")]
        history.append(
            {
                "step": trainer.version,
                "acceptance_length": found.acceptance_length,
                "accepted_per_depth": accepted,
                "loss": metrics.get("loss"),
                "loss_per_depth": per_depth,
            }
        )
        shown = {"speculation/acceptance_length": found.acceptance_length}
        progress.step_done(trainer.version, shown)
        losses = f"; loss per depth {_numbers(per_depth)} nats" if per_depth else ""
        progress.message(f"  accepted per depth {_numbers(accepted)}{losses}")

    shown = trainer.version

    def between_micro_batches() -> bool:
        nonlocal shown
        progress.advance(trainer.version - shown)
        shown = trainer.version
        return should_stop()

    if not history:
        evaluate({})
    # drop the final row of an earlier, shorter warm-up, which one uninterrupted warm-up would not have
    history[:] = [row for row in history if row["step"] % plan.evaluate_every == 0 or row["step"] == plan.steps]
    progress.start("warm-up", plan.steps)
    progress.advance(trainer.version)
    while trainer.version < plan.steps:
        version = trainer.version
        stops = [every * (version // every + 1) for every in (plan.save_every, plan.evaluate_every)]
        count = min(*stops, plan.steps) - version
        session = train_session(trainer, training, 0, plan.entries_per_step, count, between_micro_batches)
        if session.outcome in FAILURES:
            found = [value for name, value in session.metrics.items() if name.startswith("loss_depth_")]
            raise RunError(
                f"warm-up: training ended with {session.outcome} after step {trainer.version}: "
                f"{FAILURES[session.outcome]} (loss per depth {_numbers(found)} nats, "
                f"of guessing {math.log(len(trainer.model.head_DH)):.2f}); the last checkpoint is in {folder}"
            )
        if session.outcome not in ("completed", "stopped"):
            raise RunError(f"warm-up: training ended with {session.outcome} after step {trainer.version}")
        due = trainer.version % plan.evaluate_every == 0 or trainer.version == plan.steps
        if session.outcome == "completed" and due:
            evaluate(session.metrics)
        with rewriting(folder) as staged:
            write_checkpoint(staged, trainer.model, trainer.state, {"history": history})
        if session.outcome == "stopped":
            return False
    return True
