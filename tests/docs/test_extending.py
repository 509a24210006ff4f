"""What docs/extending.md shows runs as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megatron_tlt.algorithms.losses import LossInputs
from megatron_tlt.algorithms.registry import build_algorithm
from megatron_tlt.bench.tiny_models import family_config
from megatron_tlt.cli.preflight import load_checked
from megatron_tlt.config.import_path import load_object
from megatron_tlt.config.schema import AlgorithmConfig, RolloutConfig
from megatron_tlt.config.task import EnvironmentConfig, TaskConfig
from megatron_tlt.environments.pool import EnvironmentPool
from megatron_tlt.environments.verifiers_library import VerifiersRows
from megatron_tlt.models import families
from megatron_tlt.models.hf_folder import SafetensorsFolder, read_architecture
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.rewards import Reward, RewardPool, verifiers_of
from megatron_tlt.tasks import build_sources
from tests.helpers.launch import REPOSITORY
from tests.helpers.tiny_models import build_qwen2, greedy, load_qwen2
from tests.helpers.user_code import add_module

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), re.DOTALL)
PYTHON = {code.partition("\n")[0].removeprefix("# "): code for language, code in BLOCKS if language == "python"}
CONFIG, TURNS, LIBRARY = (yaml.safe_load(code) for language, code in BLOCKS if language == "yaml")
TASKS = [TaskConfig.model_validate(task) for task in CONFIG["tasks"]]


@pytest.fixture(scope="module", autouse=True)
def mypackage(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("code")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, code in PYTHON.items():
            if name.startswith("mypackage/"):
                add_module(folder, name.removesuffix(".py").replace("/", "."), code, monkeypatch)
        yield


def test_every_example_is_short_and_names_its_file() -> None:
    assert set(PYTHON) == {
        "mypackage/rewards.py",
        "mypackage/tasks.py",
        "mypackage/environments.py",
        "mypackage/algorithms.py",
        "mypackage/engines.py",
        "mypackage/heads.py",
        "megatron_tlt/models/seed_oss.py",
    }
    assert all(len(code.splitlines()) <= 60 for code in PYTHON.values())


def test_the_launch_config_passes_the_checks_before_a_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    rollout = {**CONFIG["rollout"], "max_prompt_tokens": 128, "max_response_tokens": 512}
    path.write_text(yaml.safe_dump({**CONFIG, "model": {"recipe": {}}, "rollout": rollout}))
    config = load_checked(path, starts=False)
    assert (config.tasks, config.algorithm.name) == (TASKS, "mypackage.algorithms.Damped")
    assert config.drafter is not None and (config.drafter.lr, config.drafter.steps) == (1e-3, 3)
    bash = next(code for language, code in BLOCKS if language == "bash")
    overrides = [word for word in shlex.split(bash) if "=" in word]
    replayed = load_checked(path, overrides, starts=False)
    assert (replayed.rollout.engine, replayed.reshard.method, replayed.drafter) == ("replay", "none", None)


def test_the_tasks_problems_are_judged_by_the_rewards_in_the_pool() -> None:
    problems = build_sources(TASKS, "train", 0).problems(0, 40)
    assert {problem.verifier for problem in problems} == {"mypackage.rewards.close", "mypackage.rewards.short"}
    sums = [problem for problem in problems if problem.verifier.endswith("close")]
    assert sums[0].metadata["messages"][0] == {"role": "system", "content": "You are good at sums."}
    assert not {p.prompt for p in build_sources(TASKS, "held_out", 0).problems(0, 40)} & {p.prompt for p in problems}
    answer = int(sums[0].answer)
    responses = {f"it is {answer}": 1.0, f"{answer + 1}": 0.5, f"{answer + 2}": 0.0, "": 0.0, "no idea": 0.0}
    short = next(problem for problem in problems if problem.verifier.endswith("short"))
    with RewardPool(1, 20.0, verifiers_of(TASKS)) as pool:
        for text in responses:
            pool.submit(text, sums[0], text)
        pool.submit("short", short, "4")
        pool.submit("long", short, "4" * 20)
        rewards = pool.collect()
    assert {text: rewards[text].value for text in responses} == responses
    assert rewards[f"{answer + 1}"] == Reward(0.5, False, f"{answer + 1}")
    assert (rewards["short"], rewards["long"]) == (Reward(1.0, True), Reward(0.0, False))


def test_a_function_is_a_task_too() -> None:
    task = TaskConfig(kind="python", name="mypackage.tasks.doubled", params={"largest": 500})
    problems = build_sources([task], "train", 0).problems(0, 50)
    assert all(f"Double {int(problem.answer) // 2}." == problem.prompt for problem in problems)


def test_the_environments_pass_the_checks_and_answer_turns(tmp_path: Path) -> None:
    path = tmp_path / "turns.yaml"
    rollout = {"max_prompt_tokens": 128, "max_response_tokens": 512}
    path.write_text(yaml.safe_dump({**TURNS, "model": {"recipe": {}}, "rollout": rollout}))
    (task,) = load_checked(path, starts=False).tasks
    assert task.environment is not None and task.environment.name == "calculator"
    guess = EnvironmentConfig(name="mypackage.environments.Guess", params={"limit": 8})
    answers = []
    with EnvironmentPool(1, 20.0) as pool:
        key = pool.start(build_sources([task], "train", 0).problems(0, 1)[0], guess, seed=13)
        for turn in ("4", "6", "5"):
            pool.step(key, turn)
            while not (taken := pool.take(20.0)):
                pass
            answers += taken
    assert [answer.text for _, answer in answers] == ["too low", "too high", None]
    assert answers[-1][1].reward == Reward(1.0, True)
    (rows,) = LIBRARY["tasks"]
    assert rows["params"] == rows["environment"]["params"]
    assert load_object(rows["name"], "name", callable, "class", "a class") is VerifiersRows
    TaskConfig.model_validate(rows)


def test_the_algorithm_gives_credit_and_a_gradient() -> None:
    algorithm = build_algorithm(AlgorithmConfig(group_size=2, **CONFIG["algorithm"]))
    advantages = algorithm.assign_credit([1.0, 0.0], [2, 1])
    assert advantages == pytest.approx([1.0, -0.5], rel=1e-5)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    old = torch.full((2, 2), -1.5)
    inputs = LossInputs(mask, torch.tensor(advantages)[:, None].expand(2, 2), old, old, torch.ones(2, 2))
    log_probs = torch.full((2, 2), -1.0, requires_grad=True)
    loss = algorithm.loss()
    total, metrics = loss(log_probs, torch.zeros(2, 2), inputs)
    (total / loss.denominator(inputs)).backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-1.0, -1.0], [0.5, 0.0]]) / 3, rtol=1e-5, atol=0)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {"loss": 1.5, "drift": 1.5}, rel=1e-5
    )


def test_the_engine_records_what_a_replay_gives_and_drafts_with_the_kind(tmp_path: Path) -> None:
    from megatron_tlt.config.speculation import SpeculationConfig
    from megatron_tlt.drafter import drafter_from_target, save_drafter
    from megatron_tlt.rollout.engines import engine_class
    from megatron_tlt.rollout.replay import ReplayEngine
    from megatron_tlt.rollout.types import Request, SamplingSpec

    kind, folder = CONFIG["drafter"]["kind"], build_qwen2(tmp_path / "model", vocab_size=32, num_layers=4)
    head = drafter_from_target(folder, kind, seed=1)
    head.set_start(torch.full((head.entry_size,), 2.0), 1.0)
    hidden = head.feature_size // 3
    torch.testing.assert_close(head.fc.weight[:, hidden : 2 * hidden], torch.eye(hidden) / 6)
    save_drafter(head, tmp_path / "head")
    vllm = {"dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks_override": 16}
    rollout = RolloutConfig(max_prompt_tokens=8, max_response_tokens=16, vllm=vllm)
    drafting = SpeculationConfig(drafter=kind, path=tmp_path / "head", num_speculative_tokens=2)
    sampling = SamplingSpec(temperature=0.0, max_tokens=16)
    requests = [Request(f"0-{i}", (1, 2, 3 + i), sampling, seed=i, sample=i) for i in range(3)]
    recorder = engine_class(CONFIG["rollout"]["engine"])
    engine = recorder(folder, rollout, drafting, 7, folder=tmp_path)  # type: ignore[call-arg]
    responses = engine.generate(requests)
    engine.shutdown()
    assert sum(response.draft.num_draft_tokens for response in responses) > 0
    assert all(greedy(load_qwen2(folder), r.prompt_token_ids, r.token_ids) == list(r.token_ids) for r in responses)
    replay = ReplayEngine(folder, rollout, SpeculationConfig(enabled=False), 7, path=str(tmp_path / "rank0.jsonl"))
    found = replay.generate(requests)
    assert [(list(r.token_ids), list(r.log_probs)) for r in found] == [
        (list(r.token_ids), list(r.log_probs)) for r in responses
    ]


def test_the_family_has_the_weights_that_transformers_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(PYTHON["megatron_tlt/models/seed_oss.py"], names)
    monkeypatch.setitem(families.FAMILIES, "seed_oss", names["FAMILY"])
    AutoModelForCausalLM.from_config(family_config("seed_oss", head_dim=32)).save_pretrained(tmp_path)
    config = read_architecture(tmp_path / "config.json", "seed_oss")
    SafetensorsFolder(tmp_path, "np").check(WeightMap(config))
    assert WeightMap(config).shapes["model.layers.0.self_attn.q_proj.bias"] == (128,)
