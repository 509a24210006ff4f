"""State that speculation accumulates over rollouts: model-free drafters and the tuner of strategies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.exchange import redistribute
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import rank, warn, world_size
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.rollout.adaptive import build_controller
from megatron_tlt.rollout.engine_speculation import EngineSpeculation, RolloutAccount, account_metrics
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.suffix_file import OtherVersion
from megatron_tlt.speculation.token_drafter import FinishedResponse, TokenDrafter
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.carried import Key
from megatron_tlt.trainer.dealing import Dealing
from megatron_tlt.trainer.responses import ScoredResponse

_STATE, _SUFFIX = "state.json", "suffix.bin"


class SpeculationState:
    """The state of one rank; a part of its checkpoints.

    All ranks of an engine draft the same tokens, but the first rank alone chooses the strategy.

    Args:
        config: of the run.
        drafters: the engine's model-free drafters.
        dealing: assigns problems to engines; None: round-robin.

    Raises:
        ConfigError: invalid strategies or options.
    """

    name = "speculation"

    def __init__(self, config: TltConfig, drafters: Mapping[str, TokenDrafter], dealing: Dealing | None = None) -> None:
        speculation = config.speculation
        self._drafters = drafters
        self._model = speculation.drafter
        self._tp = config.rollout.tensor_parallel_size
        self._engine = rank() // self._tp
        self._dealing = dealing or Dealing(world_size() // self._tp)
        # In a global tree, responses to a problem that never recurs still provide drafts for other problems.
        self._all_problems = speculation.suffix.scope == "global"
        self.chooser = (
            build_controller(
                speculation,
                config.rollout.max_response_tokens,
                config.run.seed + self._engine,
                config.rollout.max_num_seqs,
            )
            if speculation.enabled and speculation.adaptive is not None
            else None
        )
        needs_training = config.drafter is not None and config.drafter.path is None
        self.engine = (
            EngineSpeculation(speculation, self.chooser, needs_training=needs_training) if speculation.enabled else None
        )
        self._version: int | None = None

    def begin_step(self, version: int | None = None) -> None:
        """Starts a step; ``version`` is that of the engine's drafter model, if any.

        n-grams come from the step's own responses only, so a resumed run drafts the same although checkpoints contain
        none.
        """
        for drafter in self._drafters.values():
            drafter.begin_step()
        if self.engine is not None:
            self.engine.begin_step()
        if self.chooser is not None and self._version not in (None, version):
            self.chooser.tuner.drafter_changed(self._model)
        self._version = version

    def end_rollout(self, problems: Sequence[Problem], scored: Sequence[ScoredResponse], batch: RolloutBatch) -> None:
        """Adds all responses of all engines, as any engine may decode a problem the next time; a collective.

        Suffix trees store every response to a problem that may recur, and need the tokens of all ranks. Length classes
        use every response that ended in this rollout.
        """
        kept = [i for i, s in enumerate(scored) if problems[s.problem].recurs or self._all_problems]
        responses: list[FinishedResponse] = []
        if "suffix" in self._drafters:
            batch = redistribute(batch, kept, columns=())
            responses = [_finished(problems[scored[i].problem], batch, i) for i in kept]
        for drafter in self._drafters.values():
            drafter.end_rollout(responses)
        if self.engine is not None:
            self.engine.keep_rollout()
        # of a response that ended in an earlier rollout, end_round had the length then
        ended = [s for s in scored if s.finish_reason != "abort" and s.continued < s.length]
        self._learn_elsewhere(problems, ((s.problem, s.length) for s in ended))

    def end_round(self, problems: Sequence[Problem], ended: Mapping[Key, int], cut: Mapping[Key, int]) -> None:
        """As ``RoundLengths.end_round``: learns the lengths of responses that the step does not train on."""
        self._learn_elsewhere(problems, ((at, length) for (at, _), length in ended.items()))
        lengths = None if self.chooser is None else self.chooser.lengths
        if lengths is not None:
            for (at, _), tokens in cut.items():
                lengths.record_aborted(problems[at].uid, tokens)

    def _learn_elsewhere(self, problems: Sequence[Problem], ended: Iterable[tuple[int, int]]) -> None:
        """Positions and lengths of all engines' responses; this engine learnt of its own when they ended."""
        lengths = None if self.chooser is None else self.chooser.lengths
        if lengths is not None:
            for at, length in ended:
                if self._dealing.engine_of(at) != self._engine:
                    lengths.record(problems[at].uid, length)

    def metrics(self) -> dict[str, float]:
        """Metrics of all engines in the last rollout, and the memory of this rank's drafters; a collective."""
        mine = self.engine.account if self.engine is not None and rank() % self._tp == 0 else None
        accounts = all_gather_data(mine, RolloutAccount | None)
        found = account_metrics([account for account in accounts if account is not None])
        for name, drafter in self._drafters.items():
            found[f"speculation/{name}_mib"] = drafter.memory_bytes / 2**20
        return found

    def save(self, folder: Path) -> None:
        """As ``CheckpointPart.save``; the suffix history is the same on all ranks, so only rank 0 writes it."""
        state = {
            "tensor_parallel_size": self._tp,
            "version": self._version,
            "chooser": None if self.chooser is None else self.chooser.state(),
            "engine": None if self.engine is None else self.engine.state(),
        }
        atomic_write_text(folder / _STATE, json.dumps(state))
        suffix = self._drafters.get("suffix")
        if isinstance(suffix, SuffixDrafter) and rank() == 0:
            suffix.save(folder / _SUFFIX)

    def load(self, folders: Sequence[Path]) -> None:
        """As ``CheckpointPart.load``; an engine without a state in the checkpoint loads that of another engine."""
        state = self._state(folders[0])
        tp = state.get("tensor_parallel_size", self._tp)  # older releases did not write it
        engines = max(1, len(folders) // tp)
        state = self._state(folders[self._engine % engines * tp])
        self._version = state["version"]
        suffix = self._drafters.get("suffix")
        if isinstance(suffix, SuffixDrafter) and (folders[0] / _SUFFIX).is_file():
            try:
                suffix.load(folders[0] / _SUFFIX)
            except OtherVersion as error:
                warn(f"suffix drafting starts without the responses of earlier steps: {error}")
        if self.engine is not None and state.get("engine") is not None:  # earlier releases did not save it
            self.engine.load_state(state["engine"])
        if self.chooser is not None and state["chooser"] is not None:
            try:
                self.chooser.load_state(state["chooser"])
            except ValueError as error:
                warn(f"the tuner starts without the statistics of earlier steps: {error}")

    @staticmethod
    def _state(folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        return found


def _finished(problem: Problem, batch: RolloutBatch, sample: int) -> FinishedResponse:
    tokens, prompt = batch.tokens(sample).numpy(), batch.prompt_lengths[sample]
    return FinishedResponse(problem.uid, tokens[:prompt], tokens[prompt:])
