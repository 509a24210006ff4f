"""A cluster's file, and ``tlt plan --cluster``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_tlt.cli import main
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import device
from megatron_tlt.planning.hetero.cluster import read_cluster
from megatron_tlt.planning.machine import constants, from_data_sheet, profile_text
from tests.helpers.launch import REPOSITORY

EXAMPLE = REPOSITORY / "launch" / "clusters" / "a100-l40s-l4.yaml"
LARGE = REPOSITORY / "launch" / "qwen2.5-32b-8n8g.yaml"


def test_the_example_is_read_with_later_links_over_earlier_ones() -> None:
    cluster = read_cluster(EXAMPLE)
    assert cluster.summary() == "16 A100-80GB, 24 L40S-48GB, 24 L4-24GB" and len(cluster.classes) == 8
    names = {name: node for node, name in enumerate(cluster.nodes)}
    rate = cluster.bandwidth[names["a100-0"]]
    assert rate[names["a100-1"]] == pytest.approx(10e9) and rate[names["l40s-2"]] == pytest.approx(1.248e9)
    assert rate[names["l4-1"]] == cluster.bandwidth[names["l4-1"]][names["a100-0"]] == pytest.approx(0.12e9)
    assert cluster.latency[names["l4-0"]][names["l40s-0"]] == 2e-3
    assert cluster.devices[0].memory_bytes == 72e9 and cluster.label(15) == "a100-1:7"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [{name: a, gpus: 8}]", r"nodes.0.gpus: unknown key; allowed: count, devices, name"),
        (
            "nodes: [{name: a, devices: [{device: B9, count: 1}]}]",
            "nodes.0.devices.0.device: found 'B9'; allowed: A100",
        ),
        ("nodes: [{name: a, devices: [{device: L4-24GB, count: 0}]}]", "count: found 0; allowed: above 0"),
        ("nodes: [{name: a, count: 2, devices: [{device: L4-24GB, count: 1}]}]", "links: none between a-0 and a-1"),
        (
            "nodes: [{name: a, devices: [{device: L4-24GB, count: 1}]}]\n"
            "links: [{between: [a, b], latency_us: 1, bandwidth: 1}]",
            "links.0.between: 'b' matches no node; nodes: a",
        ),
        (
            "devices: [{name: x, memory: 1, tflops: 1, memory_bandwidth: 1, node_bandwith: 1}]\n"
            "nodes: [{name: a, devices: [{device: x, count: 1}]}]",
            "devices.0.node_bandwith: unknown key; did you mean node_bandwidth",
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        read_cluster(file)
    assert str(caught.value).startswith(str(file))


def profiled(folder: Path, device: str, cores: int | None = None) -> None:
    """A profile of the device on which nothing reaches what is assumed."""
    machine = replace(from_data_sheet(device), matmul=((64, 1e12), (8192, 2e13)), memory_bandwidth=2e11, node_link=1e10)
    (folder / "measured.json").write_text(profile_text(replace(machine, cores=cores)))


def test_what_is_reached_is_assumed_as_in_other_plans_or_measured(tmp_path: Path) -> None:
    sheet, time = device("L4-24GB"), constants()["time"]
    assumed = read_cluster(equal_nodes(tmp_path, "L4-24GB", 2))
    assert assumed.devices[0].flops == time["matmul"] * sheet.flops
    assert assumed.devices[0].memory_bandwidth == time["memory_bandwidth"] * sheet.memory_bandwidth
    assert assumed.devices[0].node_bandwidth == time["node_link"] * sheet.node_bandwidth
    assert assumed.bandwidth[0][1] == pytest.approx(time["network_efficiency"] * 50e9)
    assert assumed.host_bandwidth == time["host_link"]
    profiled(tmp_path, "L4-24GB")
    file = equal_nodes(tmp_path, "L4-24GB", 2)
    file.write_text(file.read_text() + "profiles: {L4-24GB: measured.json}\nefficiency: {compute: 0.1}\n")
    found = read_cluster(file)
    one = found.devices[0]
    assert (one.name, one.flops, one.memory_bandwidth, one.node_bandwidth) == ("L4-24GB", 2e13, 2e11, 1e10)
    assert one.memory_bytes == assumed.devices[0].memory_bytes and found.bandwidth == assumed.bandwidth


@pytest.mark.parametrize(
    ("profiles", "cores", "message"),
    [
        ("{L4: measured.json}", None, r"profiles: found 'L4'; allowed: A100-40GB, .*L4-24GB"),
        ("{L4-24GB: none.json}", None, r"profiles.L4-24GB: .*none.json: cannot be read as a profile"),
        ("{L4-24GB: measured.json}", 2, r"profiles.L4-24GB: measured.json is the profile of a processor; allowed:"),
    ],
)
def test_a_profile_that_is_none_of_a_device_is_named(
    tmp_path: Path, profiles: str, cores: int | None, message: str
) -> None:
    profiled(tmp_path, "L4-24GB", cores)
    file = equal_nodes(tmp_path, "L4-24GB", 1)
    file.write_text(f"{file.read_text()}profiles: {profiles}\n")
    with pytest.raises(ConfigError, match=message):
        read_cluster(file)


def equal_nodes(folder: Path, device: str, nodes: int) -> Path:
    file = folder / "equal.yaml"
    file.write_text(
        f"nodes: [{{name: n, count: {nodes}, devices: [{{device: {device}, count: 8}}]}}]\n"
        "links: [{between: ['*', '*'], latency_us: 8, bandwidth: 50}]\n"
    )
    return file


def test_what_runs_today_is_written_as_a_launch_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: str(tmp_path / name) for name in ("plan.json", "launch.yaml")}
    cluster = str(equal_nodes(tmp_path, "H100-80GB", 2))
    command = ["plan", str(LARGE), "--cluster", cluster, "--evaluations", "60", "--mean-response", "4000"]
    assert main([*command, "--json", files["plan.json"], "--write", files["launch.yaml"]]) == 0
    printed = capsys.readouterr().out
    assert "best plan found" in printed and "what runs today" in printed
    figures = json.loads(Path(files["plan.json"]).read_text())
    assert figures["best"]["step_seconds"] <= figures["runs_today"]["step_seconds"]
    assert [task["name"] for task in figures["best"]["tasks"]] == ["rollout", "actor", "drafter"]
    config = load_config(files["launch.yaml"], check_libraries=False)
    assert (config.launcher.nnodes, config.launcher.nproc_per_node) == (2, 8)
    layouts = {task["name"]: task["layout"] for task in figures["runs_today"]["tasks"]}
    engine = config.rollout.tensor_parallel_size
    assert (f"TP{engine}" in layouts["rollout"].split("x")) == (engine > 1)
    assert config.trainer.prompts_per_step == 128


def test_a_mean_response_is_checked_and_assumed_as_in_other_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(LARGE), "--cluster", str(equal_nodes(tmp_path, "H100-80GB", 2)), "--evaluations", "40"]
    assert main([*command, "--mean-response", "0"]) == 2
    assert "--mean-response: found 0; allowed: above 0, at most 32768" in capsys.readouterr().err
    assert main(command) == 0
    assert "responses of 8192 tokens on average" in capsys.readouterr().out


def test_memory_that_is_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = str(equal_nodes(tmp_path, "L4-24GB", 1))
    assert main(["plan", str(LARGE), "--cluster", cluster, "--evaluations", "40"]) == 2
    message = capsys.readouterr().err
    assert "GB on L4-24GB, which has 21.6 GB usable" in message and "actor" in message
