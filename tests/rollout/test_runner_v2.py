"""Drafting in vLLM's second model runner: lossless, under changing strategies, on a CPU by Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.shipped import LAUNCH
from megatron_tlt.config.speculation import SkippedConfig, SpeculationConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.vllm_runner_v2 import (
    _AUX_STATES,
    _LAST_STATES,
    _NUM_REJECTED,
    _NUM_SAMPLED,
    AsynchronousSwitch,
)
from megatron_tlt.speculation.strategy import Strategy
from tests.helpers.eagle_heads import build_eagle_head
from tests.helpers.launch import REPOSITORY, run_python
from tests.helpers.statistics import chi_squared_p_value
from tests.helpers.triton_interpreter import TRITON

from .workers.runner_v2_cases import ROLLOUT as ROLLOUT_V2
from .workers.runner_v2_cases import greedy_requests, stats

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine

WORKER = Path(__file__).parent / "workers" / "runner_v2.py"
HEADS_WORKER, ASYNC_WORKER = WORKER.with_name("heads_v2.py"), WORKER.with_name("async_v2.py")


@pytest.fixture(scope="module")
def found(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    need_triton()
    out = tmp_path_factory.mktemp("v2") / "found.json"
    run_python(WORKER, [str(TRITON), str(model_folder), str(out)], timeout_s=500, fresh=True)
    results: dict[str, Any] = json.loads(out.read_text())
    return results


@pytest.mark.slow(200)
def test_greedy_responses_are_the_models_own_under_every_strategy(found: dict[str, Any]) -> None:
    assert found["reference"]
    for name in ("off", "ngram-3", "suffix-2", "ngram-1"):
        assert found[name]["same"], name
    assert found["off"]["drafted"] == 0
    assert 0 < found["ngram-3"]["accepted"] < found["ngram-3"]["drafted"], "some right, some wrong"
    assert found["suffix-2"]["accepted"] > 0


@pytest.mark.slow(200)
def test_the_strategy_changes_between_steps(found: dict[str, Any]) -> None:
    changed = found["changed"]
    assert changed["same"] and changed["accepted"] > 0
    assert changed["strategies"] == ["ngram-1", "ngram-3", "off", "suffix-2"]


@pytest.mark.slow(200)
@pytest.mark.parametrize("strategy", ["ngram-2", "off"])
def test_samples_have_the_exact_marginals_and_depend_on_their_seeds(found: dict[str, Any], strategy: str) -> None:
    sampled = found[f"sampled {strategy}"]
    for counts, exact in zip(sampled["counts"], sampled["exact"], strict=True):
        assert chi_squared_p_value(torch.tensor(counts), torch.tensor(exact, dtype=torch.float64)) > 1e-4
    assert (sampled["accepted"] > 30) == (strategy != "off")
    assert found["repeats"]


@pytest.mark.slow(200)
def test_a_step_reads_its_tokens_and_nothing_else(found: dict[str, Any]) -> None:
    """One copy of them to the host, and its conversion."""
    reads = found["host reads"]
    assert len(reads) == 6 and all(each == {"vllm_runner_v2.py:_sampled": 2} for each in reads.values()), reads


def need_triton() -> None:
    if not (TRITON / "triton").is_dir():
        pytest.skip(f"no triton in {TRITON}: tests/run.sh --all installs it")


def assert_states_are_the_targets(recorded: list[Any], reference: Qwen2ForCausalLM) -> None:
    assert len(recorded) == 3
    for _, token_ids, last_states in recorded:
        with torch.no_grad():
            states = reference.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
        assert torch.tensor(last_states) == pytest.approx(states, abs=2e-2, rel=2e-2)


HEADS = [("eagle", None, "greedy"), ("eagle3", 20, "probabilistic")]


@pytest.fixture(scope="module", params=HEADS, ids=lambda each: "-".join(str(part) for part in each if part))
def by_head(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A drafter model, and what the worker found with it."""
    need_triton()
    kind, drafted, method = request.param
    folder = tmp_path_factory.mktemp("heads")
    head = build_eagle_head(kind, model_folder, folder / kind, drafted=drafted)
    out = folder / "found.json"
    run_python(HEADS_WORKER, [str(TRITON), str(model_folder), str(head), method, str(out)], timeout_s=550, fresh=True)
    return head, json.loads(out.read_text())


