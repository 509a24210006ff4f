"""Groups over some ranks: made by these alone, broken by a death at once, given up when a member hangs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_tlt.platform import subset_group
from megatron_tlt.platform.device import Device
from megatron_tlt.platform.subset_group import Abandoned, SubsetGroup
from tests.helpers.launch import run_torchrun

WORKER = Path(__file__).parent / "workers" / "subsets.py"


@pytest.mark.distributed
def test_groups_form_reduce_hang_and_break_without_the_other_ranks(tmp_path: Path) -> None:
    run_torchrun(WORKER, 3, [str(tmp_path)], timeout_s=90, expect_status=None)
    found = {rank: json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 2)}
    assert found[0]["pair"] == found[2]["pair"] == {"sum": [2.0, 4.0], "plain": {"from": 2}}
    assert found[0]["again"] == found[2]["again"] == {"same": True, "sum": [4.0, 8.0]}, "the connection serves twice"
    assert found[0]["mended"] == found[2]["mended"] == {"same": False, "sum": [2.0, 2.0, 2.0]}
    # who went before the last had come took the group along, for the one that came after it too
    assert found[0]["gone"].startswith("Abandoned: group gone was abandoned: its session is over")
    assert found[2]["gone"].startswith("Abandoned: group gone was abandoned: a member has left")
    assert found[0]["alone"].startswith("Abandoned: group alone was abandoned: not all 2 members arrived within 0.3 s")
    # a member that is late in connecting, and in a collective
    assert found[0]["late"].startswith("Abandoned: group late was abandoned: a member does not connect")
    assert found[0]["hang"].startswith("Abandoned: a collective over ranks [0, 2] was abandoned: its session is over")
    assert found[0]["waited_s"] < 5
    # one that dies in it
    assert found[0]["death"].startswith("GroupFailed: a collective over ranks [0, 1] failed")


class Nccl:
    """A group of NCCL whose members do not come: a call waits until it is aborted or, while it connects, let go."""

    class Options:
        _timeout = None

    newest: Nccl | None = None

    def __init__(self, *_: Any) -> None:
        self.let_go, self.aborted, self.launched = threading.Event(), threading.Event(), False
        Nccl.newest = self

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.let_go.wait()

    def allreduce(self, tensor: torch.Tensor) -> Nccl:
        self.launched = True
        return self

    def wait(self) -> None:
        self.aborted.wait()
        raise RuntimeError("NCCL communicator was aborted")

    def abort(self) -> None:
        self.aborted.set()


class Gpu(Device):
    """Says that it is one, with tensors on the host."""

    is_cuda = True


@pytest.fixture
def on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    device, store = Gpu(torch.device("cpu"), "nccl"), dist.HashStore()
    monkeypatch.setattr(subset_group, "current_device", lambda: device)
    monkeypatch.setattr(subset_group, "_connections", {})
    monkeypatch.setattr(Nccl, "newest", None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def abandoned(should_abandon: Callable[[], bool]) -> Nccl:
    with pytest.raises(Abandoned, match="a member does not connect"):
        SubsetGroup.form("lonely", (0,), lambda: False, should_abandon, 60.0)
    assert Nccl.newest is not None
    return Nccl.newest


def connecting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "connect-group"]


@pytest.mark.usefixtures("on_nccl")
def test_a_kernel_that_waits_for_a_member_is_aborted_when_the_group_is_given_up() -> None:
    def launched() -> bool:
        if Nccl.newest is None:
            return False
        Nccl.newest.let_go.set()
        return Nccl.newest.launched

    group = abandoned(launched)
    assert group.aborted.is_set(), "the kernel would block the device for all other work"
    for thread in connecting():
        thread.join(10)
    assert not connecting()


@pytest.mark.usefixtures("on_nccl")
def test_a_group_that_connects_after_it_was_given_up_launches_nothing() -> None:
    group = abandoned(lambda: Nccl.newest is not None)
    assert not group.aborted.is_set() and len(connecting()) == 1, "a call that connects cannot be aborted"
    group.let_go.set()
    end = time.monotonic() + 10
    while connecting():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert group.aborted.is_set() and not group.launched
