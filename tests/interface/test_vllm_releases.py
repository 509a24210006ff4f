"""What we use of vLLM exists in every supported release, and the installed sources are those that were locked."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.platform.versions import REQUIREMENTS, installed_version
from megatron_tlt.rollout.vllm_graphs import REQUIRED_GRAPH_ATTRIBUTES
from megatron_tlt.rollout.vllm_setup import engine_args, prepare_environment
from megatron_tlt.rollout.vllm_versions import CPU_ATTRIBUTES, REPLACED, REQUIRED_ATTRIBUTES
from tools.interface_lock import FOLDER, differences, lock, main
from tools.interface_uses import Part, uses_of

RELEASES = sorted(FOLDER.glob("vllm-*.json"))
VLLM = next(requirement for requirement in REQUIREMENTS if requirement.name == "vllm")


def installed_root() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def test_every_supported_release_is_locked() -> None:
    for series in VLLM.series:
        assert any(path.stem.removeprefix("vllm-").startswith(series) for path in RELEASES), series


def optional(part: Part) -> bool:
    """Whether a release may lack the part: it is for CPUs, or for plans of graphs."""
    name = ".".join(part)
    return any(f"{name}.".startswith(f"{module}.") for module, _ in (*CPU_ATTRIBUTES, *REQUIRED_GRAPH_ATTRIBUTES))


@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.stem)
def test_what_we_use_is_in_the_release(path: Path) -> None:
    locked = json.loads(path.read_text())
    listed = {*REQUIRED_ATTRIBUTES, *REPLACED}
    wanted = {*listed, *CPU_ATTRIBUTES, *REQUIRED_GRAPH_ATTRIBUTES, *uses_of().parts}
    assert {":".join(part) for part in wanted} == locked.keys(), "run tools/interface_lock.py for this release again"
    absent = {part for part in wanted if locked[":".join(part)] is None}
    assert sorted(part for part in absent if part in listed or not optional(part)) == []
    if path == RELEASES[-1]:
        assert absent == set()


@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.stem)
def test_the_keywords_of_our_calls_are_the_releases(path: Path) -> None:
    locked = json.loads(path.read_text())
    calls = uses_of().calls
    assert len(calls) > 4
    assert [call for call in calls if (entry := locked[":".join(call.part)]) and unknown(call.keywords, entry)] == []


def unknown(keywords: Iterable[str], entry: dict[str, Any]) -> set[str]:
    """The keywords that a locked function or class does not take."""
    taken = entry["parameters"]
    return (
        set() if any(name.startswith("**") for name in taken) else set(keywords) - {name.strip("=") for name in taken}
    )


@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.stem)
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("drafter", ["off", "ngram", "eagle3"])
def test_the_release_takes_our_engines_arguments(
    path: Path, runner: Any, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_environment()
    from vllm.platforms import current_platform

    (tmp_path / "config.json").write_text("{}")
    head = tmp_path if drafter == "eagle3" else None
    speculation = (
        SpeculationConfig(enabled=False) if drafter == "off" else SpeculationConfig(drafter=drafter, path=head)
    )
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    found = engine_args(tmp_path, RolloutConfig(model_runner=runner), speculation, seed=1)
    locked = json.loads(path.read_text())
    assert not unknown(found, locked["vllm.engine.arg_utils:EngineArgs"])
    assert not unknown(found["speculative_config"] or (), locked["vllm.config.speculative:SpeculativeConfig"])
    assert not unknown(found.get("compilation_config", ()), locked["vllm.config.compilation:CompilationConfig"])


def test_imports_attributes_and_calls_are_found(tmp_path: Path) -> None:
    (tmp_path / "vllm_engine.py").write_text(
        """
from vllm.outputs import Output as Given
from vllm.v1 import core
def f(runner, model_runner):
    runner.speculator.propose(count=1)
    core.clean(now=True)
    model_runner.other
    runner.maybe if hasattr(runner, "maybe") else runner.input_batch.num_tokens
    return Given(ids=[], **runner.more)