@pytest.mark.slow(300)
def test_a_heads_responses_are_the_models_own_under_every_strategy(by_head: tuple[Path, dict[str, Any]]) -> None:
    head, found = by_head
    assert found["reference"] and found["off"]["drafted"] == 0
    for name in ("off", f"{head.name}-3", f"{head.name}-1", f"suffix+{head.name}-3", f"{head.name}-3-p50", "changed"):
        assert found[name]["same"], name
    assert 0 < found[f"{head.name}-3-p50"]["drafted"] < found[f"{head.name}-3"]["drafted"], (
        "unlikely drafts are left out"
    )
    assert found[f"suffix+{head.name}-3"]["accepted"] > found[f"{head.name}-3"]["accepted"], "trees draft in the pair"
    assert len(found["changed"]["strategies"]) > 2


@pytest.mark.slow(300)
def test_a_head_drafts_what_it_drafts_in_the_first_runner(
    by_head: tuple[Path, dict[str, Any]], model_folder: Path, plain_engine: VllmEngine
) -> None:
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    head, found = by_head
    rollout = ROLLOUT_V2.model_copy(update={"model_runner": "v1"})
    speculation = SpeculationConfig(drafter=head.name, path=head, num_speculative_tokens=3)
    engine = VllmEngine(model_folder, rollout, speculation, 7)
    for strategy in (Strategy(head.name, 3), Strategy(head.name, 1), Strategy(head.name, 3, least_percent=50)):
        engine.set_strategy(strategy)
        known = stats(engine.generate(greedy_requests(8)))
        assert known == {key: found[strategy.name][key] for key in known}, strategy.name
    assert found["weights"] == sorted(held[0] for held in engine.read_drafter_weights())
    engine.shutdown()


@pytest.mark.slow(300)
def test_a_heads_samples_have_the_exact_marginals(by_head: tuple[Path, dict[str, Any]]) -> None:
    head, found = by_head
    sampled = {name: case for name, case in found.items() if name.startswith("sampled")}
    assert bool(sampled) == (head.name == "eagle3")
    for name, case in sampled.items():
        assert case["accepted"] > 10, name
        for counts, exact in zip(case["counts"], case["exact"], strict=True):
            assert chi_squared_p_value(torch.tensor(counts), torch.tensor(exact, dtype=torch.float64)) > 1e-4, name


@pytest.mark.slow(300)
def test_the_targets_states_are_recorded_under_changing_strategies(
    by_head: tuple[Path, dict[str, Any]], reference: Qwen2ForCausalLM
) -> None:
    _, found = by_head
    assert_states_are_the_targets(found["recorded"], reference)


