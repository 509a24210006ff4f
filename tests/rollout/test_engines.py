"""Which engine ``rollout.engine`` selects, what is refused before ranks start, and what a replay answers."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.config.loader import compare_resolved, dump_resolved, load_config
from megatron_tlt.config.schema import RolloutConfig, TltConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.engines import ALL, ENGINES, build_engine, engine_class, engine_problems, libraries_not_needed
from megatron_tlt.rollout.interface import RolloutEngine
from megatron_tlt.rollout.replay import ReplayEngine, append_recording
from megatron_tlt.rollout.types import Request, Response, SamplingSpec
from tests.helpers.launch import REPOSITORY
from tests.helpers.tiny_models import build_qwen2
from tests.helpers.user_code import add_module

MODULE = "tlt_user_engines"
SOURCE = """
from megatron_tlt.rollout.interface import Capabilities, RolloutEngine
from megatron_tlt.rollout.types import Response


class Echo(RolloutEngine):
    capabilities = Capabilities(sleep=True)

    def __init__(self, model_path, rollout, speculation, seed, times=1):
        self.times = times

    def generate(self, requests, on_finished=None, on_step=None, chooser=None):
        said = [r.prompt_token_ids * self.times for r in requests]
        return [
            Response(r.request_id, r.prompt_token_ids, t, (-1.0,) * len(t), "stop", 0.0)
            for r, t in zip(requests, said)
        ]


class Plain(RolloutEngine):
    def generate(self, requests, on_finished=None, on_step=None, chooser=None):
        return []


class Nothing(RolloutEngine):
    pass


class Other:
    pass
