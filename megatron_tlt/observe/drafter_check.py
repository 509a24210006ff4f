"""Detects from a run's metrics that its drafter is unused: not trained, not chosen, or no longer accepted."""

from __future__ import annotations

from megatron_tlt.config.drafter_kinds import MODEL_FREE
from megatron_tlt.observe.lasting_causes import STEPS, Row, StepsCheck, value_of
from megatron_tlt.observe.metrics import LENGTH_CLASSES

LEAST_ACCEPTANCE = 1.05
"""Tokens per draft and verification, including the target's own, below which drafts cost more than they gain."""

_ACCEPTANCE = "speculation/acceptance_length_"
_SHARE = "speculation/share_"
_REASON = "spot/untrained_"
_WHY_UNTRAINED = {
    "no_data": "no rank's buffer holds a response; raise drafter.buffer.disk_bytes or drafter.buffer.max_age",
    "few_entries": "waiting engines hold too few responses; lower spot.min_entries, or set spot.min_steps",
    "short_wait": "the engines' wait for the last one is too short; lower spot.min_replicas, or set spot.min_steps",
    "no_step": "the wait is shorter than a training step; lower drafter.entries_per_step, or set spot.min_steps",
    "no_order": "no rank joined a session; the log gives the reason; set spot.min_steps to train after the update",
}


class DrafterCheck(StepsCheck):
    """Follows a run's steps; warns once about a cause that holds for ``steps`` steps in a row.

    - ``untrained``: the drafter's version (optimizer steps) does not change;
    - ``gate_closed``: the running batch was never small enough for speculation;
    - ``never_chosen``: the tuner never chose a strategy of the drafter model;
    - ``unaccepted_*``: a drafter's acceptance length is below ``LEAST_ACCEPTANCE``; steps without its drafts do not
      count.
    """

    def __init__(self, steps: int = STEPS) -> None:
        super().__init__(steps)
        self._version: float | None = None
        self._highest: dict[str, float] = {}

    def add(self, row: Row) -> list[str]:
        messages, unknown = self._unaccepted(row)
        messages |= self._untrained(row) | self._unused(row)
        return [f"{messages[name]} (for {self.steps} steps)" for name in self.count([*messages], unknown)]

    def _untrained(self, row: Row) -> dict[str, str]:
        version = value_of(row, "drafter/version")
        before, self._version = self._version, version
        if version is None or version > (before or 0.0):
            return {}
        state = f"still has version {version:.0f}" if version else "has never been trained"
        return {"untrained": f"the drafter {state}: {_why_untrained(row)}"}

    @staticmethod
    def _unused(row: Row) -> dict[str, str]:
        shares = {name: value for name, value in row.items() if name.startswith(_SHARE)}
        if not shares or "speculation/gate_open" not in row:
            return {}
        if not row["speculation/gate_open"]:
            return {
                "gate_closed": "speculation is off: no engine had a running batch of at most "
                "speculation.adaptive.threshold for speculation.adaptive.patience steps. Raise the threshold"
            }
        # an untrained drafter is withheld, which is a separate cause
        if row.get("speculation/drafter_version") is None or row.get("speculation/drafter_withheld"):
            return {}
        if any(value for name, value in shares.items() if _has_model(name.removeprefix(_SHARE))):
            return {}
        return {
            "never_chosen": f"the tuner never chose the drafter model. Raise {_steps_key(row)} or drafter.lr, start "
            "with a trained one (drafter.path), or remove its strategies from speculation.adaptive.strategies"
        }

    def _unaccepted(self, row: Row) -> tuple[dict[str, str], set[str]]:
        """Messages for drafters that are not accepted, and the causes for which this step has no data."""
        messages, unknown = {}, set()
        found = {name.removeprefix(_ACCEPTANCE) for name in row if name.startswith(_ACCEPTANCE)}
        for drafter in sorted((found | self._highest.keys()).difference(LENGTH_CLASSES)):
            name, length = f"unaccepted_{drafter}", value_of(row, _ACCEPTANCE + drafter)
            if length is None:
                unknown.add(name)
                continue
            highest = self._highest[drafter] = max(length, self._highest.get(drafter, length))
            if length >= LEAST_ACCEPTANCE:
                continue
            fell = f", after {highest:.2f}" if highest >= LEAST_ACCEPTANCE else ""
            messages[name] = (
                f"drafts of {drafter} are not accepted: acceptance length {length:.2f}{fell}. {_remedy(drafter, row)}"
            )
        return messages, unknown


def _has_model(strategy: str) -> bool:
    """Whether a strategy or source of this name drafts with a drafter model, alone or in a pair."""
    return not {"off", *MODEL_FREE}.issuperset(strategy.partition("-")[0].split("+"))


def _why_untrained(row: Row) -> str:
    if row.get("drafter/failed"):
        return "its training fails; the log has the error; lower drafter.lr or set drafter.clip_grad"
    for reason, text in _WHY_UNTRAINED.items():
        if row.get(_REASON + reason):
            return text
    if row.get("drafter/entries") == 0:
        return _WHY_UNTRAINED["no_data"]
    return f"its sessions end without a step; the log gives the reason; see {_steps_key(row)} and drafter.buffer"


def _steps_key(row: Row) -> str:
    """The key for more training; with a spot section, ``drafter.session_steps`` has no effect."""
    return "spot.min_steps" if "spot/sessions" in row else "drafter.session_steps"


def _remedy(drafter: str, row: Row) -> str:
    if not _has_model(drafter):
        return "Use another speculation.drafter, or speculation.adaptive, which turns it off when it does not pay"
    if row.get("drafter/version") is None:
        return "Train it in the run (a drafter section), or use another speculation.drafter"
    return f"Raise {_steps_key(row)} or drafter.lr, or start with a trained one (drafter.path)"
