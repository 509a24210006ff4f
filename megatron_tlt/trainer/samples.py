"""Selects responses of a rollout for ``samples.jsonl`` and decodes them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.data.exchange import redistribute
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.observe.samples import SampleRow, choose_samples, shorten
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.responses import ScoredResponse


class SampleRows:
    """Chooses responses and converts them to rows of ``samples.jsonl``; only the chosen responses are decoded.

    Args:
        tokenizer: of the policy.
        per_task: maximum number of responses per task; 0 for none.
        max_characters: maximum length of a text; the middle of longer ones is cut out.
    """

    def __init__(self, tokenizer: Tokenizer, per_task: int, max_characters: int) -> None:
        self._tokenizer = tokenizer
        self._per_task = per_task
        self._max_characters = max_characters

    def rows(
        self, origin: str, problems: Sequence[Problem], scored: Sequence[ScoredResponse], batch: RolloutBatch
    ) -> list[SampleRow]:
        """The rows of one rollout, by task; ``origin`` as in ``observe.samples``.

        A collective: the tokens of a chosen response come from the ranks that hold them.

        The keys: ``origin``, ``task``, ``problem`` (uid), ``sample`` (index of the response to the problem),
        ``chosen`` (reasons), ``reward``, ``correct``, ``extracted`` (the judged answer, or null), ``answer`` (the
        problem's reference answer, or null), ``error`` (of the verifier, or null), ``prompt_length`` and ``length``
        (tokens), ``finish_reason``, ``acceptance_length``, ``prompt`` and ``response`` (with special tokens) and
        ``cut`` (key of a text -> number of characters cut out of it).
        """
        chosen = self._chosen(problems, scored)
        texts = redistribute(batch, chosen, columns=())
        return [
            self._row(origin, problems[scored[i].problem], scored[i], why, texts.tokens(i).tolist())
            for i, why in chosen.items()
        ]

    def _chosen(self, problems: Sequence[Problem], scored: Sequence[ScoredResponse]) -> dict[int, list[str]]:
        """The chosen responses, ordered by task, with the reasons for choosing each."""
        by_task: dict[str, list[int]] = {}
        for i, each in enumerate(scored if self._per_task else ()):
            by_task.setdefault(problems[each.problem].source, []).append(i)
        chosen: dict[int, list[str]] = {}
        for _, found in sorted(by_task.items()):
            rewards, lengths = [scored[i].reward.value for i in found], [scored[i].length for i in found]
            chosen |= {found[at]: why for at, why in choose_samples(rewards, lengths, self._per_task).items()}
        return chosen

    def _row(
        self, origin: str, problem: Problem, scored: ScoredResponse, chosen: list[str], tokens: list[int]
    ) -> SampleRow:
        reward = scored.reward
        row: SampleRow = {
            "origin": origin,
            "task": problem.source,
            "problem": problem.uid,
            "sample": scored.sample,
            "chosen": chosen,
            "reward": reward.value,
            "correct": reward.correct,
            "extracted": reward.extracted,
            "answer": problem.answer or None,
            "error": reward.error,
            "prompt_length": scored.prompt_length,
            "length": scored.length,
            "finish_reason": scored.finish_reason,
            "acceptance_length": round(scored.draft.acceptance_length, 3),
            "prompt": self._tokenizer.decode(tokens[: scored.prompt_length], special_tokens=True),
            "response": self._tokenizer.decode(tokens[scored.prompt_length :], special_tokens=True),
        }
        cut: dict[str, int] = {}
        for key, value in row.items():
            if isinstance(value, str):
                row[key], left_out = shorten(value, self._max_characters)
                if left_out:
                    cut[key] = left_out
        return {**row, "cut": cut}