"""
WITHOUT = {"speculation": {"enabled": False}, "reshard": {"method": "none"}}


@pytest.fixture
def user_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_module(tmp_path / "code", MODULE, SOURCE, monkeypatch)


def config(rollout: dict[str, Any], **sections: Any) -> TltConfig:
    return TltConfig.model_validate(
        {"model": {"path": "m"}, "tasks": [{"name": "gcd"}], "rollout": rollout, **WITHOUT, **sections}
    )


def test_vllm_is_the_default_and_does_everything() -> None:
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    default = TltConfig.model_validate({"model": {"path": "m"}, "tasks": [{"name": "gcd"}]})
    assert default.rollout.engine == "vllm" and engine_problems(default) == []
    assert engine_class("vllm") is VllmEngine and VllmEngine.capabilities == ALL
    assert libraries_not_needed(default.rollout) == ()
    assert libraries_not_needed(RolloutConfig(engine="replay")) == ("vllm",)


def test_the_trainer_names_no_engine() -> None:
    files = list((REPOSITORY / "megatron_tlt" / "trainer").rglob("*.py"))
    assert len(files) > 20 and not [file.name for file in files if "vllm" in file.read_text().lower()]


def test_every_method_of_the_protocol_has_the_same_parameters_in_each_engine() -> None:
    for name in ENGINES:
        for method, expected in inspect.getmembers(RolloutEngine, inspect.isfunction):
            if not method.startswith("_"):
                found = inspect.signature(getattr(engine_class(name), method))
                assert list(found.parameters) == list(inspect.signature(expected).parameters), f"{name}.{method}"


def test_the_registry_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, megatron_tlt.rollout.engines as e; e.engine_class('replay')\n"
    code += "print(sorted({'torch', 'vllm'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.strip() == "[]"


def test_what_an_engine_cannot_do_is_refused_all_at_once() -> None:
    found = engine_problems(
        config(
            {
                "engine": "replay",
                "engine_arguments": {"path": "r"},
                "tensor_parallel_size": 2,
                "vllm": {"dtype": "half"},
            },
            speculation={"enabled": True},
            reshard={"method": "direct"},
        )
    )
    assert found == [
        "rollout.vllm: found dtype; engine replay does not read it; allowed: null",
        "speculation.enabled: found true; engine replay does not speculate; allowed: false",
        "rollout.tensor_parallel_size: found 2; engine replay is of one rank; allowed: 1",
        "reshard.method: found direct; engine replay takes no weights; allowed: none",
    ]
    assert engine_problems(config({"engine_arguments": {"path": "r"}})) == [
        "rollout.engine_arguments: found {'path': 'r'}; engine vllm takes rollout.vllm; allowed: none",
        "reshard.method: found none; engine vllm generates with the actor's weights; allowed: direct",
    ]


REPLAY = "rollout.router_replay: found ids; "


@pytest.mark.parametrize(
    ("rollout", "sections", "said"),
    [
        ({}, {}, []),
        ({}, {"model": {"path": "dense"}}, ["the model has no experts; allowed: none"]),
        ({}, {"model": {"path": "absent"}}, []),  # which is refused elsewhere
        ({"model_runner": "v2"}, {}, ["rollout.model_runner v2 records no experts; allowed: none, or v1"]),
        (
            {},
            {"actor": {"megatron": {"moe_router_fusion": True}}},
            ["actor.megatron.moe_router_fusion takes no experts; allowed: none, or no fusion"],
        ),
        (
            {},
            {"tasks": [{"name": "products", "environment": {"name": "calculator"}}]},
            ["task products has an environment, whose turns are not recorded; allowed: none"],
        ),
        (
            {"engine": "replay", "engine_arguments": {"path": "r"}},
            {"reshard": {"method": "none"}},
            ["engine replay records no experts; allowed: none"],
        ),
    ],
)
def test_where_experts_cannot_be_replayed_it_is_refused(
    rollout: dict[str, Any],
    sections: dict[str, Any],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_model("qwen3-moe", Path("moe"))
    build_qwen2(Path("dense"))
    given = {"model": {"path": "moe"}, "tasks": [{"name": "gcd"}], "speculation": {"enabled": False}, **sections}
    read = TltConfig.model_validate({**given, "rollout": {"router_replay": "ids", **rollout}})
    assert engine_problems(read) == [REPLAY + one for one in said]


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"engine": "sglang"}, "rollout.engine: found 'sglang'; allowed: replay, vllm, or a class's import path"),
        ({"engine": "no.such.Engine"}, "rollout.engine: found 'no.such.Engine'; 'no.such' cannot be imported"),
        ({"engine": f"{MODULE}.Other"}, "not a subclass of megatron_tlt.rollout.interface.RolloutEngine"),
        ({"engine": f"{MODULE}.Nothing"}, "with generate"),
        ({"engine": f"{MODULE}.Ech"}, "did you mean Echo?"),
        (
            {"engine": f"{MODULE}.Echo", "engine_arguments": {"time": 2}},
            "engine_arguments.time: .* did you mean times?",
        ),
        ({"engine": "replay"}, "rollout.engine_arguments: found {}; .* missing a required .*'path'"),
    ],
)
def test_a_wrong_engine_is_named(user_engines: None, rollout: dict[str, Any], said: str) -> None:
    (line,) = engine_problems(config(rollout))
    assert re.search(said.replace("?", r"\?").replace("{}", r"\{\}"), line), line


def test_a_user_s_engine_is_built_by_its_import_path(user_engines: None) -> None:
    engine = build_engine(
        config({"engine": f"{MODULE}.Echo", "engine_arguments": {"times": 2}}), Path("m"), SpeculationConfig()
    )
    (response,) = engine.generate([Request("0-0", (3, 4), SamplingSpec(), 0)])
    assert response.token_ids == (3, 4, 3, 4) and engine.versions == {} and engine.tensor_parallel_group is None
    with pytest.raises(RunError, match="Echo has no capability 'weights'"):
        engine.begin_update("policy")
    with pytest.raises(ConfigError, match=r"speculation.enabled: found true; engine .*Echo does not speculate"):
        build_engine(config({"engine": f"{MODULE}.Echo"}, speculation={}), Path("m"), SpeculationConfig())


def test_an_engine_needs_no_constructor_of_its_own(user_engines: None) -> None:
    plain = {"engine": f"{MODULE}.Plain"}
    assert build_engine(config(plain), Path("m"), SpeculationConfig()).generate([]) == []
    (line,) = engine_problems(config(plain | {"engine_arguments": {"times": 2}}))
    assert "times" in line


def test_a_device_whose_memory_the_actor_needs_takes_no_engine_that_keeps_it(
    user_engines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from megatron_tlt.platform import device
    from megatron_tlt.rollout.interface import Capabilities

    module = sys.modules[MODULE] if MODULE in sys.modules else __import__(MODULE)
    monkeypatch.setattr(module.Echo, "capabilities", Capabilities())
    build_engine(config({"engine": f"{MODULE}.Echo"}), Path("m"), SpeculationConfig())
    monkeypatch.setattr(device, "current_device", lambda: device.Device(torch.device("cuda"), "nccl"))
    with pytest.raises(ConfigError, match="does not sleep; on this device the actor needs its memory"):
        build_engine(config({"engine": f"{MODULE}.Echo"}), Path("m"), SpeculationConfig())


def test_a_run_of_an_earlier_release_used_vllm(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {recipe: {}}\ntasks: [{name: gcd}]\nrollout: {max_prompt_tokens: 64, max_response_tokens: 64}"
    )
    resolved = tmp_path / "config.resolved.yaml"
    lines = dump_resolved(load_config(path)).splitlines()
    resolved.write_text("\n".join(line for line in lines if not line.strip().startswith("engine")))
    assert compare_resolved(resolved, load_config(path)) == []
    assert compare_resolved(resolved, load_config(path, ["rollout.engine=replay"])) == [
        "rollout.engine: 'vllm' -> 'replay'"
    ]
    assert load_config(path, ["rollout.vllm={dtype: float32}", "rollout.vllm=null"]).rollout.vllm == {}


PROMPT = (1, 2, 3)


def replay(folder: Path, rows: list[Any]) -> ReplayEngine:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 16}))
    (folder / "recording.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ReplayEngine(
        folder, RolloutConfig(), SpeculationConfig(enabled=False), 0, path=str(folder / "recording.jsonl")
    )


def row(sample: int = 0, **other: Any) -> dict[str, Any]:
    own = {"prompt_token_ids": list(PROMPT), "sample": sample, "token_ids": [4 + sample, 5], "log_probs": [-0.5, -0.25]}
    return {**own, **other}


def request(sample: int = 0, seed: int = 0, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Request:
    return Request(f"0-{sample}", prompt, SamplingSpec(**sampling), seed, "p/0", sample)


def test_a_replay_answers_by_prompt_and_sample_and_prefers_the_seed(tmp_path: Path) -> None:
    again = [row(0, token_ids=[7, 7], seed=70), row(0, token_ids=[8, 8], seed=80)]
    engine = replay(tmp_path, [row(1), row(0), *again])
    steps: list[Any] = []
    ended: list[Response] = []
    asked = [request(0, seed=80), request(1, seed=5), request(0, seed=4), request(1, max_tokens=1)]
    found = engine.generate(asked, ended.append, steps.append)
    assert [one.token_ids for one in found] == [(8, 8), (5, 5), (7, 7), (5,)]  # 4 % 3 is the second of three rows
    assert [one.finish_reason for one in found] == ["stop", "stop", "stop", "length"]
    assert found[0].log_probs == (-0.5, -0.25) and found[3].log_probs == (-0.5,)
    assert ended == found and [step.num_tokens for step in steps] == [2, 2, 2, 1]
    assert [one.token_ids for one in engine.generate(asked[::-1])] == [one.token_ids for one in found[::-1]]


def test_what_is_appended_is_what_is_replayed(tmp_path: Path) -> None:
    asked = [request(0, seed=1), request(0, seed=2), request(1, seed=3)]
    said = [
        Response(one.request_id, PROMPT, array("i", (4 + i, 5)), array("f", (-1 / 3, -i / 7)), why, 0.0)
        for i, (one, why) in enumerate(zip(asked, ("stop", "length", "stop"), strict=True))
    ]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 16}))
    file = tmp_path / "made.jsonl"
    append_recording(file, asked[:1], said[:1])
    append_recording(file, asked[1:], said[1:])
    made = ReplayEngine(tmp_path, RolloutConfig(), SpeculationConfig(enabled=False), 0, path=str(file))
    found = made.generate(asked)
    assert [(list(r.token_ids), list(r.log_probs), r.finish_reason) for r in found] == [
        (list(r.token_ids), list(r.log_probs), r.finish_reason) for r in said
    ]


def test_an_episode_is_replayed_with_its_mask_and_reward(tmp_path: Path) -> None:
    reward = Reward(0.5, False, "5", None)
    said = Response(
        "0-0", PROMPT, (4, 5, 6), (-1.0, 0.0, -2.0), "stop", 0.0, loss_mask=(True, False, True), turns=2, reward=reward
    )
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 16}))
    append_recording(tmp_path / "made.jsonl", [request(0)], [said])
    made = ReplayEngine(
        tmp_path, RolloutConfig(), SpeculationConfig(enabled=False), 0, path=str(tmp_path / "made.jsonl")
    )
    (found,) = made.generate([request(0)])
    assert (found.loss_mask, found.turns, found.reward) == ((True, False, True), 2, reward)
    (cut,) = made.generate([request(0, max_tokens=2)])
    assert (cut.loss_mask, cut.finish_reason) == ((True, False), "length")


def test_a_request_without_a_recorded_response_is_refused_before_anything_is_given(tmp_path: Path) -> None:
    engine = replay(tmp_path, [row(0)])
    ended: list[Response] = []
    with pytest.raises(ConfigError, match=r"no response with sample 1 to problem 'p/0', whose prompt has 3 tokens"):
        engine.generate([request(0), request(1)], ended.append)
    assert not ended
    with pytest.raises(RunError, match="ReplayEngine has no capability 'speculation'"):
        engine.generate([request(0)], chooser=object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "found a list; allowed: an object"),
        ({"prompt_token_ids": [1]}, "no 'sample'; needed: prompt_token_ids, sample, token_ids, log_probs"),
        (row(step=3), "unknown key 'step'"),
        (row(token_ids=[4, 16]), "token_ids: allowed: at least one token id, each from 0 to 15"),
        (row(prompt_token_ids=[]), "prompt_token_ids: allowed: at least one"),
        (row(log_probs=[-0.5]), "log_probs: allowed: a number of at most 0 for each of token_ids"),
        (row(log_probs=[-0.5, 0.5]), "log_probs: allowed: a number of at most 0"),
        (row(sample=-1), "sample: found -1; allowed: 0 and more"),
        (row(seed="a"), "seed: found 'a'; allowed: a whole number"),
        (row(loss_mask=[True]), "loss_mask: allowed: true or false for each of token_ids"),
        (row(loss_mask=[1, 0]), "loss_mask: allowed: true or false for each of token_ids"),
        (row(turns=0), "turns: found 0; allowed: 1 and more"),
        (row(reward=0.5), "reward: "),
        (row(reward={"value": "high"}), "reward: "),
        (row(reward={"value": 1, "error": 3}), "reward: found the error 3; allowed: text or null"),
        (row(finish_reason="done"), "finish_reason: found 'done'; allowed: stop, length, abort"),
    ],
)
def test_a_row_of_another_form_is_named_with_its_line(tmp_path: Path, wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        replay(tmp_path, [row(), wrong, wrong])
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and lines[0].startswith(f"{tmp_path / 'recording.jsonl'}:2: {said}"), lines


def test_a_recording_that_is_empty_or_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty; allowed: a row per response"):
        replay(tmp_path, [])
    (tmp_path / "recording.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"engine_arguments.path: .* cannot be read"):
        ReplayEngine(tmp_path, RolloutConfig(), SpeculationConfig(), 0, path=str(tmp_path / "recording.jsonl"))
