"""Tokenizers: a SentencePiece model folder of ours, or any Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.types import Problem

MODEL_FILE = "tokenizer.model"
META_FILE = "tokenizer_meta.json"  # says that the folder's tokenizer.model is ours and how it is to be read
META_FORMAT = "megatron_tlt.sentencepiece.v1"
HF_FILES = ("tokenizer.json", "tokenizer_config.json")


class Tokenizer(Protocol):
    """Text to ids and back. There is no beginning-of-sequence token unless a chat template writes one."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def eos_id(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, no special tokens added."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end-of-sequence and padding give nothing."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int] | None:
        """The ids of chat messages up to where the answer begins; None without a chat template."""

    def save(self, folder: Path) -> None:
        """Copies whatever makes ``folder`` loadable by ``load_tokenizer`` and by ``transformers``."""


class SentencePieceTokenizer:
    """A folder that ``data.tokenizer_training`` wrote."""

    def __init__(self, folder: Path) -> None:
        import sentencepiece

        self._folder = folder
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=(folder / MODEL_FILE).read_bytes())
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{folder / MODEL_FILE}: not a readable SentencePiece model") from error

    @property
    def vocab_size(self) -> int:
        return int(self._model.vocab_size())

    @property
    def eos_id(self) -> int:
        return int(self._model.eos_id())

    @property
    def pad_id(self) -> int:
        return int(self._model.pad_id())

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(i) for i in ids]))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int] | None:
        return None

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (MODEL_FILE, META_FILE, *HF_FILES):
            copy_file(self._folder / name, folder / name)


class HuggingFaceTokenizer:
    """Any folder that ``transformers.AutoTokenizer`` reads."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            # A local folder only: never a name to look up, never code from the folder.
            self._hf: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds, by file and release
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(f"{folder}: transformers cannot read its tokenizer: {reason[0]}") from error
        if self._hf.eos_token_id is None:
            raise ConfigError(f"{folder}: its tokenizer has no end-of-sequence token; set eos_token")

    @property
    def vocab_size(self) -> int:
        return len(self._hf)

    @property
    def eos_id(self) -> int:
        return int(self._hf.eos_token_id)

    @property
    def pad_id(self) -> int:
        return int(self._hf.pad_token_id if self._hf.pad_token_id is not None else self._hf.eos_token_id)

    def encode(self, text: str) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(i) for i in ids]
        return str(self._hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int] | None:
        if not self._hf.chat_template:
            return None
        text = self._hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.encode(text)

    def save(self, folder: Path) -> None:
        self._hf.save_pretrained(str(folder))


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a folder. Raises ConfigError when the folder is missing or holds none that can be read."""
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


def encode_prompt(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """A problem's prompt: through the chat template where the problem has messages and the tokenizer a template."""
    messages = problem.metadata.get("messages")
    ids = tokenizer.encode_chat(messages) if messages else None
    return tokenizer.encode(problem.prompt) if ids is None else ids


def copy_file(source: Path, target: Path) -> None:
    """Copies under a temporary name and renames."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.copyfile(source, temporary)
    temporary.replace(target)
