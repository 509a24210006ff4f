"""The ``tasks`` of a launch config: sources of problems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_tlt.config.section import Section

_OWN_VERIFIER = {"file": "math", "python": "math", "procedural": "procedural"}
"""Default verifier of tasks whose problems do not come from reasoning-gym."""


class CurriculumConfig(Section):
    """Weights of the tasks by the policy's pass rate on each: see ``tasks.curriculum``.

    ``decay`` is the weight of the earlier steps in the moving average of a pass rate; ``floor`` the smallest factor of
    a task's own weight.
    """

    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.8
    floor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2


class EnvironmentConfig(Section):
    """An environment that answers the policy's turns, so that a response has several (``environments/``).

    ``name`` is one of ``environments.registry.ENVIRONMENTS`` or the import path of a class; ``params`` are its
    arguments. A response has at most ``max_turns`` turns, of at most ``max_turn_tokens`` tokens each, and
    ``rollout.max_response_tokens`` tokens in all, the environment's included. A text in ``stop`` ends a turn, besides
    the tokenizer's stop tokens. In chats the environment's answers are messages of ``role``, and the chat template
    shows the environment's tools, unless ``tools_in_prompt`` is false.
    """

    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    max_turns: Annotated[int, Field(ge=1)] = 4
    max_turn_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: tuple[str, ...] = ()
    role: Literal["user", "tool"] = "user"
    tools_in_prompt: bool = True


class TierMixConfig(Section):
    """Shares of a pool, relative to each other, by how often the policy solves a problem (``tasks.pool.tier_of``)."""

    easy: Annotated[float, Field(ge=0.0)] = 0.0
    medium: Annotated[float, Field(ge=0.0)] = 0.0
    hard: Annotated[float, Field(ge=0.0)] = 0.0


class TaskConfig(Section):
    """One source of problems: a generator, a dataset of reasoning-gym, a prompt file, or a function by import path.

    ``verifier`` is a name of ``rewards.VERIFIERS`` or the import path of a function (``rewards/functions.py``); its
    default is the generator's or dataset's own, and ``math`` for other kinds.

    ``kind: generated`` takes ``name`` (see ``tasks.GENERATORS``) and ``params`` for its generator: short prompts with
    worked solutions; ``kind: reasoning_gym`` takes the ``name`` of any dataset of that library and ``params`` for its
    config, and rewards with its score; ``kind: file`` takes ``path`` (JSONL or parquet);
    ``kind: python`` takes as ``name`` the import path of a function or class that draws problems, and its ``params``
    (``tasks/python_task.py``); ``kind: procedural`` takes the ``name`` of a family (``tasks.procedural.FAMILIES``) and
    ``params`` for its axes.

    ``held_out`` is what train and held-out problems do not share: prompts (or canonical forms), or structures.
    ``budget`` makes the training problems a pool of so many, used in epochs; ``tier_mix`` gives the shares of easy,
    medium and hard ones in it by the pass rates in ``tier_file``, which ``tlt calibrate`` writes.

    ``chat`` applies the model's chat template to plain prompts, after ``system_prompt``. ``answer_format`` selects the
    place of the answer for the verifier (the last ``<answer>`` tag, the last box, the last line) and adds a sentence
    that requests this format; ``instruction`` replaces that sentence. ``environment`` answers the policy's turns.
    """

    kind: Literal["generated", "reasoning_gym", "file", "python", "procedural"] = "generated"
    name: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    params: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    held_out_path: Path | None = None
    held_out_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    held_out: Literal["prompt", "structure"] = "prompt"
    budget: Annotated[int, Field(ge=1)] | None = None
    tier_file: Path | None = None
    tier_mix: TierMixConfig | None = None
    verifier: str = Field(default_factory=lambda known: _OWN_VERIFIER.get(known.get("kind"), "reasoning_gym"))
    chat: bool = False
    system_prompt: str | None = None
    instruction: str | None = None
    answer_format: Literal["answer_tag", "boxed", "last_line"] | None = None
    environment: EnvironmentConfig | None = None

    @model_validator(mode="after")
    def _kind_has_options(self) -> TaskConfig:
        if self.kind == "file" and self.path is None:
            raise ValueError("a task of kind 'file' needs 'path'")
        if self.kind != "file" and self.path is not None:
            raise ValueError(f"a task of kind '{self.kind}' takes no 'path'")
        if self.kind == "reasoning_gym" and self.answer_format is None:
            raise ValueError("a task of kind 'reasoning_gym' needs 'answer_format': answer_tag, boxed or last_line")
        if self.kind == "generated" and (self.answer_format or self.instruction):
            raise ValueError("a task of kind 'generated' has its own answer format; no answer_format or instruction")
        if self.kind == "procedural" and (self.params.get("wording") == "natural") != (self.answer_format is not None):
            raise ValueError(
                "a task of kind 'procedural' needs 'answer_format' with params.wording: natural, and takes none with "
                "compact, which has its own"
            )
        if self.kind != "file" and self.system_prompt is not None and not self.chat:
            raise ValueError("system_prompt is a chat message; it needs 'chat: true'")
        return self

    @property
    def without_pool(self) -> TaskConfig:
        """The same task without a limit on its training problems."""
        return self.model_copy(update={"budget": None, "tier_file": None, "tier_mix": None})

    @model_validator(mode="after")
    def _pool_is_whole(self) -> TaskConfig:
        if self.held_out == "structure" and self.kind != "procedural":
            raise ValueError(f"held_out: structure needs kind procedural; kind '{self.kind}' has no structures")
        if (self.tier_mix is None) != (self.tier_file is None):
            there, absent = ("tier_mix", "tier_file") if self.tier_file is None else ("tier_file", "tier_mix")
            raise ValueError(
                f"found {there} without {absent}; allowed: both, the shares and the file of `tlt calibrate`, or neither"
            )
        if self.tier_mix is not None and (self.budget is None or not any(self.tier_mix.model_dump().values())):
            raise ValueError("tier_mix needs at least one tier, and 'budget', the number of problems to share out")
        if self.tier_mix is not None and self.kind == "file":
            raise ValueError("a task of kind 'file' takes no tier_mix; make a file for each tier, and a task of each")
        return self
