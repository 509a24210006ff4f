"""Tokenizers: our SentencePiece model folder, or any Hugging Face folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.files import atomic_write_bytes
from megatron_tlt.tasks.types import Problem

MODEL_FILE = "tokenizer.model"
META_FILE = "tokenizer_meta.json"  # marks the folder's tokenizer.model as ours, with its format
META_FORMAT = "megatron_tlt.sentencepiece.v1"
HF_FILES = ("tokenizer.json", "tokenizer_config.json")
_BATCH = 1000  # number of prompts tokenized at a time
Messages = list[dict[str, str]]
Tools = list[dict[str, Any]]
_NO_TEMPLATE = "{}: its tokenizer has no chat template; allowed: one with a template, or prompts that are plain text"


class Tokenizer(Protocol):
    """Converts text to ids and back. Adds no beginning-of-sequence token unless a chat template does."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def eos_id(self) -> int:
        """The end-of-sequence id of supervised targets."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that ends a response: first ``eos_id``, then the folder's other ``eos_token_id``, ascending."""

    @property
    def pad_id(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """The number of ids that ``encode`` gives for each text, computed in one batch."""

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of ids; special tokens (end of sequence, padding) are dropped, or shown by name on request."""

    def chat_text(self, messages: Messages, *, answered: bool = False, tools: Tools | None = None) -> str:
        """Formats chat messages with the chat template, up to the start of the answer.

        With ``answered`` the last message is the answer, up to what the template adds after it. The template shows
        ``tools``, in the form of ``transformers``.

        Raises:
            ConfigError: there is no chat template, it rejects the messages, or it does not show the tools.
        """

    def save(self, folder: Path) -> None:
        """Copies all files that ``load_tokenizer`` and ``transformers`` need to load ``folder``."""


class SentencePieceTokenizer:
    """A folder written by ``data.tokenizer_training``."""

    def __init__(self, folder: Path) -> None:
        import sentencepiece

        self._folder = folder
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=(folder / MODEL_FILE).read_bytes())
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{folder / MODEL_FILE}: not a readable SentencePiece model") from error
        self.stop_ids = stop_token_ids(folder, self.eos_id)

    @property
    def vocab_size(self) -> int:
        return int(self._model.vocab_size())

    @property
    def eos_id(self) -> int:
        return int(self._model.eos_id())

    @property
    def pad_id(self) -> int:
        return int(self._model.pad_id())

    @property
    def has_chat_template(self) -> bool:
        return False

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self._model.encode(list(texts))]

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        ids = [int(i) for i in ids]
        if not special_tokens:
            return str(self._model.decode(ids))
        runs = [(special, list(run)) for special, run in itertools.groupby(ids, self._model.is_control)]
        return "".join(
            "".join(map(self._model.id_to_piece, run)) if special else str(self._model.decode(run))
            for special, run in runs
        )

    def chat_text(self, messages: Messages, *, answered: bool = False, tools: Tools | None = None) -> str:
        raise ConfigError(_NO_TEMPLATE.format(self._folder))

    def save(self, folder: Path) -> None:
        for name in (MODEL_FILE, META_FILE, *HF_FILES):
            atomic_write_bytes(folder / name, (self._folder / name).read_bytes())


class HuggingFaceTokenizer:
    """Any folder that ``transformers.AutoTokenizer`` reads."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        try:
            # Only a local folder: never download by name, never run code from the folder.
            self._hf: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many types, depending on file and release
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(f"{folder}: transformers cannot read its tokenizer: {reason[0]}") from error
        if self._hf.eos_token_id is None:
            raise ConfigError(f"{folder}: its tokenizer has no end-of-sequence token; set eos_token")
        self.stop_ids = stop_token_ids(folder, self.eos_id)

    @property
    def vocab_size(self) -> int:
        return len(self._hf)

    @property
    def eos_id(self) -> int:
        return int(self._hf.eos_token_id)

    @property
    def pad_id(self) -> int:
        return int(self._hf.pad_token_id if self._hf.pad_token_id is not None else self._hf.eos_token_id)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=False))

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        if not texts:
            return []
        encoded = self._hf(list(texts), add_special_tokens=False, return_attention_mask=False)
        return [len(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        ids = [int(i) for i in ids]
        return str(self._hf.decode(ids, skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False))

    def chat_text(self, messages: Messages, *, answered: bool = False, tools: Tools | None = None) -> str:
        if not self.has_chat_template:
            raise ConfigError(_NO_TEMPLATE.format(self._folder))
        try:
            text = self._hf.apply_chat_template(
                messages, tools=tools, add_generation_prompt=not answered, tokenize=False
            )
        except Exception as error:  # a template is a program and may raise any error
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(f"the chat template of {self._folder} refuses the messages: {reason[0]}") from error
        if tools and any(tool["function"]["name"] not in text for tool in tools):
            raise ConfigError(
                f"the chat template of {self._folder} does not show tools; allowed: a template that does, or "
                "tasks[].environment.tools_in_prompt: false with a system prompt that describes them"
            )
        return str(text)

    def save(self, folder: Path) -> None:
        self._hf.save_pretrained(str(folder))


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a folder. Raises ConfigError if the folder is missing or holds no readable tokenizer."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; a tokenizer folder holds {MODEL_FILE} or tokenizer.json")
    meta = folder / META_FILE
    if not meta.is_file():
        return HuggingFaceTokenizer(folder)
    try:
        found = json.loads(meta.read_text(encoding="utf-8")).get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{meta}: cannot be read; it must be an object with 'format'") from error
    if found != META_FORMAT:
        raise ConfigError(f"{meta}: format is {found!r}; allowed is {META_FORMAT!r}")
    return SentencePieceTokenizer(folder)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a Hugging Face folder has one, by its files alone."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    return (folder / "chat_template.jinja").is_file() or bool(settings.get("chat_template"))


def stop_token_ids(folder: Path, eos_id: int) -> tuple[int, ...]:
    """``eos_id``, then every other ``eos_token_id`` of a model folder, ascending.

    They are in ``generation_config.json`` or, if that is absent, in ``config.json``, as transformers reads them. Raises
    ConfigError if the file is unreadable, or ``eos_token_id`` is neither a token id nor a list of them.
    """
    files = [folder / name for name in ("generation_config.json", "config.json") if (folder / name).is_file()]
    if not files:
        return (eos_id,)
    try:
        found = json.loads(files[0].read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{files[0]}: cannot be read; it must be a JSON object") from error
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise ConfigError(f"{files[0]}: eos_token_id is {found!r}; allowed: a token id or a list of them")
    return (eos_id, *sorted(set(ids) - {eos_id}))


def prompt_text(tokenizer: Tokenizer, problem: Problem) -> str:
    """The model's input text: the problem's prompt, or its chat messages formatted by the chat template.

    Raises:
        ConfigError: the problem has messages, but the tokenizer has no chat template or its template rejects them.
    """
    messages = problem.metadata.get("messages")
    return problem.prompt if messages is None else tokenizer.chat_text(messages, tools=problem.tools)


def response_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of a response without the stop token at its end."""
    ids = list(token_ids)
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in tokenizer.stop_ids else ids)


_A_TURN = "the turn that has been said"


def observation_text(tokenizer: Tokenizer, text: str, turn: Sequence[int], role: str) -> str:
    """What the chat template puts between a turn and the start of the next one: the turn's end and a message.

    Args:
        tokenizer: of the chat.
        text: the message's.
        turn: ids of the turn; the end that they contain already is left out.
        role: the message's.

    Raises:
        ConfigError: there is no template, it refuses the messages, or it changes a turn that has been said.
    """
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _A_TURN}]
    whole = tokenizer.chat_text([*messages, {"role": role, "content": text}])
    _, found, rest = whole.partition(_A_TURN)
    if not found:
        raise ConfigError("the chat template changes the text of an earlier turn; allowed: one that repeats it")
    ended = turn and turn[-1] in tokenizer.stop_ids
    return rest.removeprefix(tokenizer.decode([turn[-1]], special_tokens=True)) if ended else rest


def encode_prompt(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """The ids of :func:`prompt_text`. Raises ConfigError like :func:`prompt_text`; names the problem's id."""
    try:
        return tokenizer.encode(prompt_text(tokenizer, problem))
    except ConfigError as error:
        raise ConfigError(f"problem {problem.uid}: {error}") from error


def prompt_lengths(
    tokenizer: Tokenizer, problems: Sequence[Problem], advance: Callable[[int], object] = lambda count: None
) -> list[int | str]:
    """The token counts of prompts as ``encode_prompt`` gives them, in batches; a text states why a count is missing.

    ``advance`` receives the number of prompts in each finished batch.
    """
    lengths: list[int | str] = []
    for start in range(0, len(problems), _BATCH):
        texts: list[str] = []
        refused: dict[int, str] = {}
        for i, problem in enumerate(problems[start : start + _BATCH]):
            try:
                texts.append(prompt_text(tokenizer, problem))
            except ConfigError as error:
                refused[i] = str(error)
                texts.append("")
        counts = tokenizer.count_tokens(texts)
        lengths += [refused.get(i, count) for i, count in enumerate(counts)]
        advance(len(texts))
    return lengths
