"""Whose death ended a launch: of what torchrun saw, the ends that nobody asked for."""

from __future__ import annotations

from pathlib import Path
from signal import SIGABRT, SIGINT, SIGKILL, SIGSEGV, SIGTERM

import pytest

from megatron_tlt.platform.deaths import (
    ENDS_LATE,
    Death,
    Failure,
    first_death,
    kill_others_at_once,
    read_failures,
)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([Failure(2, -SIGKILL, 100)], Death(2, SIGKILL)),
        # the others miss it, and are ended by torchrun
        ([Failure(2, -SIGSEGV, 100), Failure(0, 1, 101), Failure(1, -SIGTERM, 100)], Death(2, SIGSEGV)),
        # seen in one look, in the order of ranks
        ([Failure(0, 1, 100), Failure(1, -SIGABRT, 100)], Death(1, SIGABRT)),
        # an error, and a rank that hangs until torchrun kills it
        ([Failure(0, 2, 100), Failure(1, -SIGKILL, 130)], None),
        ([Failure(0, 1, 100)], None),
        ([Failure(0, -SIGTERM, 100), Failure(1, -SIGINT, 100)], None),
    ],
)
def test_the_first_death_is_told_from_what_follows_it(failures: list[Failure], expected: Death | None) -> None:
    assert first_death(failures, 1) == expected


def test_torchrun_itself_may_die() -> None:
    death = first_death([], -SIGKILL)
    assert str(death) == "torchrun was killed by SIGKILL"
    assert first_death([], -SIGTERM) is None and first_death([], 1) is None


def test_what_cannot_be_read_is_nothing(tmp_path: Path) -> None:
    file = tmp_path / "failures.json"
    assert read_failures(file) == []
    for text in ("", "{", '[{"rank": 1}]', "3"):
        file.write_text(text)
        assert read_failures(file) == []


class RenamedContext:
    def __init__(self) -> None:
        self._process_failures: dict[int, object] = {}
        self.envs: dict[int, dict[str, str]] = {}

    def close(self, death_sig: object = None, timeout: int = 30) -> None: ...


class OtherContext:
    def __init__(self) -> None:
        self._failures: dict[int, object] = {}
        self.envs: dict[int, dict[str, str]] = {}

    def close(self, timeout: int = 30) -> None: ...


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (RenamedContext, "torch's RenamedContext has no _failures"),
        (
            OtherContext,
            "torch's OtherContext.close takes ['self', 'timeout'], needed: ['self', 'death_sig', 'timeout']",
        ),
    ],
)
def test_a_torch_with_another_interface_gives_a_warning(
    kind: type, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    close = vars(kind)["close"]
    monkeypatch.setattr("torch.distributed.elastic.multiprocessing.api.SubprocessContext", kind)
    kill_others_at_once()
    assert capsys.readouterr().err == f"warning: {ENDS_LATE}: {reason}\n"
    assert vars(kind)["close"] is close


def test_the_installed_torch_has_the_interface(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    monkeypatch.setattr(SubprocessContext, "close", SubprocessContext.close)  # put back after the test
    before = SubprocessContext.close
    kill_others_at_once()
    assert capsys.readouterr().err == "" and SubprocessContext.close is not before
