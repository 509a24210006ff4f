"""What we use of vLLM exists in every supported release, and the installed sources are those that were locked."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

from megatron_tlt.platform.versions import REQUIREMENTS, installed_version
from megatron_tlt.rollout.vllm_versions import CPU_ATTRIBUTES, REPLACED, REQUIRED_ATTRIBUTES
from tools.interface_lock import FOLDER, differences, lock, main

RELEASES = sorted(FOLDER.glob("vllm-*.json"))
VLLM = next(requirement for requirement in REQUIREMENTS if requirement.name == "vllm")


def installed_root() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def test_every_supported_release_is_locked() -> None:
    for series in VLLM.series:
        assert any(path.stem.removeprefix("vllm-").startswith(series) for path in RELEASES), series


@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.stem)
def test_what_we_use_is_in_the_release(path: Path) -> None:
    locked = json.loads(path.read_text())
    wanted = {f"{module}:{name}" for module, name in (*REQUIRED_ATTRIBUTES, *REPLACED)}
    assert wanted <= locked.keys(), "run tools/interface_lock.py for this release again"
    assert [name for name in sorted(wanted) if locked[name] is None] == []


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
    ],
    ids=["renamed", "other parameters", "other body", "renamed in a base class"],
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
