"""Chat conversations as supervised training data: the policy learns what the assistant says, in every turn.

A row of a JSONL or parquet file has ``messages``, which end with the assistant's, or TRL's ``prompt`` and
``completion``, each of them text or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tlt.data.supervised import Example
from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.files import BadRow, chat_messages, parse_rows

_ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """Messages that end with the assistant's; ``where`` is ``file:line``."""

    where: str
    messages: tuple[dict[str, str], ...]


def read_conversations(paths: Sequence[Path]) -> list[Conversation]:
    """The conversations of all files, in their order.

    Raises:
        ConfigError: a file is missing, unreadable, empty or of an unknown kind, or has bad rows, named by file and
            line.
    """
    return [conversation for path in paths for conversation in parse_rows(path, partial(_conversation, path))]


def _conversation(path: Path, number: int, row: dict[str, Any]) -> Conversation:
    if row.get("messages") is not None:
        messages = chat_messages("messages", row["messages"])
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages = _said("prompt", row["prompt"], "user") + _said("completion", row["completion"], _ASSISTANT)
    else:
        found = ", ".join(sorted(map(str, row))) or "nothing"
        raise BadRow(f"no 'messages', and not both of 'prompt' and 'completion' (found {found})")
    if messages[-1]["role"] != _ASSISTANT:
        raise BadRow(f"the last message is of role '{messages[-1]['role']}'; must be '{_ASSISTANT}'")
    for position, message in enumerate(messages):
        if message["role"] == _ASSISTANT and (position == 0 or not message["content"].strip()):
            raise BadRow(f"message {position + 1}: an answer " + ("to nothing" if position == 0 else "without text"))
    return Conversation(f"{path}:{number}", tuple(messages))


def _said(key: str, value: Any, role: str) -> list[dict[str, str]]:
    return chat_messages(key, [{"role": role, "content": value}] if isinstance(value, str) else value)


def encode_conversation(tokenizer: Tokenizer, conversation: Conversation) -> Example:
    """The conversation as the chat template formats it; the assistant's messages are trained on, with their end.

    Each of the assistant's messages is encoded apart from what precedes it, as in a rollout, where the prompt's tokens
    are fixed before the first one is sampled. What the template adds after the end of a message is not trained on. Only
    the last message gets an end of sequence if the template has none.

    Raises:
        ConfigError: the template refuses the messages, or changes earlier messages when later ones follow.
    """
    messages, token_ids, mask, text = list(conversation.messages), list[int](), list[int](), ""
    try:
        for position, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            asked = tokenizer.chat_text(messages[:position])
            answered = tokenizer.chat_text(messages[: position + 1], answered=True)
            if not asked.startswith(text) or not answered.startswith(asked):
                raise ConfigError(
                    f"the chat template changes what stands before message {position + 1}, so it cannot be trained on "
                    "as it is sampled; allowed: a template that only adds text, or one answer per conversation"
                )
            prompt, answer = (tokenizer.encode(part) for part in (asked[len(text) :], answered[len(asked) :]))
            end = next((i for i, token in enumerate(answer) if token in tokenizer.stop_ids), None)
            if end is None and position == len(messages) - 1:
                answer, end = [*answer, tokenizer.eos_id], len(answer)
            trained = len(answer) if end is None else end + 1
            token_ids += prompt + answer
            mask += [0] * len(prompt) + [1] * trained + [0] * (len(answer) - trained)
            text = answered
    except ConfigError as error:
        raise ConfigError(f"{conversation.where}: {error}") from error
    last = len(mask) - mask[::-1].index(1)  # nothing after the last trained token matters
    return Example(tuple(token_ids[:last]), tuple(mask[:last]))


class ConversationData:
    """Conversations in an order of their own in each epoch, a pure function of seed and index."""

    def __init__(self, conversations: Sequence[Conversation], tokenizer: Tokenizer, seed: int) -> None:
        self._conversations = conversations
        self._tokenizer = tokenizer
        self._seed = seed
        self._order: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] = (-1, np.empty(0, np.int64))

    def example(self, index: int) -> Example:
        """The example number ``index``, counted over all epochs.

        Raises:
            ConfigError: as :func:`encode_conversation`.
        """
        epoch, position = divmod(index, len(self._conversations))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._conversations)))
        return encode_conversation(self._tokenizer, self._conversations[self._order[1][position]])
