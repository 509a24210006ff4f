"""The campaign of faults: parts of a run keep their promises, and one that does not is found."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench import faults
from megatron_tlt.bench.fault_parts import storage
from megatron_tlt.bench.fault_parts.components import in_turn, parts, trials
from megatron_tlt.bench.fault_parts.trial import Broken
from megatron_tlt.errors import ConfigError, RunError


def arguments(folder: Path, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    faults.add_arguments(parser)
    return parser.parse_args(["--folder", str(folder), *given])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_faults_of_parts(tmp_path: Path) -> None:
    given = arguments(tmp_path, "--components", "100", "--runs", "0", "--faults-per-run", "0")
    result = faults.run(given)
    impossible = {row["fault"] for row in result.rows if row["faults"] == 0}
    assert impossible <= {"full disk", "read-only disk"}, result.rows
    broken = [row for row in result.rows if row["broken"] or row["hung"]]
    assert broken == []
    assert faults.run(given).rows == result.rows, "what has run is not run again"
    with pytest.raises(ConfigError, match="allowed: the same, or another --folder"):
        faults.run(arguments(tmp_path, "--seed", "5"))


class InPlace:
    """Writes a file over itself, so that every fault tears it."""

    name, copies = "in place", 2

    def __init__(self, folder: Path) -> None:
        self._file = folder / "version.json"

    def write(self, version: int) -> None:
        try:
            with self._file.open("w") as file:
                for _ in range(2000):
                    file.write(f"{version}\n")
                    file.flush()
        except OSError as error:
            raise RunError(str(error)) from error

    def read(self) -> int | None:
        try:
            found = set(self._file.read_text().split())
        except OSError:
            return None
        if len(found) > 1:
            raise Broken("torn")
        return int(found.pop()) if found else None

    def files(self, version: int) -> list[Path]:
        return [self._file]


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "deleted file"])
def test_a_store_without_atomic_writes_does_not_pass(fault: str, tmp_path: Path) -> None:
    for seed in range(100):  # how many it takes is a matter of times
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            storage.trial(fault, InPlace)(random.Random(seed), folder)
        except Broken:
            return
    raise AssertionError("a torn file was never found")


def test_a_trial_that_hangs_or_dies_has_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_tlt.bench.fault_parts.components.DEADLINE_S", 0.05)
    with trials(tmp_path, tmp_path / "log") as process:
        hung = process.run("launchers", "launcher: SIGSTOP", "0")
        assert hung.result == "hung" and "0.05 s" in hung.reason
        unknown = process.run("launchers", "no such fault", "0")
        assert unknown.result in ("broken", "hung")


def test_any_number_of_faults_is_a_mixture_of_all_parts() -> None:
    found = parts()
    pairs = [pair for pair, _ in zip(in_turn(found), range(1000), strict=False)]
    assert {part for part, _ in pairs[: len(found)]} == set(found)
    assert set(pairs) == {(part, fault) for part, own in found.items() for fault in own}


def row(part: str, fault: str, result: str, **more: Any) -> dict[str, Any]:
    return {"part": part, "fault": fault, "seed": "0", "result": result, "reason": "", "seconds": 1.0, **more}


def test_what_was_lost_is_counted_once_all_has_run() -> None:
    rows = [
        row("weights", "SIGKILL", "passed"),
        row("weights", "SIGKILL", "broken", reason="torn"),
        row("rewards", "verifier: loop", "hung"),
        row("metrics", "full disk", "not possible", reason="mounting is not allowed"),
        row("whole run", "power cut", "passed", lost_steps=2, seed="a"),
        row("whole run", "power cut, deleted file", "passed", lost_steps=2, seed="a"),
    ]
    result = faults.judge(rows, components=4, runs=1, faults_per_run=2)
    assert {name: target["value"] for name, target in result.targets.items()} == {
        "faults": 5,
        "promises that a part did not keep": 1,
        "runs that were lost or ended with other bits": 0,
        "hangs": 1,
        "faults that cost more than one step": 1,
    }
    assert result.rows[0]["reasons"] == "torn" and result.rows[0]["broken"] == 1
    less = faults.judge(rows, components=5, runs=1, faults_per_run=2)
    assert {target["op"] for target in less.targets.values()} == {"incomplete"}
    assert json.dumps(result.rows)
