"""Supervised training data: examples, and those of worked solutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tlt.data.tokenizer import Tokenizer, encode_prompt
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.marker import in_format, worked_solution
from megatron_tlt.tasks.seeding import stable_int, stable_unit
from megatron_tlt.tasks.types import Problem
from megatron_tlt.tasks.wording import ANSWER_IN

CARELESS_MARK = "~"
SLIP_RATE = 0.5


@dataclass(frozen=True)
class Example:
    """Prompt, solution and end-of-sequence as ids; ``loss_mask[i]`` is 1 if ``token_ids[i]`` is a prediction target."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.token_ids)


def solution_text(problem: Problem, careless_fraction: float = 0.0) -> str:
    """The worked solution for training, with its answer in the task's ``answer_format``.

    A ``careless_fraction`` of the problems, chosen by their ids, gets a careless guess instead: with its own mark, and
    an answer without the work, with half of its characters replaced by others from the work. Raises ConfigError if the
    problem has no worked solution.
    """
    if problem.solution is None:
        raise ConfigError(
            f"problem {problem.uid}: no worked solution, so supervised warm-up cannot use task {problem.source}"
        )
    answer_format = problem.metadata.get(ANSWER_IN)
    solution = in_format(problem.solution, answer_format)
    if stable_unit("careless", problem.uid) >= careless_fraction:
        return solution
    rng = np.random.default_rng(stable_int("slips", problem.uid))
    answer = np.array(list(problem.answer))
    slips = rng.random(len(answer)) < SLIP_RATE
    guess = np.where(slips, rng.choice(list(solution.replace("\n", "")), len(answer)), answer)
    mark = f"{CARELESS_MARK}\n" if answer_format == "last_line" else CARELESS_MARK
    return mark + in_format(worked_solution([], "".join(guess)), answer_format)


def encode_example(tokenizer: Tokenizer, problem: Problem, careless_fraction: float = 0.0) -> Example:
    """Encodes the prompt with its :func:`solution_text`."""
    prompt = encode_prompt(tokenizer, problem)
    # Encoded separately, as in a rollout, where the prompt's tokens are fixed before the first one is sampled.
    target = [*tokenizer.encode(solution_text(problem, careless_fraction)), tokenizer.eos_id]
    return Example((*prompt, *target), (0,) * len(prompt) + (1,) * len(target))


def fitting_examples(examples: Sequence[Example], max_tokens: int) -> list[Example]:
    """The examples of at most ``max_tokens`` tokens; longer ones are dropped, as truncation would cut their answers.

    Raises:
        ConfigError: every example is longer.
    """
    fitting = [example for example in examples if len(example) <= max_tokens]
    if not fitting:
        shortest = min((len(example) for example in examples), default=0)
        raise ConfigError(
            f"model.recipe.supervised.max_sequence_tokens: found {max_tokens}; each of {len(examples)} examples is "
            f"longer; allowed: at least {shortest}, so that one fits"
        )
    return fitting