"""
    )
    found = uses_of(tmp_path)
    runner = "GPUModelRunner.{}".format
    second = "vllm.v1.worker.gpu.model_runner"
    assert {("vllm.outputs", "Output"), ("vllm.v1", "core"), ("vllm.v1", "core.clean")} <= found.parts
    assert {(second, runner("speculator")), (second, runner("more"))} <= found.parts
    assert ("vllm.v1.worker.gpu.spec_decode.eagle.speculator", "EagleSpeculator.propose") in found.parts
    assert ("vllm.v1.worker.gpu_input_batch", "InputBatch.num_tokens") in found.parts
    assert not any(attribute.endswith(("maybe", "other")) for _, attribute in found.parts)
    assert {(call.part[1], call.keywords) for call in found.calls} == {
        ("EagleSpeculator.propose", ("count",)),
        ("core.clean", ("now",)),
        ("Output", ("ids",)),
    }


def test_the_installed_sources_are_the_locked_ones() -> None:
    version = (installed_version(VLLM.distributions) or "").partition("+")[0]
    locked = json.loads((FOLDER / f"vllm-{version}.json").read_text())
    assert differences(locked, lock(installed_root())) == []
    assert all(locked[f"{module}:{name}"] is not None for module, name in CPU_ATTRIBUTES)


@pytest.mark.parametrize(
    ("file", "before", "after", "named"),
    [
        ("v1/worker/gpu_model_runner.py", "def take_draft_token_ids(", "def take_drafts(", "take_draft_token_ids"),
        (
            "v1/worker/gpu_model_runner.py",
            "def _sample(\n        self,",
            "def _sample(\n        self, more,",
            "_sample",
        ),
        (
            "v1/worker/gpu_worker.py",
            "def sleep(self, level: int = 1) -> None:\n",
            "\\g<0>        level += 1\n",
            "sleep",
        ),
        ("v1/spec_decode/llm_base_proposer.py", "def propose(", "def propose_tokens(", "EagleProposer.propose"),
        ("v1/outputs.py", "    draft_token_ids: list", "    drafts: list", "DraftTokenIds"),
        ("v1/worker/gpu/states.py", "self.all_token_ids = ", "self.token_ids = ", "RequestState.all_token_ids"),
        (
            "v1/worker/gpu/cudagraph_utils.py",
            "    def _init_candidates(self) -> None:\n",
            "\\g<0>        self.more = 1\n",
            "CudaGraphManager._init_candidates",
        ),
    ],
    ids=["renamed", "parameters", "body", "in a base class", "field", "attribute", "a graph manager's body"],
)
def test_a_change_of_the_release_is_found(tmp_path: Path, file: str, before: str, after: str, named: str) -> None:
    text = (installed_root() / "vllm" / file).read_text()
    assert before in text
    path = tmp_path / "vllm" / file
    path.parent.mkdir(parents=True)
    path.write_text(text.replace(before, after.replace("\\g<0>", before), 1))
    found = differences(lock(installed_root()), lock(tmp_path, installed_root()))
    assert found and all(named in line for line in found)


def test_a_wheel_is_locked_and_a_broken_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.interface_lock.FOLDER", tmp_path / "locks")
    wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "from .sampling_params import *\n")
        archive.writestr("vllm/sampling_params.py", "class SamplingParams:\n    n: int = 1\n    seed: int = 0\n")
    assert main(["9.9.9", "--wheel", str(wheel)]) == 0
    locked = json.loads((tmp_path / "locks" / "vllm-9.9.9.json").read_text())
    assert locked["vllm:SamplingParams"] == {
        "in": "vllm.sampling_params",
        "kind": "ClassDef",
        "parameters": ["n", "seed"],
    }
    assert locked["vllm.engine.arg_utils:EngineArgs"] is None
    wheel.write_bytes(b"no archive")
    assert main(["9.9.9", "--wheel", str(wheel)]) == 2
    assert "not a zip file" in capsys.readouterr().err
