"""pip finds versions for the whole GPU stack, as on a user's machine; nothing is downloaded but metadata."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
FILES = ("base.txt", "gpu.txt")
SOURCES_ONLY = ("reasoning_gym", "math-verify")
"""Packages with dependencies that have no wheel; pip builds them, which it can for its own Python only."""
NO_NETWORK = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "Max retries exceeded")

pytestmark = pytest.mark.slow


def resolve(folder: Path, python: str, replace: dict[str, str]) -> tuple[str, dict[str, str]]:
    """What pip says of an error, and name to version of everything that it would install.

    This machine's settings of pip (local wheels, constraints) do not apply.
    """
    native = python == f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [line for name in FILES for line in (REQUIREMENTS / name).read_text(encoding="utf-8").splitlines()]
    pins = [line for line in lines if line and line[0] != "#" and (native or not line.startswith(SOURCES_ONLY))]
    wanted = folder / "requirements.txt"
    wanted.write_text("\n".join(replace.get(pin.partition("==")[0], pin) for pin in pins))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q"]
    if not native:
        command += ["--python-version", python, "--only-binary=:all:", "--target", str(folder)]
    report = folder / "report.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {name: os.environ[name] for name in ("PIP_CERT", "PIP_INDEX_URL") if name in os.environ}
    done = subprocess.run(
        [*command, "--report", str(report), "-r", str(wanted)],
        env=environment | {"PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=500,
    )
    if done.returncode and any(sign in done.stderr for sign in NO_NETWORK):
        pytest.skip(f"no package index can be reached: {done.stderr.splitlines()[-1]}")
    if done.returncode:
        return done.stderr, {}
    found = json.loads(report.read_text())["install"]
    return "", {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in found}


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_gpu_stack_resolves(python: str, tmp_path: Path) -> None:
    error, found = resolve(tmp_path, python, {})
    assert error == ""
    assert {"torch", "vllm", "megatron-core", "numba", "nvidia-nccl-cu13"} <= found.keys()


def test_pins_that_contradict_each_other_are_found(tmp_path: Path) -> None:
    """numba 0.61 refuses numpy 2.3; numba compiles the n-gram and suffix drafters."""
    error, _ = resolve(tmp_path, "3.12", {"numba": "numba==0.61.0"})
    assert "ResolutionImpossible" in error or "conflict" in error, error
