"""The offline warm-up: acceptance rises, a killed run resumes bit for bit, bad input is named."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.drafter import (
    Pair,
    TargetStates,
    WarmupPlan,
    WarmupReport,
    aux_layers_of,
    drafter_from_target,
    load_drafter,
    load_without_target,
    read_checkpoint,
    read_pairs,
    warm_up,
    write_pairs,
)
from megatron_tlt.drafter.model import Kind, SharedWeights
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.models.hf_folder import read_hf_config
from megatron_tlt.observe.progress import Progress
from tests.helpers.launch import python

from .conftest import VOCAB, hidden_states, load_target

TOOL = Path(__file__).parents[2] / "tools" / "warmup_drafter.py"
CPU = torch.device("cpu")
PLAN = WarmupPlan(steps=30, entries_per_step=8, save_every=7, evaluate_every=10, seed=3)


def config_of(kind: Kind) -> DrafterConfig:
    return DrafterConfig(kind=kind, lr=2e-3, warmup_steps=5, feature_noise=0.02)


@pytest.fixture(scope="module")
def pairs(responses: torch.Tensor) -> list[Pair]:
    return [Pair(tuple(row[:6]), tuple(row[6:])) for row in responses[:100].tolist()]


def run(
    sharp: Path,
    pairs: list[Pair],
    out: Path,
    kind: Kind = "eagle",
    plan: WarmupPlan = PLAN,
    should_stop: Callable[[], bool] = lambda: False,
) -> WarmupReport | None:
    model = drafter_from_target(sharp, kind, seed=1)
    states = TargetStates(sharp, aux_layers_of(model.config), CPU)
    with Progress(0, plan.steps, enabled=False) as progress:
        return warm_up(model, config_of(kind), pairs, states, out, plan, progress, should_stop)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_states_equal_the_targets(kind: Kind, sharp_folder: Path) -> None:
    tokens = torch.arange(20, dtype=torch.int32)
    states = TargetStates(sharp_folder, (1, 2, 3) if kind == "eagle3" else (), CPU)(tokens)
    target = load_target(sharp_folder)
    assert torch.equal(states, hidden_states(target, tokens, kind).bfloat16())
    with torch.no_grad():
        logits = target(tokens[None].long()).logits[0]
    torch.testing.assert_close(target.lm_head(states[:, -64:].float()), logits, rtol=2e-2, atol=5e-2)


def test_the_last_auxiliary_layer_is_the_stream_before_the_norm(sharp_folder: Path) -> None:
    tokens = torch.arange(20, dtype=torch.int32)
    aux_states = TargetStates(sharp_folder, (1, 2, 4), CPU)(tokens)[:, -128:-64]
    model = load_target(sharp_folder)
    normed = hidden_states(model, tokens, "eagle")
    torch.testing.assert_close(model.model.norm(aux_states.float()), normed, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(aux_states.float(), normed, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_acceptance_rises_and_the_folder_holds_the_drafter(
    kind: Kind, sharp_folder: Path, pairs: list[Pair], tmp_path: Path
) -> None:
    plan = WarmupPlan(steps=60, entries_per_step=16, save_every=25, evaluate_every=20)
    report = run(sharp_folder, pairs, tmp_path, kind, plan)
    assert report is not None
    assert [row["step"] for row in report.history] == [0, 20, 40, 60]
    assert (report.training_responses, report.held_out_responses, report.held_out_chains) == (90, 10, 390)
    lengths = [row["acceptance_length"] for row in report.history]
    losses = [row["loss_per_depth"] for row in report.history]
    assert losses[0] == [] and all(len(found) == config_of(kind).steps for found in losses[1:])
    assert max(map(max, losses[1:])) < math.log(VOCAB)
    # EAGLE's start is good for this target, which often repeats its token
    assert lengths[-1] > (1.9 if kind == "eagle" else lengths[0] + 0.1), lengths
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["history"] == report.history and f"{lengths[-1]:.3f} after 60 steps" in written["line"]
    shared = SharedWeights.from_folder(sharp_folder)
    model = load_drafter(tmp_path / "drafter", read_hf_config(sharp_folder), kind, shared)
    state, _ = read_checkpoint(tmp_path / "training")
    assert state.version == 60
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state.parameters[name]), name
        assert torch.equal(tensor, load_without_target(tmp_path / "training").state_dict()[name]), name


def assert_same_result(one: Path, other: Path) -> None:
    for file in ("drafter/model.safetensors", "training/training.safetensors"):
        a, b = load_file(one / file), load_file(other / file)
        assert a.keys() == b.keys()
        assert all(torch.equal(tensor, b[name]) for name, tensor in a.items()), file
    for file in ("report.json", "drafter/config.json"):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def test_a_stopped_warm_up_resumes_bit_for_bit(sharp_folder: Path, pairs: list[Pair], tmp_path: Path) -> None:
    whole = run(sharp_folder, pairs, tmp_path / "whole")
    stops, report, starts = iter([3, 60, 5, 1, 11, 4]), None, 0
    while report is None:
        asked, limit = 0, next(stops, 10**6)

        def should_stop(limit: int = limit) -> bool:
            nonlocal asked
            asked += 1
            return asked > limit

        report = run(sharp_folder, pairs, tmp_path / "stopped", should_stop=should_stop)
        starts += 1
    assert starts >= 6 and report == whole
    assert_same_result(tmp_path / "whole", tmp_path / "stopped")


class Killed(BaseException):
    """Simulates a kill: no handler catches it."""


@pytest.mark.parametrize("at", ["training.safetensors", "manifest.json"])
def test_a_kill_while_replacing_the_checkpoint_can_be_resumed(
    at: str, sharp_folder: Path, pairs: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are still verified: foreign weights are refused, its own continue."""
    plan = WarmupPlan(**{**vars(PLAN), "steps": 6, "save_every": 2})
    whole = run(sharp_folder, pairs, tmp_path / "whole", plan=plan)
    checkpoint, replace, times = tmp_path / "killed" / "training", os.replace, 0

    def replace_or_die(source: Path, target: Path) -> None:
        nonlocal times
        times += Path(target) == checkpoint / at
        if times == 2:
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("os.replace", replace_or_die)
        run(sharp_folder, pairs, tmp_path / "killed", plan=plan)
    file = checkpoint / "training.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match="the weights are damaged"):
        run(sharp_folder, pairs, tmp_path / "killed", plan=plan)
    file.write_bytes(content)
    assert run(sharp_folder, pairs, tmp_path / "killed", plan=plan) == whole
    assert_same_result(tmp_path / "whole", tmp_path / "killed")


