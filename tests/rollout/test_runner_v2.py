"""Drafting in vLLM's second model runner: lossless, under changing strategies, on a CPU by Triton's interpreter."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.shipped import LAUNCH
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.vllm_runner_v2 import _NUM_SAMPLED
from tests.helpers.launch import REPOSITORY, run_python
from tests.helpers.statistics import chi_squared_p_value

WORKER = Path(__file__).parent / "workers" / "runner_v2.py"
TRITON = Path(os.environ.get("TLT_TRITON", REPOSITORY / ".venv" / "triton"))
"""A folder with the package triton, which tests/run.sh --all installs. In .venv itself other tests would see it."""


@pytest.fixture(scope="module")
def found(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not (TRITON / "triton").is_dir():
        pytest.skip(f"no triton in {TRITON}: tests/run.sh --all installs it")
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


def test_what_it_cannot_do_is_refused_when_the_config_is_read() -> None:
    path = LAUNCH / "quickstart-cpu.yaml"
    cases = {
        (
            "speculation={enabled: true, drafter: eagle3}",
            "drafter=null",
            "spot=null",
        ): "speculation.drafter eagle3 needs v1",
        (): "a trained drafter (drafter) needs v1",
        ("rollout.cuda_graphs=full",): "rollout.cuda_graphs: allowed: auto",
        ("rollout.random_numbers=generator",): "rollout.random_numbers: allowed: auto or counter",
    }
    for overrides, said in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_config(path, ["rollout.model_runner=v2", *overrides], check_libraries=False)
        assert "rollout.model_runner: found v2; " in str(caught.value) and said in str(caught.value)
    fine = ("drafter=null", "spot=null", "speculation={enabled: true, drafter: suffix, num_speculative_tokens: 4}")
    load_config(path, ["rollout.model_runner=v2", *fine], check_libraries=False)


def test_both_releases_pass_the_numbers_of_sampled_tokens_in_the_same_place() -> None:
    locks = sorted((REPOSITORY / "tests" / "interface").glob("vllm-*.json"))
    assert len(locks) == 2
    for lock in locks:
        entry = json.loads(lock.read_text())["vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.propose"]
        assert entry["parameters"][2:][_NUM_SAMPLED] == "num_sampled", lock.name
