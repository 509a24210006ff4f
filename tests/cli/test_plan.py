"""``tlt plan --reshard``: its figures are the plan's, and it needs neither weights nor the heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.cli import main
from megatron_tlt.cli.plan import reshard_plan
from megatron_tlt.config.loader import load_config
from megatron_tlt.models.tiny import write_tiny_model
from megatron_tlt.reshard.plan import ReshardPlan
from megatron_tlt.reshard.projection import Bandwidths, project
from tests.config.test_loader import write
from tests.helpers.launch import REPOSITORY, slowness

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


def test_the_32b_plan_is_quick_and_imports_no_heavy_library() -> None:
    code = (
        "import sys, time; began = time.perf_counter(); from megatron_tlt.cli import main\n"
        f"status = main(['plan', {str(LARGE)!r}, '--reshard'])\n"
        "print('took', time.perf_counter() - began, {'torch', 'transformers', 'vllm', 'megatron'} & set(sys.modules))\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split()
    assert last[2] == "set()"
    assert float(last[1]) < 10 * slowness()
    assert "982.94 GB" in done.stdout


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
        ([], "--reshard"),
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
