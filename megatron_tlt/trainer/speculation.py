"""What a run's speculation learns, rollout after rollout: drafters without a model, and the choice of strategy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.platform.device import log_once, rank
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.rollout.adaptive import AdaptiveSpeculation
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.token_drafter import TokenDrafter

_STATE, _SUFFIX = "state.json", "suffix.bin"


class Speculating:
    """Of one rank; a part of its checkpoints.

    With several ranks to an engine all of them draft alike, but only the first one's choices count.

    Args:
        config: of the run.
        drafters: the engine's, without a model.

    Raises:
        ConfigError: strategies or options that do not fit.
    """

    name = "speculation"

    def __init__(self, config: TltConfig, drafters: Mapping[str, TokenDrafter]) -> None:
        speculation = config.speculation
        self._drafters = drafters
        self._model = speculation.drafter
        engine = rank() // config.rollout.tensor_parallel_size
        self.chooser = (
            AdaptiveSpeculation(speculation, config.rollout.max_response_tokens, config.run.seed + engine)
            if speculation.enabled and speculation.adaptive is not None
            else None
        )
        self._seen: set[str] = set()
        self._version: int | None = None

    def begin_step(self, problems: Iterable[str], version: int | None = None) -> None:
        """A step on these problems begins, with this version of the engine's drafter model if it has one.

        Where a problem comes again, an epoch has ended.
        n-grams are of the step's own responses: a run that is resumed, whose checkpoint has none, drafts the same.
        """
        keys = set(problems)
        ended = bool(keys & self._seen)
        for name, drafter in self._drafters.items():
            if ended or name == "ngram":
                drafter.end_epoch()
        self._seen = keys if ended else self._seen | keys
        if self.chooser is not None and self._version not in (None, version):
            self.chooser.drafter_changed(self._model)
        self._version = version

    def metrics(self) -> dict[str, float]:
        """Shares of the last rollout's engine steps by strategy, and what the drafters hold."""
        steps = {} if self.chooser is None else self.chooser.steps
        total = sum(steps.values())
        found = {f"speculation/share_{name}": count / total for name, count in steps.items()}
        for name, drafter in self._drafters.items():
            found[f"speculation/{name}_mib"] = drafter.memory_bytes / 2**20
        return found

    def save(self, folder: Path) -> None:
        """As ``CheckpointPart.save``."""
        state = {
            "seen": sorted(self._seen),
            "version": self._version,
            "chooser": None if self.chooser is None else self.chooser.state(),
        }
        atomic_write_text(folder / _STATE, json.dumps(state))
        suffix = self._drafters.get("suffix")
        if isinstance(suffix, SuffixDrafter):
            suffix.save(folder / _SUFFIX)

    def load(self, folders: Sequence[Path]) -> None:
        """As ``CheckpointPart.load``; a rank that was not there goes on from another one's state."""
        folder = folders[rank() % len(folders)]
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        self._seen, self._version = set(state["seen"]), state["version"]
        suffix = self._drafters.get("suffix")
        if isinstance(suffix, SuffixDrafter) and (folder / _SUFFIX).is_file():
            suffix.load(folder / _SUFFIX)
        if self.chooser is not None and state["chooser"] is not None:
            try:
                self.chooser.load_state(state["chooser"])
            except ValueError as error:
                log_once(f"warning: what was learnt about strategies is not used: {error}")
