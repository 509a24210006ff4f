"""What went wrong is on the terminal, once, in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_tlt.cli import main
from tests.config.test_loader import write

ROOT = Path(__file__).resolve().parents[2]


def tlt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "megatron_tlt", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("command", ["eval", "train"])
def test_a_run_folder_that_cannot_be_written_is_one_line(command: str, tmp_path: Path) -> None:
    done = tlt(command, str(write(tmp_path)), "run.dir=/proc/foo", "actor.transformer_impl=local", cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: run.dir: cannot write /proc/foo/")


def test_a_result_that_cannot_be_written_is_refused_before_the_evaluation(tmp_path: Path) -> None:
    config = str(write(tmp_path, actor={"transformer_impl": "local"}))
    for place in ("/proc/foo/out.json", str(tmp_path)):
        done = tlt("eval", config, "run.dir=run", "--json", place, cwd=tmp_path)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
        assert done.returncode == 2 and len(lines) == 1 and f"error: --json: cannot write {place}; " in lines[0]
    assert not (tmp_path / "run").exists()


def test_an_evaluation_never_writes_over_what_the_run_writes(tmp_path: Path) -> None:
    config, own = str(write(tmp_path, actor={"transformer_impl": "local"})), tmp_path / "run" / "samples.jsonl"
    own.parent.mkdir()
    own.write_text("a live run's\n")
    done = tlt("eval", config, "run.dir=run", "--samples", "run/samples.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "error: --samples: run/samples.jsonl belongs to the run; " in done.stderr
    done = tlt("eval", config, "run.dir=run", "observe.samples_per_task=0", "--samples", "mine.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "error: --samples: observe.samples_per_task is 0; " in done.stderr
    assert own.read_text() == "a live run's\n" and not (tmp_path / "mine.jsonl").exists()


def test_a_folder_without_a_run_gets_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: RUN_DIR: {tmp_path} holds no run; allowed: a folder with one of")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_short_rounds_are_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, actor={"transformer_impl": "local"}, tail={})
    assert main(["rollout", str(config), "--out", str(tmp_path / "out"), f"run.dir={tmp_path / 'run'}"]) == 2
    said = "error: tail: found a section, with which responses are ended early; allowed for tlt rollout: tail=null\n"
    assert capsys.readouterr().err.endswith(said) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("after_s", [1.0, 3.0, 6.0])
def test_ctrl_c_at_the_start_is_one_line_and_status_130(after_s: float, tmp_path: Path) -> None:
    """Whatever is imported or started at that moment; SIGINT goes to the whole group, as a terminal sends it."""
    arguments = [str(write(tmp_path, actor={"transformer_impl": "local"})), "run.dir=run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_tlt", "train", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=120)
    lines = [line for line in error.splitlines() if not line.startswith("note: ")]
    assert process.returncode == 130 and len(lines) == 1 and lines[0].startswith("error: "), error


TABLES = (
    "plan llama-3.3-70b-16n8g",
    "plan llama-3.3-70b-16n8g --search",
    "plan qwen3-30b-a3b-4n8g --search",
    "plan qwen2.5-32b-8n8g --reshard",
    "simulate qwen2.5-7b-1n8g --steps 1 --seeds 2",
)


@pytest.mark.parametrize("command", TABLES)
def test_tables_fit_80_columns_and_cut_nothing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    figures = tmp_path / "figures.json"
    assert main([*command.split(), "--json", str(figures)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    words = {word for line in lines for word in line.split()}
    for row in json.loads(figures.read_text()).get("best", ()):
        assert row["actor"] in words and row["engines"] in words and f"{row['seconds']['total']:.1f}" in words
    if command.startswith("simulate"):
        assert {"rollout", "probs", "adaptive"} <= words


def test_a_shell_completes_commands_options_configs_and_files(tmp_path: Path) -> None:
    script = tlt("completion", "bash", cwd=tmp_path)
    assert script.returncode == 0, script.stderr
    (tmp_path / "complete.sh").write_text(script.stdout)
    (tmp_path / "own.yaml").touch()
    for words, expected in (
        ("pl", "plan"),
        ("plan qwen2.5-32b", "qwen2.5-32b-4n8g qwen2.5-32b-8n8g"),
        ("plan ow", "own.yaml"),
        ("plan own.yaml --sea", "--search"),
    ):
        typed = f"COMP_WORDS=(tlt {words}); COMP_CWORD={len(words.split())}"
        done = subprocess.run(
            ["bash", "-c", f'source complete.sh; {typed}; _shtab_tlt; echo "${{COMPREPLY[@]}}"'],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected, done.stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m megatron_tlt config --docs algorithm | true"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert not done.stderr


def test_the_version_needs_no_library(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-S", "-m", "megatron_tlt", "--version"]  # without site-packages
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("tlt "), done.stderr


def test_a_missing_argument_is_named_alone_and_no_command_shows_the_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan"])
    assert capsys.readouterr().err.endswith("the following arguments are required: CONFIG\n")
    assert main([]) == 2 and "write a launch config" in capsys.readouterr().err
