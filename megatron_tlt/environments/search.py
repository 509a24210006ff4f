"""Search in a text: answers a query with the paragraphs that share the rarest words with it."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.environments.interface import Observation
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    from megatron_tlt.tasks.types import Problem

_WORD = re.compile(r"\w+")


class Search:
    """Answers ``<search>words</search>`` with paragraphs of a text file; a turn without a call ends the episode.

    The last call of a turn counts. Paragraphs are separated by empty lines. They are ranked by the sum, over the
    query's words that they contain, of the logarithm of the number of paragraphs over that of those with the word.

    Args:
        path: the text file (UTF-8).
        results: how many paragraphs an answer has at most.
        begin, end: the tags.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """

    def __init__(self, path: str, results: int = 2, begin: str = "<search>", end: str = "</search>") -> None:
        self._index = _index_of(path)
        self._results, self._begin, self._end = results, begin, end

    def reset(self, problem: Problem, seed: int) -> None:
        """See ``Environment.reset``."""

    def step(self, turn: str) -> Observation:
        """See ``Environment.step``."""
        _, begin, rest = turn.rpartition(self._begin)
        query, end, _ = rest.partition(self._end)
        if not begin or not end:
            return Observation(None)
        return Observation("\n\n".join(self._index.find(query, self._results)) or "nothing found")


class _Index:
    def __init__(self, paragraphs: list[str]) -> None:
        self._paragraphs = paragraphs
        self._words = [frozenset(_words(paragraph)) for paragraph in paragraphs]
        counts = Counter(word for words in self._words for word in words)
        self._weights = {word: math.log(len(paragraphs) / count) + 1.0 for word, count in counts.items()}

    def find(self, query: str, results: int) -> list[str]:
        """The best paragraphs, best first; equally good ones in the order of the text."""
        wanted = set(_words(query))
        scores = [sum(self._weights[word] for word in wanted & words) for words in self._words]
        ranked = sorted((at for at, score in enumerate(scores) if score), key=lambda at: (-scores[at], at))
        return [self._paragraphs[at] for at in ranked[:results]]


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


@lru_cache(maxsize=8)
def _index_of(path: str) -> _Index:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"environment search, path: {path} cannot be read: {error}") from error
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if not paragraphs:
        raise ConfigError(f"environment search, path: {path} is empty; allowed: paragraphs, separated by empty lines")
    return _Index(paragraphs)
