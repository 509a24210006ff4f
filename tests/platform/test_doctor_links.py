"""Link counters in the formats of nvidia-smi and the kernel, and messages between the pairs of real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_tlt.platform import doctor_links
from megatron_tlt.platform.doctor_links import (
    DevicePair,
    check_infiniband,
    check_links,
    check_pairs,
    judge_pairs,
    parse_link_errors,
    parse_throttling,
)

NVLINK = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-2c8e0b5e-0000-0000-0000-000000000000)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 0
\t Link 0: CRC Errors: 0
\t Link 1: Replay Errors: 12
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2c8e0b5e-0000-0000-0000-000000000001)
\t Link 0: Replay Errors: 0
\t Link 3: CRC Errors: 1
"""


def test_counters_above_zero_are_named() -> None:
    assert parse_link_errors(NVLINK) == {"GPU 0 link 1: Replay Errors": 12, "GPU 1 link 3: CRC Errors": 1}
    assert parse_link_errors("") == {}


def test_reasons_that_lower_the_clocks_are_named_and_idleness_is_none() -> None:
    assert parse_throttling("0x0000000000000001\n0x0000000000000048\n[N/A]\n0x20\n") == {
        1: ["hardware slowdown", "temperature (hardware)"],
        3: ["temperature"],
    }


def write_port(folder: Path, name: str, state: str, **counters: int) -> None:
    port = folder / name / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    for counter, value in counters.items():
        (port / "counters" / counter).write_text(f"{value}\n")


def test_ports_that_are_down_or_have_errors_are_named(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", "4: ACTIVE", symbol_error=0, link_downed=0)
    write_port(tmp_path, "mlx5_1", "4: ACTIVE", symbol_error=0, link_downed=3)
    write_port(tmp_path, "mlx5_2", "1: DOWN")
    checks = [(check.status, check.found) for check in check_infiniband(tmp_path)]
    assert checks == [
        ("warn", "mlx5_1 port 1: link_downed 3"),
        ("warn", "mlx5_2 port 1 is DOWN"),
        ("ok", "mlx5_0 port 1: active, no errors"),
    ]
    assert [check.found for check in check_infiniband(tmp_path / "none")] == ["no port"]


def test_without_gpus_every_row_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor_links, "INFINIBAND", tmp_path)
    checks = list(check_links())
    assert [(check.name, check.status) for check in checks] == [
        ("clocks", "ok"),
        ("NVLink", "ok"),
        ("InfiniBand", "ok"),
    ]
    assert "no GPU" in checks[0].found and "no GPU" in checks[1].found


def test_pairs_with_wrong_bytes_or_slow_links_are_named() -> None:
    pairs = [
        DevicePair((0, 1), 100.0, True),
        DevicePair((0, 2), 90.0, True),
        DevicePair((1, 2), 20.0, True),
        DevicePair((1, 3), 95.0, False),
    ]
    found = [(check.status, check.found.split(":")[0]) for check in judge_pairs(pairs)]
    assert found == [("warn", "1 and 2"), ("fail", "1 and 3")]


def test_a_rank_leaves_the_process_group_before_it_ends(tmp_path: Path) -> None:
    """Otherwise gloo's threads may abort it while Python ends."""
    code = (
        "import sys; from megatron_tlt.platform import pairs; pairs.main(sys.argv[1], 60); "
        "import torch.distributed as dist; sys.exit(3 if dist.is_initialized() else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert done.returncode == 0 and (tmp_path / "pairs.json").read_text() == "[]"


@pytest.mark.distributed
def test_all_pairs_of_processes_exchange_messages() -> None:
    (check,) = check_pairs(3, timeout_s=120)
    assert check.status == "ok" and check.found.startswith("3 of 3 exchange messages, ")
    assert [check.status for check in check_pairs(1)] == ["ok"]


@pytest.mark.distributed
def test_pairs_that_do_not_answer_fail_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_links, "_PAIRS_MODULE", "tests.platform.workers.silent_pairs")
    (check,) = check_pairs(2, timeout_s=0.5)  # no machine imports torch in it, so the start does not count
    assert check.status == "fail" and check.found == "no answer within 0.5 s before the first message"


@pytest.mark.distributed
def test_pairs_that_start_slowly_are_no_broken_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_links, "_START_S", 0.0)
    began = time.monotonic()
    (check,) = check_pairs(2, timeout_s=0.5)
    assert check.status == "warn" and "did not start within 0.5 s" in check.found
    assert time.monotonic() - began < 30, "the ranks outlived torchrun"


@pytest.mark.distributed
def test_pairs_whose_processes_fail_are_no_missing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_links, "_PAIRS_MODULE", "megatron_tlt.no_module")
    (check,) = check_pairs(2, timeout_s=120)
    assert check.status == "fail" and check.found == "the processes failed before the first message"
