"""``tlt plan``: its figures are the models', and it needs neither weights nor the heavy libraries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.cli import main
from megatron_tlt.cli.plan import reshard_plan
from megatron_tlt.config.loader import load_config
from megatron_tlt.planning.machine import read_profile
from megatron_tlt.reshard.plan import ReshardPlan
from megatron_tlt.reshard.projection import Bandwidths, project
from tests.config.test_loader import write
from tests.helpers.launch import REPOSITORY

LARGE = REPOSITORY / "launch" / "qwen2.5-32b-8n8g.yaml"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A mixture of experts over two nodes of four, of which only the description is there."""
    folder = write_tiny_model("qwen3-moe", tmp_path / "made", num_hidden_layers=4)
    (folder / "config.json").rename(tmp_path / "moe.json")
    return write(
        tmp_path,
        launcher={"nnodes": 2, "nproc_per_node": 4},
        model={"architecture": str(tmp_path / "moe.json")},
        actor={
            "megatron": {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
            }
        },
        rollout={
            "tensor_parallel_size": 2,
            "max_prompt_tokens": 64,
            "max_response_tokens": 64,
            "vllm": {"dtype": "float32", "enable_expert_parallel": True},
        },
    )


def test_the_figures_are_the_plans(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "figures.json"), "--plan", str(tmp_path / "plan.json")]
    rates = ["--nvlink", "100", "--network", "10", "--memory", "1000", "--wake", "20", "--efficiency", "0.5"]
    assert main(["plan", str(config), "--reshard", *files, *rates]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    plan = ReshardPlan.read(tmp_path / "plan.json")
    assert plan == reshard_plan(load_config(config))
    assert (plan.actor, plan.engines) == (found["actor"], found["engines"]) == ("TP2xPP2xVP2xDP2+SP", "TP2+EP x 4")
    assert plan.nodes == (0,) * 4 + (1,) * 4
    assert found["moved_bytes"] == plan.moved_bytes > 0 and found["lower_bound_bytes"] == plan.lower_bound
    columns = {
        "in_place": plan.local_bytes,
        "nvlink_sent": plan.sent_bytes(False),
        "nvlink_received": plan.received_bytes(False),
        "network_sent": plan.sent_bytes(True),
        "network_received": plan.received_bytes(True),
    }
    for name, column in columns.items():
        assert [row[name] for row in found["ranks"]] == list(column)
        assert found["per_gpu"][name] == {"min": min(column), "mean": sum(column) / 8, "max": max(column)}
    assert sum(map(sum, found["node_links"])) == plan.moved_bytes
    assert found["node_links"][0][1] == sum(plan.sent_bytes(True)[:4]) > 0
    seconds = {key: value for key, value in found["projection"].items() if key.endswith("_seconds")}
    expected = project(plan, Bandwidths(100, 10, 1000, 20, 0.5, 0.5, 0.5))
    assert seconds == {f"{name}_seconds": value for name, value in vars(expected).items()} | {
        "total_seconds": expected.total
    }
    printed = capsys.readouterr().out
    for word in ("projection", "transfer", "load", "wake", "NVLink sent", "TP2+EP x 4", "GB from node"):
        assert word in printed


def test_a_projection_by_hand(config: Path) -> None:
    plan = reshard_plan(load_config(config))
    found = project(plan, Bandwidths(1.0, 1.0, 1.0, 1.0, 0.5, 0.25, 1.0))
    near = [max(a, b) for a, b in zip(plan.sent_bytes(False), plan.received_bytes(False), strict=True)]
    far = [max(a, b) for a, b in zip(plan.sent_bytes(True), plan.received_bytes(True), strict=True)]
    assert found.transfer == pytest.approx(max(a / 0.5e9 + b / 0.25e9 for a, b in zip(near, far, strict=True)))
    received = [sum(n) for n in zip(plan.received_bytes(False), plan.received_bytes(True), strict=True)]
    sent = [sum(n) for n in zip(plan.sent_bytes(False), plan.sent_bytes(True), strict=True)]
    held = [a + b for a, b in zip(plan.local_bytes, received, strict=True)]
    assert found.wake == pytest.approx(max(held) / 1e9)
    assert found.load == pytest.approx(max(2 * (a + b) for a, b in zip(held, sent, strict=True)) / 1e9)
    assert found.total == pytest.approx(found.transfer + found.load + found.wake)


def test_the_32b_plan_imports_no_heavy_library() -> None:
    code = (
        "import sys; from megatron_tlt.cli import main\n"
        f"status = main(['plan', {str(LARGE)!r}, '--reshard'])\n"
        "print({'torch', 'transformers', 'vllm', 'megatron'} & set(sys.modules))\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
    assert "982.94 GB" in done.stdout


def test_a_step_is_planned_and_its_figures_are_written(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.json"
    assert main(["plan", str(config), "--devices", "L4-24GB", "--mean-response", "32", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["machine"] == "L4-24GB" and found["memory"]["capacity"] == 24e9 and found["memory"]["fits"]
    stages = {row["stage"] for row in found["memory"]["phases"]}
    assert stages == {0, 1}
    for row in found["memory"]["phases"]:
        assert row["total"] == pytest.approx(sum(row["parts"].values()))
    assert found["memory"]["margin"] == pytest.approx(24e9 - max(row["total"] for row in found["memory"]["phases"]))
    seconds = found["seconds"]
    assert seconds["total"] == pytest.approx(sum(v for k, v in seconds.items() if k != "total"))
    printed = " ".join(capsys.readouterr().out.split())
    for word in ("memory per device", "log-probs", "reshard", "time of a step", "fits: margin"):
        assert word in printed


def test_what_does_not_fit_is_refused_with_what_would(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = ["plan", str(LARGE), "actor.megatron.tensor_model_parallel_size=2", "--devices", "A100-80GB"]
    assert main(large) == 2
    printed = capsys.readouterr()
    assert "does not fit: margin -" in " ".join(printed.out.split())
    assert "allowed: 80.0 GB" in printed.err
    changes = re.search(r"what would fit: (\S.*) \(margin", printed.err)
    assert changes
    assert main([*large, *changes[1].split()]) == 0


def test_a_search_writes_a_config_that_is_valid_and_plans_as_it_says(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, found = tmp_path / "found" / "best.yaml", tmp_path / "found.json"
    out.parent.mkdir()
    command = ["plan", str(config), "trainer.prompts_per_step=16", "--devices", "L4-24GB"]
    assert main([*command, "--search", "--write", str(out), "--json", str(found)]) == 0
    best = json.loads(found.read_text())["best"][0]
    written = load_config(out)
    assert written.trainer.prompts_per_step == 16 and written.run.name == "best"
    assert written.actor.max_tokens_per_micro_batch == best["max_tokens_per_micro_batch"]
    step = tmp_path / "step.json"
    assert main(["plan", str(out), "--devices", "L4-24GB", "--json", str(step)]) == 0
    planned = json.loads(step.read_text())
    assert planned["actor"] == best["actor"] and planned["memory"]["margin"] == pytest.approx(best["margin"])
    for phase in ("rollout", "log_probs", "update"):
        assert planned["seconds"][phase] == pytest.approx(best["seconds"][phase])
    assert "choices evaluated" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--search", "--write", str(config)]) == 2


@pytest.mark.distributed
def test_a_profile_of_this_machine_is_measured_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, profile = write(tmp_path, actor={"transformer_impl": "local"}), tmp_path / "new" / "profile.json"
    out = tmp_path / "step.json"
    assert main(["plan", str(path), "launcher.nproc_per_node=2", "--profile", str(profile)]) == 0
    machine = read_profile(profile)
    assert machine.is_cpu and machine.source == "measured by 2 processes"
    rates = [rate for _, rate in machine.matmul]
    assert rates == sorted(rates) and rates[0] > 1e8 and rates[-1] < 1e13
    assert 1e7 < machine.node_link < machine.memory_bandwidth * 10 < 1e13
    assert [ranks for ranks, _ in machine.collective_latency] == [2] and 1e-6 < machine.latency(2) < 1
    assert main(["plan", str(path), "launcher.nproc_per_node=2", "--devices", str(profile), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["machine_source"] == "measured by 2 processes"
    assert f"{profile}: {machine.name}" in capsys.readouterr().out


def test_a_recipe_and_a_folder_can_be_planned(tmp_path: Path) -> None:
    recipe = reshard_plan(load_config(write(tmp_path), ["launcher.nproc_per_node=2"]))
    assert recipe.forms["model.embed_tokens.weight"].shape == (256, 128)
    folder = write_tiny_model("mixtral", tmp_path / "mixtral")
    path = write(tmp_path, model={"path": str(folder)}, rollout={"max_prompt_tokens": 8, "max_response_tokens": 8})
    assert any(".experts.3.w2." in name for name in reshard_plan(load_config(path)).forms)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--reshard", "--nvlink", "0"], "--nvlink: found 0; allowed: GB/s above 0"),
        (["--reshard", "--wake", "nan"], "--wake: found nan; allowed: GB/s above 0"),
        (["--reshard", "--efficiency", "1.5"], "--efficiency: found 1.5; allowed: above 0, at most 1"),
        (["--reshard", "rollout.tensor_parallel_size=3"], "rollout.tensor_parallel_size: found 3"),
        (
            [
                "--reshard",
                "actor.megatron.pipeline_model_parallel_layout=Et*2|t*2L",
                "actor.megatron.virtual_pipeline_model_parallel_size=null",
            ],
            "pipeline_model_parallel_layout: found a layout given by hand",
        ),
        (["--write", "x.yaml"], "--write: found without --search"),
        (
            [
                "--search",
                "--devices",
                "L4-24GB",
                "rollout.max_response_tokens=64",
                "rollout.vllm.gpu_memory_utilization=0.01",
            ],
            "--search: none of",
        ),
        (["--plan", "x.json"], "--plan: found without --reshard"),
        (["--devices", "H1000"], "--devices: found 'H1000'; allowed: A100-40GB"),
        (["--mean-response", "65"], "--mean-response: found 65; allowed: above 0, at most 64"),
        (["--reshard", "model.architecture=none.json"], "model.architecture: no file none.json"),
    ],
)
def test_what_is_wrong_is_named(
    config: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--reshard", "--nvlink", "fast"], "--nvlink: invalid float"),
        (["--reshard", "--fly"], "--fly"),
    ],
)
def test_usage_errors(config: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", str(config), *arguments])
    assert left.value.code == 2 and expected in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_a_run_error(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--reshard", "--json", str(config / "x.json")]) == 1
    assert "x.json" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval"])
def test_training_needs_the_folder(config: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["launcher.nnodes=1", "run.dir=none"]
    assert main([command, str(config), *overrides]) == 2
    assert "model.path: no value; allowed: a Hugging Face model folder" in capsys.readouterr().err
    assert main([command, str(config), *overrides, "model.path=nowhere"]) == 2
    assert "model.path: no folder nowhere" in capsys.readouterr().err
