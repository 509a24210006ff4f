"""How a task's prompts are put to the model: system prompt, instruction, chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.types import Problem

if TYPE_CHECKING:
    from megatron_tlt.config.schema import TaskConfig

#: What asks for each ``answer_format``, unless the task has an ``instruction`` of its own.
INSTRUCTIONS = {
    "answer_tag": "Think step by step. Write the final answer between <answer> and </answer>.",
    "boxed": "Think step by step. Put the final answer into \\boxed{}.",
    "last_line": "Think step by step. Write the final answer alone on the last line.",
}
ANSWER_IN = "answer_in"
"""Key of a problem's metadata: where its verifier looks for the answer."""


@dataclass(frozen=True)
class Wording:
    """Applied to every problem of a task.

    Attributes:
        system_prompt: the first chat message; None for none.
        instruction: a paragraph after the prompt; empty for none.
        chat: wrap a plain prompt as a user's message, for the model's chat template.
        answer_format: where the verifier looks for the answer; None for its own rules.
    """

    system_prompt: str | None = None
    instruction: str = ""
    chat: bool = False
    answer_format: str | None = None

    @classmethod
    def of(cls, task: TaskConfig) -> Wording:
        """That of a task's config."""
        default = INSTRUCTIONS[task.answer_format] if task.answer_format is not None else ""
        return cls(
            task.system_prompt,
            default if task.instruction is None else task.instruction,
            task.chat,
            task.answer_format,
        )

    def apply(self, problem: Problem) -> Problem:
        """The problem as the model gets it.

        Raises:
            ConfigError: a system prompt for a problem whose own messages begin with one.
        """
        metadata = dict(problem.metadata)
        if self.answer_format is not None:
            metadata[ANSWER_IN] = self.answer_format
        text = self._instructed(problem.prompt)
        messages = metadata.get("messages")
        if messages is None and self.chat:
            messages = [{"role": "user", "content": text}]
        elif messages is not None and self.instruction:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": self._instructed(last["content"])}]
        if messages is not None and self.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise ConfigError(f"problem {problem.uid}: it has a system message; allowed: no tasks[].system_prompt")
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if messages is not None:
            metadata["messages"] = messages
        return replace(problem, prompt=text, metadata=metadata)

    def _instructed(self, text: str) -> str:
        return f"{text}\n\n{self.instruction}" if self.instruction else text
