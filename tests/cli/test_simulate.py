"""``tlt simulate``: figures for a launch config, without weights, GPUs or heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.cli import main
from megatron_tlt.planning.simulation.policies import POLICIES
from megatron_tlt.planning.simulation.steps import PHASES
from tests.helpers.launch import REPOSITORY

LARGE = "launch/qwen2.5-32b-8n8g.yaml"
SMALL_STEP = ["trainer.prompts_per_step=16", "algorithm.group_size=4", "launcher.nnodes=2", "spot.min_replicas=2"]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # the config names its architecture from there


def simulated(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert main(["simulate", LARGE, *SMALL_STEP, "--seeds", "2", "--steps", "2", "--json", str(file), *arguments]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_table_its_json_and_its_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    policies = ["--policies", ",".join(POLICIES)]
    found = simulated(tmp_path, "--nodes", "4,2", *policies, "--plot", str(plot))
    assert list(found["nodes"]) == ["2", "4"] and found["engine_devices"] == 4 and found["responses"] == 64
    for rows in found["nodes"].values():
        assert [row["policy"] for row in rows] == list(POLICIES)
        off = rows[0]
        for row in rows:
            assert sum(row[f"{phase}_s"] for phase in PHASES) == pytest.approx(row["step_s"])
            assert sum(row["step_s_by_seed"]) / 2 == pytest.approx(row["step_s"])
            assert row["speedup"]["ratio"] == pytest.approx(off["step_s"] / row["step_s"])
            assert row["speedup"]["low"] <= row["speedup"]["ratio"] <= row["speedup"]["high"]
    # twice the nodes train in half the time
    halves = [found["nodes"][count][0]["log_probs_s"] for count in ("2", "4")]
    assert 1.2 < halves[0] / halves[1] <= 2.0 + 1e-9
    kinds = {name: entry["kind"] for name, entry in found["constants"].items()}
    assert kinds["length_median"] == "fitted" and kinds["memory_efficiency"] == "assumed"
    printed = capsys.readouterr().out
    for word in (
        *POLICIES,
        "16 devices, 4 engines",
        "32 devices, 8 engines",
        "fitted to TLT's 7B runs",
    ):
        assert word in " ".join(printed.split())
    drawn = plot.read_text()
    assert "<svg" in drawn and "speed-up over off" in drawn and "seconds per step" in drawn
    # same seeds, same figures
    assert simulated(tmp_path, "--nodes", "2,4", *policies) == found


def test_recorded_lengths_and_the_law_fitted_to_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lengths = [100 * (i + 1) for i in range(40)]
    (run / "lengths.jsonl").write_text(json.dumps({"step": 1, "lengths": lengths}) + "\n")
    as_it_is = simulated(tmp_path, "--policies", "off", "--lengths", str(run))
    assert as_it_is["lengths"] == {"recorded": 40}
    assert as_it_is["nodes"]["2"][0]["kept_length_longest"] <= 4000
    fitted = simulated(tmp_path, "--policies", "off", "--lengths", str(run), "--fit")
    assert 1000 < fitted["lengths"]["median"] < 2500 and 0.5 < fitted["lengths"]["sigma"] < 1.5
    # a constant that the user knows better is said to be the user's
    other = simulated(tmp_path, "--policies", "off", "--constant", "training_efficiency=0.1")
    assert other["constants"]["training_efficiency"] == {"value": 0.1, "kind": "given", "source": None}
    assert other["nodes"]["2"][0]["update_s"] > 2 * simulated(tmp_path)["nodes"]["2"][0]["update_s"]


def test_lengths_that_the_configs_limit_cuts_are_said_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps([1000] * 90 + [40_000] * 10))
    simulated(tmp_path, "--policies", "off", "--lengths", str(trace))
    note = "note: rollout.max_response_tokens: 32768 cuts 10.0% of the lengths, which go up to 40000"
    assert note in capsys.readouterr().out
    trace.write_text(json.dumps([1000] * 40 + [40_000] * 60))
    assert main(["simulate", LARGE, *SMALL_STEP, "--lengths", str(trace)]) == 2
    assert "32768 cuts 60.0% of the lengths" in capsys.readouterr().err
    trace.write_text(json.dumps([1000] * 100))
    simulated(tmp_path, "--policies", "off", "--lengths", str(trace))
    assert "cuts" not in capsys.readouterr().out


def test_the_fastest_policy_is_named_with_its_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corrected = ["algorithm.correction={weights: token}", "schedule={kind: partial, eta_prompts: 2.0}"]
    rows = simulated(tmp_path, "--policies", "stream,adaptive,partial", *corrected)["nodes"]["2"]
    told = " ".join(capsys.readouterr().out.split())
    by_name = {row["policy"]: row["speedup"]["ratio"] for row in rows}
    assert by_name["partial"] > by_name["adaptive"] > by_name["stream"] >= 1
    assert f"fastest: partial, {by_name['partial']:.2f} times as fast as off, which trains on tokens of earlier" in told
    assert f"of those that only save time: adaptive, {by_name['adaptive']:.2f}" in told
    less = simulated(tmp_path, "--policies", "partial", *corrected[:1], "schedule={kind: partial, eta_prompts: 1.1}")
    assert less["nodes"]["2"][1]["rollout_s"] != rows[3]["rollout_s"], "the section's settings are simulated"


def test_a_default_run_advises_among_all_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulated(tmp_path)["nodes"]["2"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    ratios = {row["policy"]: row["speedup"]["ratio"] for row in rows}
    best = max(ratios, key=lambda name: ratios[name])
    exact = max((name for name in ratios if POLICIES[name].is_synchronous), key=lambda name: ratios[name])
    assert POLICIES[best].trains_drafter and not POLICIES[best].is_synchronous, "a combination is the fastest"
    told = " ".join(capsys.readouterr().out.split())
    assert f"fastest: {best}, {ratios[best]:.2f} times as fast as off" in told
    assert f"of those that only save time: {exact}, {ratios[exact]:.2f}" in told


def test_steps_that_are_no_whole_cycles_of_tail_batching_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, said in (("4", True), ("5", False)):
        simulated(tmp_path, "--policies", "off,tail", "--steps", steps)
        assert ("tail batching has a cycle of 5 steps here" in capsys.readouterr().out) is said
    simulated(tmp_path, "--policies", "off,tail", "--steps", "3", "tail.eta_prompts=1.5")
    assert "has a cycle" not in capsys.readouterr().out


def test_the_kv_cache_is_the_plans(tmp_path: Path) -> None:
    found = simulated(tmp_path, "--policies", "off")
    planned = tmp_path / "plan.json"
    assert main(["plan", LARGE, *SMALL_STEP, "--json", str(planned)]) == 0
    assert int(found["kv_tokens"]) == json.loads(planned.read_text())["memory"]["cache_tokens"]


def test_a_learned_drafter_of_the_config_is_the_one_that_is_simulated(tmp_path: Path) -> None:
    drafts = ["speculation.drafter=eagle", "speculation.num_speculative_tokens=5", "drafter.kind=eagle"]
    drafts += ["drafter.max_tokens_per_micro_batch=34816", "drafter.draft_vocab_size=null"]
    found = simulated(tmp_path, "--policies", "static", *drafts)
    assert found["strategies"][0] == "eagle-5"
    assert found["nodes"]["2"][1]["policy"] == "static"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--policies", "spot,fly"], "--policies: found fly; allowed: off, static, adaptive"),
        (["--nodes", "2,x"], "--nodes: found '2,x'; allowed: positive integers"),
        (["--nodes", "3"], "actor.megatron: tensor x pipeline x context is 16; allowed: a divisor of 24"),
        (["--device", "TPU"], "device: found 'TPU'; allowed: A100"),
        (["--constant", "speed=2"], "--constant: found 'speed'; allowed: memory_efficiency"),
        (["--constant", "length_sigma=x"], "--constant: found 'length_sigma=x'"),
        (["--constant", "length_sigma=-1"], "--constant: length_sigma is -1; allowed: above 0"),
        (["--lengths", "none.json"], "--lengths: cannot read none.json"),
        (["--fit"], "--fit: found no --lengths"),
        (["--plot", "plot.txt"], "--plot: found plot.txt; allowed: one of the extensions .svg"),
        (["--steps", "0"], "--steps: found 0; allowed: at least 1"),
        (["--constant", "length_median=90000"], "rollout.max_response_tokens: 32768 cuts "),
        (["--device", "L4-24GB"], "rollout.max_response_tokens: found 32768"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["simulate", LARGE, *SMALL_STEP, *arguments]) == 2
    assert f"error: {expected}" in capsys.readouterr().err


def test_it_imports_no_heavy_library_and_its_room_nothing_above_it() -> None:
    code = (
        "import importlib, pkgutil, sys; import megatron_tlt.planning.simulation as room\n"
        "[importlib.import_module(f'{room.__name__}.{m.name}') for m in pkgutil.iter_modules(room.__path__)]\n"
        "above = ('cli', 'bench', 'trainer', 'rollout', 'actor', 'drafter', 'spot', 'speculation')\n"
        "print([name for name in sys.modules if name.startswith(tuple(f'megatron_tlt.{one}' for one in above))])\n"
        "from megatron_tlt.cli import main\n"
        f"main(['simulate', {LARGE!r}, *{SMALL_STEP!r}, '--policies', 'off', '--seeds', '1', '--steps', '1'])\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "[]" and done.stdout.splitlines()[-1] == "[]"
