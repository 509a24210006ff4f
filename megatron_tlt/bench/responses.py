"""Responses of a policy over epochs, without a model: recorded in a file, or drawn from a stated distribution."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.speculation.suffix_tree import MAX_TOKEN, Tokens
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.tasks.seeding import stable_int
from megatron_tlt.tasks.types import Problem

TASKS = (
    {"name": "chain_sum", "params": {"sizes": {"min": 6, "max": 16, "tail": 1.6}, "max_digits": 2}},
    {"name": "number_sorting", "params": {"sizes": {"min": 6, "max": 14, "tail": 1.6}}},
    {"name": "spell_backward", "params": {"sizes": {"min": 5, "max": 10, "tail": 1.6}}},
)
STYLES = ("{}", "so {}", "= {}", "{} ok")


@dataclass(frozen=True)
class TraceResponse:
    """One sample of one problem in one epoch (from 1)."""

    problem: str
    epoch: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class PolicyLaw:
    """A policy that writes worked solutions and changes slowly.

    Each line of a problem's solution has a preferred style, redrawn with probability ``drift`` from epoch to epoch. A
    sample uses it with probability ``habit``, else draws any style. In each line one character is wrong with
    probability ``slip``, which falls by a fifth per epoch. With ``repeated`` the problems are the same in every epoch,
    else none repeats.
    """

    drift: float = 0.15
    habit: float = 0.7
    slip: float = 0.3
    repeated: bool = True

    def sample(self, problem: Problem, epoch: int, sample: int) -> str:
        """A response; deterministic in the arguments."""
        rng = random.Random(stable_int("sample", problem.uid, epoch, sample))
        lines = []
        for number, line in enumerate((problem.solution or "").split("\n")):
            style = self._preferred(problem.uid, number, epoch) if rng.random() < self.habit else rng.choice(STYLES)
            if line and rng.random() < self.slip * 0.8 ** (epoch - 1):
                at = rng.randrange(len(line))
                line = line[:at] + rng.choice("0123456789abcdefghij+-") + line[at + 1 :]
            lines.append(style.format(line))
        return "\n".join(lines)

    def _preferred(self, uid: str, line: int, epoch: int) -> str:
        for earlier in range(epoch, 1, -1):
            rng = random.Random(stable_int("drift", uid, line, earlier))
            if rng.random() < self.drift:
                return rng.choice(STYLES)
        return random.Random(stable_int("style", uid, line)).choice(STYLES)


def synthetic_responses(law: PolicyLaw, problems: int, samples: int, epochs: int, seed: int = 0) -> list[TraceResponse]:
    """``samples`` responses to each problem in each epoch, tokenized by a small tokenizer of characters."""
    sources = build_sources([TaskConfig.model_validate(task) for task in TASKS], "train", seed)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer: Tokenizer = train_tokenizer([], 128, folder)
    responses = []
    for epoch in range(1, epochs + 1):
        for i in range(problems):
            problem = sources.problem(i if law.repeated else i + problems * (epoch - 1))
            prompt = tuple(tokenizer.encode(problem.prompt))
            for sample in range(samples):
                tokens = (*tokenizer.encode(law.sample(problem, epoch, sample)), tokenizer.eos_id)
                responses.append(TraceResponse(problem.uid, epoch, prompt, tokens))
    return responses


def read_recorded(path: Path) -> list[TraceResponse]:
    """Reads JSON lines with ``problem``, ``epoch`` (from 1), ``token_ids`` and, if known, ``prompt_ids``.

    Raises:
        ConfigError: the file is unreadable, or a line does not have that form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    return [_recorded(f"{path}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]


def _recorded(where: str, line: str) -> TraceResponse:
    try:
        row: dict[str, Any] = json.loads(line)
        return TraceResponse(
            str(row["problem"]), int(row["epoch"]), _ids(row.get("prompt_ids", ())), _ids(row["token_ids"])
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {error!r}; allowed: problem, epoch, token_ids (0 to {MAX_TOKEN}) and optionally prompt_ids"
        ) from error


def _ids(values: Sequence[int]) -> tuple[int, ...]:
    ids = tuple(values)
    if not all(type(i) is int and 0 <= i <= MAX_TOKEN for i in ids):
        raise ValueError("a token id out of range")
    return ids


class NoisyCopies:
    """Long responses for timing: groups of copies of a random text, each token replaced with probability ``noise``."""

    def __init__(self, length: int = 1000, copies: int = 64, noise: float = 0.05, vocabulary: int = 32_000) -> None:
        self._rng = np.random.default_rng(0)
        self._length, self._copies, self._noise, self._vocabulary = length, copies, noise, vocabulary
        self._base = self._random()
        self._number = 0

    def _random(self) -> Tokens:
        return self._rng.integers(0, self._vocabulary, self._length, dtype=np.int32)

    @property
    def group(self) -> int:
        """Group of the last response drawn."""
        return (self._number - 1) // self._copies

    def draw(self) -> Tokens:
        """Draws the next response."""
        if self._number and self._number % self._copies == 0:
            self._base = self._random()
        self._number += 1
        return np.where(self._rng.random(self._length) < self._noise, self._random(), self._base)
