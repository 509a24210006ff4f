"""Formats a task's prompts for the model: system prompt, instruction, chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_tlt.environments.registry import tool_schemas
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.types import Problem

if TYPE_CHECKING:
    from megatron_tlt.config.task import TaskConfig

#: Default instruction for each ``answer_format``; a task's ``instruction`` replaces it.
INSTRUCTIONS = {
    "answer_tag": "Think step by step. Write the final answer between <answer> and </answer>.",
    "boxed": "Think step by step. Put the final answer into \\boxed{}.",
    "last_line": "Think step by step. Write the final answer alone on the last line.",
}
ANSWER_IN = "answer_in"
"""Metadata key of a problem's answer format, for its verifier."""


@dataclass(frozen=True)
class Wording:
    """The format of a task's prompts.

    Attributes:
        system_prompt: the first chat message; None for none.
        instruction: a paragraph after the prompt; empty for none.
        chat: make a plain prompt a user message for the model's chat template.
        answer_format: the place of the answer for the verifier; None for its own rules.
        environment: the task's section of this name, as plain data; None: a response has one turn.
        tools: the environment's tools for the chat template.
    """

    system_prompt: str | None = None
    instruction: str = ""
    chat: bool = False
    answer_format: str | None = None
    environment: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    @classmethod
    def of(cls, task: TaskConfig, key: str) -> Wording:
        """From a task's config at ``key``.

        Raises:
            ConfigError: the environment cannot be made, or its tools cannot be described.
        """
        default = INSTRUCTIONS[task.answer_format] if task.answer_format is not None else ""
        return cls(
            task.system_prompt,
            default if task.instruction is None else task.instruction,
            task.chat,
            task.answer_format,
            None if task.environment is None else task.environment.model_dump(mode="json"),
            None if task.environment is None else tool_schemas(task.environment, f"{key}.environment"),
        )

    def apply(self, problem: Problem) -> Problem:
        """The problem with its formatted prompt.

        Raises:
            ConfigError: the task has a system prompt, but the problem's messages already begin with one.
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
        return replace(problem, prompt=text, metadata=metadata, environment=self.environment, tools=self.tools)

    def _instructed(self, text: str) -> str:
        return f"{text}\n\n{self.instruction}" if self.instruction else text