def test_more_steps_continue_a_finished_warm_up(sharp_folder: Path, pairs: list[Pair], tmp_path: Path) -> None:
    run(sharp_folder, pairs, tmp_path / "whole")
    for steps in (16, 30):
        plan = WarmupPlan(**{**vars(PLAN), "steps": steps})
        assert run(sharp_folder, pairs, tmp_path / "longer", plan=plan) is not None
    assert_same_result(tmp_path / "whole", tmp_path / "longer")
    with pytest.raises(ConfigError, match=r"steps is 16; .* has already completed step 30"):
        run(sharp_folder, pairs, tmp_path / "longer", plan=WarmupPlan(**{**vars(PLAN), "steps": 16}))


def command(sharp: Path, data: Path, out: Path) -> list[str]:
    values = {"--model": sharp, "--data": data, "--out": out, "--steps": 120, "--save-every": 5, "--seed": 2}
    return [python(), str(TOOL), *(str(item) for pair in values.items() for item in pair)]


@pytest.mark.distributed
def test_a_killed_tool_resumes(sharp_folder: Path, pairs: list[Pair], tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    write_pairs(data, pairs)
    done = subprocess.run(command(sharp_folder, data, tmp_path / "whole"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "after 120 steps" in done.stdout
    out = tmp_path / "killed"
    for signum, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)):
        started = time.time()
        process = subprocess.Popen(command(sharp_folder, data, out), stdout=subprocess.DEVNULL)
        state = out / "training" / "training.safetensors"
        while not (state.is_file() and state.stat().st_mtime > started):
            assert process.poll() is None and time.time() < started + 300
            time.sleep(0.02)
        process.send_signal(signum)
        assert process.wait(60) == status
    assert not (out / "drafter").exists()
    last = subprocess.run(command(sharp_folder, data, out), capture_output=True, text=True, timeout=300)
    assert last.returncode == 0 and "continues after step" in last.stdout, last.stderr
    assert_same_result(tmp_path / "whole", out)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1: found '.1.'; needed: an object with prompt and response"),
        ('{"prompt": [1]}', "needed: an object with prompt and response"),
        ('{"prompt": [1], "response": []}', "line 1: response is '..'; allowed: text or a list of token ids"),
        ('{"prompt": [1], "response": [64]}', "response has token ids 64 to 64; allowed: 0 to 63"),
        ('{"prompt": [1.5], "response": [2]}', "prompt is '.1.5.'"),
        ("", "no line in it"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_pairs(tmp_path / "pairs.jsonl", VOCAB, lambda: pytest.fail("no text in it"))


def test_pairs_that_do_not_fit_are_named(sharp_folder: Path, pairs: list[Pair], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pair 1 has 300 tokens; allowed: 256"):
        run(sharp_folder, [pairs[0], Pair((1,), (2,) * 299)], tmp_path / "long")
    with pytest.raises(ConfigError, match="9 responses to train on and 0 held out"):
        run(sharp_folder, pairs[:9], tmp_path / "few")
    with pytest.raises(ConfigError, match="0 responses to train on and 0 held out"):
        run(sharp_folder, [Pair((1,), (2,))] * 20, tmp_path / "short")
    with pytest.raises(ConfigError, match="steps is 0; allowed: at least 1"):
        WarmupPlan(steps=0)
    short = WarmupPlan(steps=1)
    run(sharp_folder, pairs, tmp_path / "taken", plan=short)
    with pytest.raises(ConfigError, match=r"warmup.json: pairs is .* \(another warm-up needs another folder\)"):
        run(sharp_folder, pairs[:50], tmp_path / "taken", plan=short)
    about = json.loads((tmp_path / "taken" / "warmup.json").read_text())
    del about["drafter"]["dtype"]  # as an earlier release wrote it
    (tmp_path / "taken" / "warmup.json").write_text(json.dumps(about))
    run(sharp_folder, pairs, tmp_path / "taken", plan=short)
    (tmp_path / "taken" / "training" / "training.safetensors").write_bytes(b"torn")
    with pytest.raises(RunError, match=r"training.safetensors: 4 bytes, .* damaged"):
        run(sharp_folder, pairs, tmp_path / "taken", plan=short)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("warmup_drafter", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere", "--data", "x"], "no config.json in nowhere"),
        (["--model", "nowhere"], "--data: not given, nor --config"),
        (["--data", "x"], "--model: not given, nor --config"),
        (["--data", "missing.jsonl", "--model", "TARGET"], "missing.jsonl: cannot be read"),
        (["--data", "x", "--model", "TARGET", "--lr", "0"], "--lr is 0.0; allowed: above 0"),
        (["--data", "x", "--model", "TARGET", "--save-every", "0"], "save_every is 0; allowed: at least 1"),
    ],
)
def test_the_tool_names_what_is_wrong(
    arguments: list[str],
    message: str,
    tool: ModuleType,
    sharp_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    given = [str(sharp_folder) if item == "TARGET" else item for item in arguments]
    assert tool.main([*given, "--steps", "2", "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_a_diverging_warm_up_ends_with_the_reason(sharp_folder: Path, pairs: list[Pair], tmp_path: Path) -> None:
    model = drafter_from_target(sharp_folder, "eagle", seed=1)
    states = TargetStates(sharp_folder, (), CPU)
    config = DrafterConfig(kind="eagle", lr=0.3)
    expected = (
        r"loss_(grows|above_uniform) after step \d+: .*learning rate is too high .*loss per depth .*of guessing 4\.16"
    )
    with pytest.raises(RunError, match=expected), Progress(0, 40, enabled=False) as progress:
        warm_up(model, config, pairs, states, tmp_path, WarmupPlan(steps=40, entries_per_step=8), progress)
    assert not (tmp_path / "drafter").exists()


def test_the_tool_reads_a_run_config(tool: ModuleType, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "rollout: {max_response_tokens: 64, max_prompt_tokens: 64}\nactor: {transformer_impl: local}\n"
        "model: {recipe: {}}\ntasks: [{name: gcd}]\nspeculation: {enabled: true, drafter: eagle3}\n"
        "drafter: {kind: eagle3, lr: 3.0e-4, path: not/there/yet, loss: {name: kl}}\n"
    )
    given = tool.parser().parse_args(["--config", str(config), "--steps", "2", "--out", str(tmp_path), "--lr", "1e-3"])
    assert not tool._config(given).speculation.enabled
    drafter = tool._drafter(given)
    assert (drafter.kind, drafter.lr, drafter.loss.name, drafter.path) == ("eagle3", 1e-3, "kl", None)
    config.write_text(config.read_text().replace("3.0e-4", "-1"))
    given.lr = None
    with pytest.raises(ConfigError, match=r"run\.yaml: drafter\.lr: found -1"):
        tool._drafter(given)
