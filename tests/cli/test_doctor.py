"""tlt doctor: each check finds what is wrong, says what to do, and the command's status says so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.cli import main
from megatron_tlt.cli.doctor import _nodes
from megatron_tlt.errors import ConfigError, RunError, TltError
from megatron_tlt.platform import doctor_nodes
from megatron_tlt.platform.doctor import Check, Needs, check_machine, guarded, misfits
from megatron_tlt.platform.doctor_devices import Gpu, check_gpus, parse_gpus
from megatron_tlt.platform.doctor_nodes import Meeting, check_folder, check_ports
from megatron_tlt.platform.nodes import Nodes, own_address
from tests.helpers.launch import REPOSITORY, free_port

CONFIG = "launch/quickstart-cpu.yaml"


def doctor(*arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    """``tlt doctor`` in a process of its own, after a line of shell."""
    return subprocess.run(
        ["bash", "-c", f'{shell}\nexec "$@"', "bash", sys.executable, "-m", "megatron_tlt", "doctor", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TLT_NODE_NAME": "here"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def failing(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "fail"]


def test_a_machine_that_is_well_passes_and_every_check_is_in_the_file(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = doctor(CONFIG, f"run.dir={tmp_path}", "--json", str(found))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(found.read_text())["checks"]}
    expected = {"config", "devices", "versions", "cores", "memory", "shared memory", "open files", "locked memory"}
    expected |= {"temporary files", "disk", "network", "host name", "run's folder"}
    assert expected <= rows.keys()
    assert not [row for row in rows.values() if row["status"] == "fail"]
    assert "torch 2." in rows["versions"]["found"] and "rename" in rows["run's folder"]["found"]
    assert "here" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"], "the doctor leaves nothing behind"


def test_what_fails_is_said_with_the_node_and_status_1(tmp_path: Path) -> None:
    done = doctor(CONFIG, f"run.dir={tmp_path}", "--node", shell="ulimit -n 512")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "FAIL" in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("here: FAIL: open files: at most 512; 1024 are needed -> raise it: ulimit -n")
    assert "passed" not in done.stdout


def test_a_config_of_several_nodes_without_any_is_named(tmp_path: Path) -> None:
    done = doctor(CONFIG, "launcher.nnodes=2", f"run.dir={tmp_path}", "--node")
    assert done.returncode == 1 and "FAIL: nodes: launcher.nnodes: found 2" in done.stderr, done.stderr


def test_a_wrong_config_is_a_row_among_all_others(tmp_path: Path) -> None:
    done = doctor(CONFIG, "trainer.steps=0", "--node", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 1 and "here: FAIL: config: " in done.stderr and "trainer.steps" in done.stderr
    names = {row["name"] for row in json.loads((tmp_path / "found.json").read_text())["checks"]}
    assert {"config", "devices", "clocks", "NVLink", "InfiniBand", "memory", "disk", "network"} <= names


def test_memory_and_disk_that_do_not_suffice_fail(tmp_path: Path) -> None:
    checks = by_name(list(check_machine(Needs(10**6, 1, tmp_path, checkpoint_bytes=10**18), gpus=0)))
    assert checks["memory"].status == "fail" and checks["disk"].status == "fail"
    assert checks["cores"].status == "warn"
    assert "keep_checkpoints" in checks["disk"].advice
    well = by_name(list(check_machine(Needs(1, 1, tmp_path, checkpoint_bytes=10**6), gpus=0)))
    assert well["disk"].status == "ok" and "0.00093 GiB" in well["disk"].found


def test_versions_that_do_not_fit_one_another_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["torch==1.0", "numpy", "absent-library>=3", 'numpy<1; extra == "old"']
    folder = tmp_path / "demanding-1.0.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: demanding", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
    (folder / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = misfits(("demanding",))
    assert len(found) == 1 and found[0].startswith("torch: found 2.") and found[0].endswith("demanding needs ==1.0")


GPUS = """\
0, GPU-0c8e0b5e, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4, 0
1, GPU-1c8e0b5e, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 60000, 0
2, GPU-2c8e0b5e, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4, 3
3, GPU-3c8e0b5e, NVIDIA L4, 580.65.06, 23034, 4, [N/A]
"""


def test_gpus_in_use_and_with_memory_errors_are_named() -> None:
    gpus = parse_gpus(GPUS)
    assert gpus[3] == Gpu(3, "GPU-3c8e0b5e", "NVIDIA L4", "580.65.06", 23034, 4, None)
    visible = [gpu.uuid.removeprefix("GPU-") for gpu in gpus]
    checks = [check for check in check_gpus(gpus, "13.0", visible) if check.status == "fail"]
    assert [check.found.split(":")[0] for check in checks] == ["GPU 1", "GPU 2"]
    assert "60000 of 81559 MiB" in checks[0].found and "3 uncorrected" in checks[1].found
    # other jobs' GPUs: CUDA_VISIBLE_DEVICES hides them
    (check,) = [check for check in check_gpus(gpus, "13.0", visible[2:]) if check.status == "fail"]
    assert check.found.startswith("GPU 2: 3 uncorrected"), "nvidia-smi's number"
    assert [check.status for check in check_gpus(gpus, "13.0", ["MIG-1c8e0b5e"])] == ["ok"], "the driver's row alone"


@pytest.mark.parametrize(("cuda", "status"), [("13.0", "fail"), ("12.8", "ok"), (None, "ok")])
def test_an_old_driver_is_named_with_the_one_that_is_needed(cuda: str | None, status: str) -> None:
    checks = [
        check
        for check in check_gpus([Gpu(0, "GPU-0", "A100", "570.10", 81559, 4, 0)], cuda, ["0"])
        if check.name == "driver"
    ]
    assert [check.status for check in checks] == [status]
    if status == "fail":
        assert checks[0].found == "570.10; CUDA 13.0 needs 580.65.06"


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (check,) = check_folder(tmp_path / "file" / "run")
    assert check.status == "fail" and str(tmp_path / "file" / "run") in check.found


def test_a_folder_that_it_made_is_removed_again(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert [check.status for check in check_folder(tmp_path / "runs" / "new" / "run")] == ["ok"]
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]
    assert [check.status for check in check_folder(tmp_path / "runs" / "run", leave=True)] == ["ok"]
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs", tmp_path / "runs" / "run"]


def test_a_full_disk_fails(tiny_disk: Path) -> None:
    (check,) = check_folder(tiny_disk)
    assert check.status == "fail" and "No space left" in check.found
    assert list(tiny_disk.iterdir()) == []


def test_a_check_that_breaks_is_a_row_of_its_own() -> None:
    def broken() -> Any:
        yield Check("first", "ok", "fine")
        raise OSError("no such device")

    checks = guarded("second", broken)
    assert [check.status for check in checks] == ["ok", "fail"] and "no such device" in checks[1].found


def nodes(count: int, index: int, port: int) -> Nodes:
    return Nodes(count, index, "127.0.0.1", port, "job", "127.0.0.1", "lo")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        (check,) = check_ports(nodes(2, 0, port))
    assert check.status == "fail" and str(port) in check.found
    assert list(check_ports(nodes(2, 1, port))) == []


def together(count: int, work: Callable[[Nodes], Any]) -> list[Any]:
    """``work`` on so many nodes at once, each on a thread; errors are raised."""
    port, done, failed = free_port(), {}, []

    def run(index: int) -> None:
        try:
            done[index] = work(nodes(count, index, port))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]
    return [done[index] for index in range(count)]


def test_clocks_are_compared_over_the_network() -> None:
    def skew(here: Nodes) -> tuple[float, float]:
        import time

        meeting = Meeting(here, {"name": f"n{here.index}"}, 30, clock=lambda: time.time() + 100 * here.index)
        found = meeting.skew()
        meeting.close()
        return found

    for index, (ahead, accuracy) in enumerate(together(3, skew)):
        assert abs(ahead - 100 * index) <= accuracy + 0.01 and accuracy < 5


def test_folders_that_are_not_shared_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_nodes, "_VISIBLE_S", 0.3)

    def share(shared: bool) -> list[list[int]]:
        def work(here: Nodes) -> list[int]:
            meeting = Meeting(here, {"name": f"n{here.index}"}, 30)
            missing, _ = meeting.share(tmp_path if shared else tmp_path / str(here.index))
            meeting.close()
            return missing

        return together(2, work)

    assert share(True) == [[], []]
    assert share(False) == [[1], [0]]


def test_other_versions_on_a_node_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(({"torch": "2.13.0"}, {"torch": "2.11.0"}))
    monkeypatch.setattr(doctor_nodes, "installed_versions", lambda: next(versions))
    found = together(2, lambda here: by_name(list(doctor_nodes.check_between(here, tmp_path))))
    assert found[0]["same versions"].status == "ok" and failing(list(found[1].values())) == ["same versions"]
    assert "torch 2." in found[1]["same versions"].found
    assert all(rows["nodes"].status == rows["shared folder"].status == rows["clock"].status == "ok" for rows in found)


def test_nodes_that_do_not_come_are_named() -> None:
    with pytest.raises(TltError, match=r"of 3 nodes, numbers 1, 2 .* did not reach 127\.0\.0\.1:\d+ within 0\.5 s"):
        Meeting(nodes(3, 0, free_port()), {"name": "n0"}, 0.5)


def test_under_torchrun_one_process_of_each_node_meets_beside_torchruns_own_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    told = {"RANK": "3", "LOCAL_RANK": "0", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    found = _nodes(2)
    assert (found.count, found.index, found.port, found.interface) == (2, 1, port + 1, "lo")
    with pytest.raises(ConfigError, match="allowed: the 2 nodes of this torchrun"):
        _nodes(4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["doctor", CONFIG, "--json", str(tmp_path / "none.json")]) == 0
    assert not (tmp_path / "none.json").exists(), "the node's first process looks, and no other"


def test_where_nodes_meet_comes_from_the_environment() -> None:
    given = {"TLT_RENDEZVOUS": "127.0.0.1:29400", "TLT_NODE_RANK": "1", "TLT_JOB": "7.0"}
    found = Nodes.from_environment(2, given)
    assert (found.index, found.port, found.address, found.interface) == (1, 29400, "127.0.0.1", "lo")
    assert "--rdzv-endpoint=127.0.0.1:29402" in found.torchrun_arguments("x", 2)
    assert found.environment["NCCL_SOCKET_IFNAME"] == "lo"
    for wrong, message in (
        ({}, r"launcher\.nnodes: found 2"),
        ({**given, "TLT_NODE_RANK": "2"}, "TLT_NODE_RANK: found '2'; allowed: 0 to 1"),
        ({**given, "TLT_RENDEZVOUS": "n0"}, "TLT_RENDEZVOUS: found 'n0'"),
        ({**given, "TLT_INTERFACE": "none0"}, "TLT_INTERFACE: found 'none0'; allowed: one with an IPv4 address: .*lo"),
    ):
        with pytest.raises(ConfigError, match=message):
            Nodes.from_environment(2, wrong)
    with pytest.raises(RunError, match=r"the first node, no-such-host\.invalid, cannot be reached"):
        own_address("no-such-host.invalid")
