"""What follows and compares runs from their folders alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from megatron_tlt.cli import main
from megatron_tlt.observe.compare import differences_of, figures_of, names_of, write_comparison
from megatron_tlt.observe.report_data import load_run
from megatron_tlt.observe.watch import RunPage, sparkline
from tests.helpers.launch import REPOSITORY
from tests.observe.synthetic import make_run


def page_of(run: Path) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(RunPage(run).render())
    return console.export_text()


def test_a_watched_run_shows_figures_phases_strategies_and_alarms(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    text = page_of(run)
    assert "run quickstart-cpu" in text and "step 24" in text
    for part in ("reward", "held-out pass@1", "acceptance length", "log-probs", "update", "strategy", "█"):
        assert part in text, part
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    dull = [row | {"reward/mixed_groups": 0.0, "reward/correct": 0.0, "reward/std": 0.0} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dull))
    assert "! Step 5: no learning for" in page_of(run)


def test_the_page_follows_the_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    page, console = RunPage(run), Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(page.render())
    assert "step 3" in console.export_text()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "wall_time": time.time() - 30, "reward/mean": 0.25}) + "\n")
    (run / "timeline.json").write_text("{")  # half written
    console.print(page.render())
    text = console.export_text()
    assert "step 4" in text and "written 30 s ago" in text and "0.250" in text and "strategy" in text


def test_a_line_of_bars_spans_its_values() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅" and sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline(list(range(1000)))) == 40


def _take_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_commands_end_cleanly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["watch", str(run), "--once"]) == 0 and "run quickstart-cpu" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for command in (["watch", "--once"], ["report"], ["compare", str(run)]):
        assert main([command[0], str(tmp_path / "empty"), *command[1:]]) == 2
        assert "empty holds no run" in capsys.readouterr().err
        assert main([command[0], str(tmp_path / "none"), *command[1:]]) == 1
        assert "no such folder" in capsys.readouterr().err
    assert main(["compare", str(run)]) == 2 and "found 1; allowed: 2 to" in capsys.readouterr().err
    entry = [sys.executable, "-m", "megatron_tlt"]
    for arguments in (["watch", str(run), "--every", "0.2"], ["report", str(run), "--watch", "1"]):
        process = subprocess.Popen(
            [*entry, *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # a test that runs in the background of a shell ignores SIGINT, and so would its child
            preexec_fn=_take_sigint,
        )
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode in (0, 130) and b"Traceback" not in errors, errors


def test_a_watched_report_is_written_again_as_the_run_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    entry = [sys.executable, "-c", "import sys; from megatron_tlt.cli import main; sys.exit(main())"]
    process = subprocess.Popen([*entry, "report", str(run), "--watch", "1"], cwd=REPOSITORY, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and b"report.html" in process.stdout.readline()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "reward/mean": 0.123456}) + "\n")
        deadline = time.monotonic() + 30
        while "0.123" not in (run / "report.html").read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "0.123" in (run / "report.html").read_text()
    finally:
        process.kill()
        process.wait()


def test_a_comparison_has_curves_figures_and_the_keys_that_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    config = yaml.safe_load((runs[1] / "config.resolved.yaml").read_text())
    config.setdefault("algorithm", {})["group_size"] = 99
    config["run"] = {**config.get("run", {}), "name": "other"}
    (runs[1] / "config.resolved.yaml").write_text(yaml.safe_dump(config))
    page = write_comparison(runs, tmp_path / "compare.html").read_text()
    assert page.count("<svg") >= 8 and "over minutes of training" in page
    loaded = [load_run(run, traced=False) for run in runs]
    differences = differences_of(loaded)
    assert differences["algorithm.group_size"][1] == 99 and "run.name" not in differences
    figures = figures_of(loaded)
    assert figures["steps"] == [24, 24] and None not in figures["reward, last step"]
    assert "algorithm.group_size" in page and f"{figures['reward, last step'][0]:.4g}" in page


def test_names_differ_by_as_much_of_the_path_as_it_takes(tmp_path: Path) -> None:
    a, b = tmp_path / "x" / "run", tmp_path / "y" / "run"
    assert names_of([a, b]) == ["x/run", "y/run"]
    assert names_of([a, tmp_path / "z"]) == ["run", "z"]
    assert names_of([a, a]) == ["run (1)", "run (2)"]
