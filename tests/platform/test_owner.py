"""Whether the process that a file belongs to is alive."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from megatron_tlt.platform.owner import Owner

_PRINT = "from megatron_tlt.platform.owner import Owner; print(Owner.current().text, flush=True)"


def test_text_is_read_back_and_safe_in_file_names() -> None:
    owner = Owner.current()
    assert Owner.parse(owner.text) == Owner.parse(f"{owner.text}\n") == owner
    assert owner.pid == os.getpid() and len(owner.text) < 100
    assert set(owner.text.lower()) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")


@pytest.mark.parametrize("text", ["", "host", "host_1", "host_x_1", "host_0_1", "a/b_1_2", "host_1_2_3", "host_-1_5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the owner"):
        Owner.parse(text)


def test_this_process_is_alive_and_so_is_its_parent() -> None:
    owner = Owner.current()
    assert owner.is_alive() is True
    code = f"{_PRINT}; print(Owner.parse({owner.text!r}).is_alive())"
    text, parent_is_alive = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert parent_is_alive == "True"
    child = Owner.parse(text)
    assert child.host == owner.host and child.is_alive() is False


def test_a_reused_process_id_is_another_process() -> None:
    owner = Owner.current()
    assert replace(owner, started=owner.started - 1).is_alive() is False


def test_another_host_cannot_be_told() -> None:
    assert replace(Owner.current(), host="elsewhere-0123456789ab").is_alive() is None


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", f"{_PRINT}; input()"], stdin=-1, stdout=-1, text=True)
    assert child.stdin is not None and child.stdout is not None
    owner = Owner.parse(child.stdout.readline())
    assert owner.is_alive() is True
    child.kill()
    deadline = time.monotonic() + 10
    while owner.is_alive() and time.monotonic() < deadline:  # killed, but not waited for
        time.sleep(0.01)
    assert owner.is_alive() is False
    os.kill(child.pid, 0)  # still in the table of processes
    child.communicate()
