"""Versions of an engine's weights; keeps it from generating with partly written weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from megatron_tlt.errors import RunError

POLICY: Final = "policy"
DRAFTER: Final = "drafter"


class WeightVersions:
    """The version of each part's weights: None before the first update and during an update.

    A part is ``policy`` or, in an engine with a drafter model, ``drafter``.
    """

    def __init__(self, versions: Mapping[str, int | None]) -> None:
        self._versions = dict(versions)
        self._last = {part: -1 if version is None else version for part, version in versions.items()}
        self._open: set[str] = set()

    def as_dict(self) -> dict[str, int | None]:
        """The version of each part."""
        return dict(self._versions)

    def begin(self, part: str) -> None:
        """Start an update of the part's weights. It may be repeated after a failed update.

        Raises:
            RunError: the engine has no such part.
        """
        self._check(part)
        self._versions[part] = None
        self._open.add(part)

    def check_begun(self, part: str, version: int) -> None:
        """Raise RunError unless an update of the part was started and ``version`` is valid."""
        self._check(part)
        if part not in self._open:
            raise RunError(f"no update of the {part}'s weights was started; call begin_update first")
        if version < 0:
            raise RunError(f"the {part}'s new version is {version}; allowed: 0 or above")

    def finish(self, part: str, version: int) -> None:
        """Set the version after all of the part's weights are written."""
        self.check_begun(part, version)
        self._versions[part] = self._last[part] = version
        self._open.discard(part)

    def drop(self) -> None:
        """Mark the weights of all parts as dropped."""
        self._versions = dict.fromkeys(self._versions, None)

    @contextmanager
    def loading(self, part: str) -> Iterator[None]:
        """Load all of a part's weights: as an update of its own to the next version, or within a started update.

        If it fails the part has no version, and the next load still produces the next version.
        """
        self._check(part)
        inside = part in self._open
        self._versions[part] = None
        yield
        if not inside:
            self._last[part] += 1
            self._versions[part] = self._last[part]

    def require(self, part: str) -> None:
        """Raise RunError if the part is being updated or never had weights."""
        if self._versions[part] is None:
            state = (
                "are half-written: an update was started but not finished"
                if part in self._open
                else "are not completely loaded"
            )
            raise RunError(
                f"the {part}'s weights {state} (last version: {self._name(part)}); the engine will not generate"
            )

    def _name(self, part: str) -> str:
        return str(self._last[part]) if self._last[part] >= 0 else "none"

    def _check(self, part: str) -> None:
        if part not in self._versions:
            raise RunError(f"no part {part!r} in this engine; allowed: {', '.join(self._versions)}")
