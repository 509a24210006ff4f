"""A resolver finds versions for the whole GPU stack, from the index that users have; only metadata is downloaded.

uv takes seconds where ``pip install --dry-run`` takes minutes; both follow the same rules for pins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
GPU = ("base.txt", "gpu.txt")
LOCKS = ("cpu.txt", "dev.txt", "triton.txt", "verifiers.txt")  # installed with --no-deps
NO_NETWORK = ("error sending request", "dns error", "Connection refused", "timed out")

pytestmark = pytest.mark.slow


def resolve(
    folder: Path, python: str, replace: dict[str, str], files: Sequence[str] = GPU, *more: str
) -> tuple[str, dict[str, str]]:
    """What uv says of an error, and name to version of everything that would be installed on 64-bit Linux."""
    lines = [line for name in files for line in (REQUIREMENTS / name).read_text(encoding="utf-8").splitlines()]
    pins = [line for line in lines if line and line[0] != "#"]
    wanted = folder / "requirements.in"
    wanted.write_text("\n".join(replace.get(pin.partition("==")[0], pin) for pin in pins))
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-config", *more]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", str(wanted)]
    certificates = {"SSL_CERT_FILE": os.environ["PIP_CERT"]} if "PIP_CERT" in os.environ else {}
    index = {"UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {}
    done = subprocess.run(
        command, env={**os.environ, **certificates, **index}, capture_output=True, text=True, timeout=500
    )
    if done.returncode and any(sign in done.stderr for sign in NO_NETWORK):
        pytest.skip(f"no package index can be reached: {done.stderr.splitlines()[-1]}")
    if done.returncode:
        return done.stderr, {}
    pairs = (line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return "", {name.lower(): version.split()[0] for name, version in pairs}


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_gpu_stack_resolves(python: str, tmp_path: Path) -> None:
    error, found = resolve(tmp_path, python, {})
    assert error == ""
    assert {"torch", "vllm", "megatron-core", "numba", "nvidia-nccl-cu13"} <= found.keys()


@pytest.mark.parametrize("file", LOCKS)
def test_every_locked_package_is_for_the_first_release_of_python_3_11_too(file: str, tmp_path: Path) -> None:
    """Debian 12 has 3.11.2; soupsieve 4.1.3 wants 3.11.5."""
    error, found = resolve(tmp_path, "3.11.0", {}, [file], "--no-deps")
    assert error == "" and found
    if file == "dev.txt":
        error, _ = resolve(tmp_path, "3.11.0", {"soupsieve": "soupsieve==4.1.3"}, [file], "--no-deps")
        assert "soupsieve==4.1.3" in error and "3.11.5" in error


def test_pins_that_contradict_each_other_are_found(tmp_path: Path) -> None:
    """numba 0.61 refuses numpy 2.3; numba compiles the n-gram and suffix drafters."""
    error, _ = resolve(tmp_path, "3.12", {"numba": "numba==0.61.0"})
    assert "No solution found" in error and "numba==0.61.0" in error, error
