"""Ctrl-C in a command that goes on until it is interrupted."""

from __future__ import annotations

import os
import pkgutil
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest

from megatron_tlt.cli import main
from megatron_tlt.cli.interrupts import interrupts
from tests.observe.synthetic import make_run


class Thing:
    """Something that can be referred to weakly."""


def _interrupt(_: object = None) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)  # Python handles the signal here


def test_wait_ends_with_an_interrupt_or_after_its_seconds() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as wait:
        assert not wait(0.01)
        threading.Timer(0.1, _interrupt).start()
        assert wait(20) and wait(0)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", [["watch", "--every", "0.1"], ["report", "--watch", "1"]])
def test_an_interrupt_inside_a_callback_of_the_collector_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    run = make_run(tmp_path / "run")
    module, name = ("watch", "RunPage.render") if command[0] == "watch" else ("report", "write_report")
    target = f"megatron_tlt.observe.{module}.{name}"
    original = pkgutil.resolve_name(f"megatron_tlt.observe.{module}:{name}")

    def interrupted(*arguments: object) -> object:
        thing = Thing()
        reference = weakref.ref(thing, _interrupt)
        del thing
        assert reference() is None
        return original(*arguments)

    monkeypatch.setattr(target, interrupted)
    assert main([command[0], str(run), *command[1:]]) == 0
