"""Handling of prompts that are longer than ``rollout.max_prompt_tokens``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.types import Problem

_SHOWN = 10


def allowed_prompts(max_tokens: int) -> str:
    """The end of a message about a prompt that is too long."""
    return (
        f"allowed by rollout.max_prompt_tokens: {max_tokens} "
        "(rollout.filter_overlong_prompts: true leaves longer ones out)"
    )


@dataclass
class PromptLimit:
    """The limit on the prompt length of a run.

    Args:
        max_tokens: ``rollout.max_prompt_tokens``.
        leave_out: ``rollout.filter_overlong_prompts``: longer prompts are left out; otherwise they are errors.
        lengths: returns the number of tokens of each problem's prompt, or text why it cannot be tokenized.
        notes: one line per file with prompts that were left out.
    """

    max_tokens: int
    leave_out: bool
    lengths: Callable[[Sequence[Problem]], list[int | str]]
    notes: list[str] = field(default_factory=list)

    def fits(self, problem: Problem) -> bool:
        """Whether one prompt is within the limit."""
        (length,) = self.lengths([problem])
        return isinstance(length, int) and length <= self.max_tokens

    def fitting(self, problems: Sequence[Problem], numbers: Sequence[int], where: str) -> list[int]:
        """Indices of the problems of a file whose prompts are within the limit.

        Args:
            problems: of one split.
            numbers: their lines (JSONL) or rows (parquet), from 1.
            where: the file.

        Raises:
            ConfigError: a prompt cannot be tokenized, prompts are too long and are not filtered (lists the first ten
                and their count), or every prompt is too long.
        """
        lengths = self.lengths(problems)
        refused: dict[str, list[int]] = {}
        for number, length in zip(numbers, lengths, strict=True):
            if isinstance(length, str):
                refused.setdefault(length, []).append(number)
        lines = [
            f"{where}:{rows[0]}: {reason}" + (f" ({len(rows)} rows in all)" if len(rows) > 1 else "")
            for reason, rows in list(refused.items())[:_SHOWN]
        ]
        counted = [(i, length) for i, length in enumerate(lengths) if isinstance(length, int)]
        over = [(numbers[i], length) for i, length in counted if length > self.max_tokens]
        longest = max((length for _, length in over), default=0)
        if over and not self.leave_out:
            lines += [
                f"{where}:{row}: its prompt has {n} tokens; {allowed_prompts(self.max_tokens)}"
                for row, n in over[:_SHOWN]
            ]
            if len(over) > _SHOWN:
                lines.append(f"{where}: {len(over)} of {len(problems)} prompts are too long, up to {longest} tokens")
        elif over and len(over) == len(counted):
            lines.append(
                f"{where}: each of {len(over)} prompts is longer than rollout.max_prompt_tokens, {self.max_tokens}: "
                "rollout.filter_overlong_prompts would leave out all"
            )
        if lines:
            raise ConfigError("\n".join(lines))
        if over:
            self.notes.append(
                f"{where}: rollout.filter_overlong_prompts leaves out {len(over)} of {len(problems)} prompts; "
                f"they have up to {longest} tokens, rollout.max_prompt_tokens is {self.max_tokens}"
            )
        return [i for i, length in counted if length <= self.max_tokens]
