"""Time that a drafter's checkpoint blocks its training: all at once, in the background, only trained tensors."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from megatron_tlt.bench.result import BenchmarkResult, interleave, ratio_of_medians
from megatron_tlt.checkpoint.payload import Payload
from megatron_tlt.config.drafter import DrafterConfig, DrafterLossConfig
from megatron_tlt.drafter import DrafterTrainer, Entry, SharedWeights
from megatron_tlt.drafter.checkpoint import KIND, payload_of
from megatron_tlt.drafter.folder import build_drafter
from megatron_tlt.errors import RunError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.progress import Progress
from megatron_tlt.spot.checkpointer import SelectiveCheckpointer, newest

SYNC, ASYNC, OURS = "sync full", "async full", "selective async"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden-size", type=int, default=896, help="default sizes are those of Qwen2.5-0.5B")
    parser.add_argument("--intermediate-size", type=int, default=4864)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--key-value-heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a training step")
    parser.add_argument("--steps", type=int, default=2, help="training steps between checkpoints, at least")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats")
    parser.add_argument("--dir", type=Path, help="folder for the checkpoints (default: a temporary folder)")


class _Way(Protocol):
    """A method of saving; training depends only on its two calls."""

    def save(self, version: int, payload: Payload) -> None:
        """Saves; training is blocked during the call."""

    def done(self) -> bool:
        """Whether the checkpoint is on disk."""


class _AtOnce:
    """Training waits until the file is on disk; the previous file is removed outside the timing."""

    def __init__(self, folder: Path, write: Callable[[Mapping[str, torch.Tensor], Path], None]) -> None:
        folder.mkdir()
        self._folder, self._write = folder, write

    def save(self, version: int, payload: Payload) -> None:
        path = self._folder / f"{version}"
        self._write({name: tensor.detach() for name, tensor in payload.tensors.items()}, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def done(self) -> bool:
        for old in sorted(self._folder.iterdir(), key=lambda path: int(path.name))[:-1]:
            old.unlink()
        return True


class _InBackground:
    """A session's checkpointer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checkpointer = SelectiveCheckpointer(folder)
        self._saved: tuple[int, set[str]] = (0, set())

    def save(self, version: int, payload: Payload) -> None:
        self._saved = (version, set(payload.tensors))
        self._checkpointer.save(version, payload)

    def done(self) -> bool:
        return self._checkpointer.wait(0.0)

    def check(self) -> None:
        """Raises RunError if the last save is not on disk."""
        self._checkpointer.close()
        found = newest(self._folder, KIND)
        on_disk = None if found is None else (found.payload.header["version"], set(found.payload.tensors))
        if on_disk != self._saved:
            raise RunError(f"{self._folder}: version {self._saved[0]} is not there: {self._checkpointer.counts}")


def _torch_save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    torch.save(dict(tensors), path)


