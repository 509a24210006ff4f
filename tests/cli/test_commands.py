"""``tlt`` as a user calls it: exit status, one-line errors, what --fresh and a resumed run do to a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tlt.cli import main, runs
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError
from tests.config.test_loader import write


def tlt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_tlt", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_config_errors_are_lines_on_stderr_with_status_2(tmp_path: Path) -> None:
    done = tlt("train", str(write(tmp_path)), "trainer.stps=3", "rollout.vllm.modle=x", "trainer.steps=0", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert [line.startswith("error: ") for line in done.stderr.splitlines()] == [True, True]
    assert not (tmp_path / "runs").exists()


def test_traceback_only_when_asked(tmp_path: Path) -> None:
    assert "Traceback" not in tlt("train", "none.yaml", cwd=tmp_path).stderr
    assert "Traceback" in tlt("train", "none.yaml", "--traceback", cwd=tmp_path).stderr


def test_options_may_stand_between_the_overrides(tmp_path: Path) -> None:
    done = tlt("train", str(write(tmp_path)), "--fresh", "trainer.stps=3", cwd=tmp_path)
    assert done.returncode == 2 and "trainer.stps: unknown key" in done.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["bench", "nothing"], ["bench", "speculation", "--json", "F", "--fly"], ["train"]]
)
def test_usage_errors_are_status_2(arguments: list[str], tmp_path: Path) -> None:
    done = tlt(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and "usage: tlt" in done.stderr


def test_help_of_a_benchmark_shows_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "faults", "--help"]) == 0
    assert "--faults-per-run" in capsys.readouterr().out
    assert main(["bench", "--help"]) == 0
    assert "drafter-packing" in capsys.readouterr().out


def test_report_of_no_folder_is_a_run_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "none" in error and error.count("\n") == 1


def test_another_config_in_the_same_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def config(*overrides: str):  # type: ignore[no-untyped-def]
        return load_config(write(tmp_path), ["run.dir=runs/x", *overrides], check_libraries=False)

    runs.write_resolved(config())
    runs.write_resolved(config("trainer.steps=7"))
    with pytest.raises(ConfigError, match=r"run\.seed: 0 -> 4"):
        runs.write_resolved(config("run.seed=4"))


def test_fresh_removes_only_what_a_run_wrote(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "mine.txt").touch()
    runs.clear_run(tmp_path)
    assert (tmp_path / "checkpoints").exists(), "a folder that holds no run is left alone"
    (tmp_path / runs.RESOLVED).touch()
    runs.clear_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