@pytest.mark.slow(200)
def test_steps_scheduled_ahead_change_nothing_but_their_order(
    model_folder: Path, reference: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    need_triton()
    head = build_eagle_head("eagle3", model_folder, tmp_path / "eagle3")
    out = tmp_path / "found.json"
    run_python(ASYNC_WORKER, [str(TRITON), str(model_folder), str(head), str(out)], timeout_s=500, fresh=True)
    found = json.loads(out.read_text())
    assert found["reference"] and found["off"]["drafted"] == 0
    assert all(found[name]["same"] for name in ("off", "eagle3-3", "eagle3-1", "changed"))
    changed = found["changed"]
    assert changed["consistent"] and changed["strategies"] == ["eagle3-1", "eagle3-3", "off"]
    assert changed["drafts"]["off"] == 0 < min(changed["drafts"][name] for name in ("eagle3-1", "eagle3-3"))
    assert changed["tokens"] == 6 * 16, "each step's tokens are in one record"
    assert_states_are_the_targets(found["recorded"], reference)
    reads = found["host reads"]
    for name, each in reads.items():  # numbers of a step that arrived long ago
        assert each == ({"recorded_states.py:_receive": 1} if name.endswith("True") else {}), reads
    assert sorted(found["aborted"]) == ["g0 length", "g1", "g1 abort", "g2 length", "g3 length"]
    assert "all requests have the same number of drafts" in found["refused"]
    assert "vLLM turns it off on this platform" in found["turned off"]


def test_what_it_cannot_do_is_refused_when_the_config_is_read() -> None:
    path = LAUNCH / "quickstart-cpu.yaml"
    cases = {
        ("rollout.cuda_graphs=full",): "rollout.model_runner: found v2; .* rollout.cuda_graphs: allowed: auto",
        ("rollout.random_numbers=generator",): "found v2; .* rollout.random_numbers: allowed: auto or counter",
        ("rollout.async_scheduling=true",): "speculation.adaptive.strategies: found none, .* allowed: a list of off",
        (
            "rollout.async_scheduling=true",
            "speculation.adaptive.strategies=[off, suffix-2, eagle3-3-p50, eagle3-3]",
        ): r"found \['suffix-2', 'eagle3-3-p50'\]; allowed: a list of off and eagle3-1 to eagle3-",
        (
            "rollout.async_scheduling=true",
            "speculation={enabled: true, drafter: suffix, num_speculative_tokens: 4}",
            "drafter=null",
            "spot=null",
        ): "speculation.drafter suffix needs the tokens of the step before; allowed: a drafter model",
        (
            "rollout.async_scheduling=true",
            "speculation.adaptive.lengths=classes",
        ): "speculation.adaptive.lengths: found classes; .* allowed: null",
    }
    for overrides, said in cases.items():
        with pytest.raises(ConfigError, match=said):
            load_config(path, ["rollout.model_runner=v2", *overrides], check_libraries=False)
    with pytest.raises(ConfigError, match=r"async_scheduling: found true; rollout.model_runner: found v1; allowed: v2"):
        load_config(path, ["rollout.async_scheduling=true"], check_libraries=False)
    heads = ("rollout.async_scheduling=true", "speculation.adaptive.strategies=[off, eagle3-1, eagle3-3]")
    load_config(path, ["rollout.model_runner=v2", *heads], check_libraries=False)
    load_config(path, ["rollout.model_runner=v2"], check_libraries=False)


def test_drafts_scheduled_ahead_need_a_schedule_of_their_lengths() -> None:
    """Without one the scheduler reserves the most drafts, and vLLM reads embeddings of those that nobody made."""
    speculator = SimpleNamespace(propose=None)
    runner = SimpleNamespace(max_num_reqs=4, device=torch.device("cpu"), req_states=None, speculator=speculator)
    switch = AsynchronousSwitch(runner, 3, None, {}, SkippedConfig())
    with pytest.raises(ConfigError, match="scheduler has no schedule of draft lengths; allowed: false"):
        switch.follow(SimpleNamespace(dynamic_sd_lookup=None, schedule=None))
    scheduler = SimpleNamespace(dynamic_sd_lookup=[3] * 5, schedule=None)
    switch.follow(scheduler)
    assert scheduler.dynamic_sd_lookup == [0] * 5, "off until a strategy is set"


def test_a_head_whose_layers_it_would_not_read_is_refused(model_folder: Path, tmp_path: Path) -> None:
    from megatron_tlt.rollout.vllm_setup import speculative_config

    head = build_eagle_head("eagle3", model_folder, tmp_path / "eagle3")
    speculation = SpeculationConfig(drafter="eagle3", path=head, draft_sample_method="probabilistic")
    built = speculative_config(speculation, "v2")
    assert built is not None and built["method"] == "eagle3" and built["draft_sample_method"] == "probabilistic"
    config = json.loads((head / "config.json").read_text())
    layers = config.pop("eagle_aux_hidden_state_layer_ids")
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    (head / "config.json").write_text(json.dumps(config))
    assert speculative_config(speculation, "v1") is not None
    with pytest.raises(ConfigError, match=r"config.json: eagle_aux_hidden_state_layer_ids.*beside eagle_config"):
        speculative_config(speculation, "v2")


def test_both_releases_pass_what_the_switch_reads_in_the_same_places() -> None:
    locks = sorted((REPOSITORY / "tests" / "interface").glob("vllm-*.json"))
    assert len(locks) == 2
    places = (_LAST_STATES, _AUX_STATES, _NUM_SAMPLED, _NUM_REJECTED)
    for lock in locks:
        entry = json.loads(lock.read_text())["vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.propose"]
        found = [entry["parameters"][2:][place] for place in places]
        assert found == ["last_hidden_states", "aux_hidden_states", "num_sampled", "num_rejected"], lock.name