def _torch_save_without_checksums(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(dict(tensors), path)
    finally:
        torch.serialization.set_crc32_options(before)


def _safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file(dict(tensors), path)


WRITERS = {
    "torch.save": _torch_save,
    "torch.save without checksums": _torch_save_without_checksums,
    "safetensors": _safetensors,
}
"""How a naive trainer may write its file; the best of these counts."""


class _Training:
    """A drafter and its training steps, always the same."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        architecture = LlamaConfig(
            vocab_size=arguments.vocabulary,
            hidden_size=arguments.hidden_size,
            intermediate_size=arguments.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=arguments.heads,
            num_key_value_heads=arguments.key_value_heads,
        )
        generator = torch.Generator().manual_seed(0)
        shape = (arguments.vocabulary, arguments.hidden_size)
        embedding, head = (torch.randn(shape, generator=generator).mul_(0.02).bfloat16() for _ in range(2))
        self._shared = SharedWeights(embedding, head)
        model = build_drafter(architecture, "eagle", self._shared)
        # noise cannot be learned: any other loss would stay above ln V, which ends training
        config = DrafterConfig(
            kind="eagle", unroll_steps=1, lr=1e-6, loss=DrafterLossConfig(name="tv", regression_weight=0.5)
        )
        self._trainer = DrafterTrainer(model, config, seed=0)
        tokens = torch.randint(0, arguments.vocabulary, (arguments.tokens,), generator=generator, dtype=torch.int32)
        hidden = torch.randn(arguments.tokens, model.entry_size, generator=generator).bfloat16()
        self._entries = [Entry("0", 0, tokens, 1, hidden, 1.0)]
        self.alone_s: list[float] = []
        self.step()  # the optimizer has no state before

    @property
    def version(self) -> int:
        return self._trainer.version

    def selective(self) -> Payload:
        return payload_of(self._trainer.state, {})

    def full(self) -> Payload:
        """Everything that a trainer saves with whole modules, including embedding and LM head."""
        trained = self.selective()
        shared = {"embed_tokens.weight": self._shared.embedding, "lm_head.weight": self._shared.head}
        return replace(trained, tensors={**trained.tensors, **shared})

    def step(self) -> float:
        """Seconds of one optimizer step.

        Raises:
            RunError: it did not train.
        """
        began = time.perf_counter()
        outcome = self._trainer.train_step(self._entries).outcome
        if outcome != "trained":
            raise RunError(f"the benchmark's drafter does not train: {outcome}")
        return time.perf_counter() - began


@dataclass
class _Case:
    """A method of saving, its contents, and its measurements in seconds; entry i of each list is checkpoint i."""

    way: _Way
    payload: Callable[[], Payload]
    nbytes: int = 0
    stalls: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)

    def measure(self, training: _Training, steps: int) -> None:
        """Measures steps alone, one checkpoint, then steps until it is on disk."""
        training.alone_s += [training.step() for _ in range(steps)]
        began = time.perf_counter()
        payload = self.payload()
        self.way.save(training.version, payload)
        self.stalls.append(time.perf_counter() - began)
        beside = []
        while not self.way.done():
            beside.append(training.step())
        self.whole.append(time.perf_counter() - began)
        self.beside.append(beside)
        self.nbytes = sum(tensor.nbytes for tensor in payload.tensors.values())

    def lost(self, step_alone_s: float) -> list[float]:
        """Training time lost per checkpoint: blocked, and slower while it was written."""
        slower = [sum(steps) - len(steps) * step_alone_s for steps in self.beside]
        return [stall + more for stall, more in zip(self.stalls, slower, strict=True)]


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per method of saving; the target compares with the best method of saving everything at once.

    The first round is not counted: it has no staging memory yet, and training has no optimizer state.
    """
    with (
        tempfile.TemporaryDirectory(dir=arguments.dir) as folder,
        Progress(0, 1 + arguments.repeats, stream=sys.stderr) as progress,
    ):
        root = Path(folder)
        progress.message("building a drafter, its embedding and its LM head")
        training = _Training(arguments)
        cases = {
            f"{SYNC}, {kind}": _Case(_AtOnce(root / kind, write), training.full) for kind, write in WRITERS.items()
        }
        background = {ASYNC: _InBackground(root / "async"), OURS: _InBackground(root / "ours")}
        cases[ASYNC] = _Case(background[ASYNC], training.full)
        cases[OURS] = _Case(background[OURS], training.selective)
        measured = 0

        def measure(name: str) -> None:
            nonlocal measured
            cases[name].measure(training, arguments.steps)
            progress.message(f"{name}: training stood still for {1000 * cases[name].stalls[-1]:.0f} ms")
            measured += 1
            if measured % len(cases) == 0:
                progress.step_done(measured // len(cases), {})

        interleave({name: partial(measure, name) for name in cases}, arguments.repeats, warmups=1)
        for way in background.values():
            way.check()
    return _result(cases, training.alone_s[arguments.steps * len(cases) :])


def _result(cases: Mapping[str, _Case], alone_s: list[float]) -> BenchmarkResult:
    result = BenchmarkResult(environment=describe_environment(), name="drafter-checkpoint")
    step_s = statistics.median(alone_s)
    stalls = {name: case.stalls[1:] for name, case in cases.items()}
    lost = {name: case.lost(step_s)[1:] for name, case in cases.items()}
    best = min((name for name in cases if name.startswith(SYNC)), key=lambda name: statistics.median(stalls[name]))
    for name, case in cases.items():
        beside = [step for steps in case.beside[1:] for step in steps]
        result.rows.append(
            {
                "case": name,
                "megabytes": case.nbytes / 1e6,
                "stall_ms": 1000 * statistics.median(stalls[name]),
                "first_stall_ms": 1000 * case.stalls[0],
                "on_disk_ms": 1000 * statistics.median(case.whole[1:]),
                "step_ms": 1000 * step_s,
                "step_beside_ms": 1000 * statistics.median(beside) if beside else None,
                "lost_ms": 1000 * statistics.median(lost[name]),
                "stall_sync_over_this": ratio_of_medians(stalls[best], stalls[name]),
                "stalls_s": stalls[name],
                "lost_s": lost[name],
                "steps_alone_s": alone_s,
                "steps_beside_s": beside,
            }
        )
    ratio = ratio_of_medians(stalls[best], stalls[OURS])["ratio"]
    result.target("stall_best_sync_full_over_selective_async", ratio, ">=", 9.2)
    return result
