"""The measurement command for one GPU: what it records and resumes; without a GPU nothing meets a target."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from megatron_tlt.bench.result import BenchmarkResult
from tools.bench import gpu_wheels
from tools.bench.gpu_measure import __main__ as command
from tools.bench.gpu_measure import colocate, learn, rollout, smoke, steps
from tools.bench.gpu_measure.environment import describe, parse_gpu_state
from tools.bench.gpu_measure.measurement import Measurement, Settings
from tools.bench.gpu_measure.record import (
    Record,
    expected_seconds,
    measure_missing,
    missing,
    run_measurement,
    write_result,
)

ROOT = Path(__file__).parents[2]
GPU = Settings(small=False, device="cuda", device_name="NVIDIA H100 80GB HBM3")
CPU = Settings(small=True, device="cpu", device_name="cpu")
PARTS = {"smoke": smoke, "steps": steps, "rollout": rollout, "colocate": colocate, "learn": learn}


def line(name: str, **row: Any) -> dict[str, Any]:
    return {"measurement": name, "seconds": 30.0, "rows": [row]}


def test_all_parts_have_measurements_with_distinct_names_that_fit_a_call() -> None:
    assert tuple(PARTS) == command.PARTS
    for part in PARTS.values():
        for settings in (GPU, CPU):
            found = part.measurements(settings)
            assert len({one.name for one in found}) == len(found) > 0
            assert all(one.expected_s < 580 for one in found)
            assert all(hasattr(part, one.function.partition(":")[2]) for one in found)
            json.dumps([one.given for one in found])


def test_a_rerun_adds_what_is_missing_what_was_tried_least_first(tmp_path: Path) -> None:
    record = Record(tmp_path / "steps.jsonl", GPU)
    a, b, c = (Measurement(name, "steps:measure_ours") for name in "abc")
    record.add(line("a"))
    record.add(line("a"))
    record.add(line("b"))
    record.add({**line("c"), "failure": {"type": "RunError", "message": "no"}})
    again = Record(tmp_path / "steps.jsonl", GPU)
    d = Measurement("d", "steps:measure_ours")
    assert [one.name for one in missing(again, [a, c, b, d], 2)] == ["d", "b", "c"]
    assert again.seconds("a") == 30.0
    assert again.seconds("c") is None


def test_docs_say_how_many_calls_one_repeat_takes() -> None:
    documented = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|$", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    found = []
    for name, part in PARTS.items():
        calls = []
        for settings in (GPU, dataclasses.replace(GPU, lean=True)):
            left = [expected_seconds(one, settings) for one in part.measurements(settings)]
            count = 0
            while left:
                seconds, waiting, count = 592.0, left, count + 1
                left = []
                for expected in waiting:  # as measure_missing does
                    fits = expected < seconds
                    seconds -= expected * fits
                    left += [] if fits else [expected]
            calls.append(str(count))
        found.append((name, *calls))
    assert documented == found


def test_figures_on_a_gpu_have_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = {"device": "cuda", "gpu_names": ["NVIDIA H200"]}
    monkeypatch.setattr(command, "describe", lambda commit: {**gpu, "commit": commit})
    monkeypatch.setattr(command, "measure_missing", lambda *_, **__: [])
    run = ["smoke", "--out", str(tmp_path)]
    assert command.main(run) == 2
    assert "--commit: found none" in capsys.readouterr().err
    assert command.main([*run, "--commit", "0123abc"]) == 0
    assert json.loads((tmp_path / "smoke.json").read_text())["environment"]["commit"] == "0123abc"
    assert command.main([*run, "--commit", "4567def"]) == 2, "a file has one state of the code"
    assert "0123abc" in (error := capsys.readouterr().err) and "4567def" in error


def test_a_torn_line_is_dropped_and_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    Record(path, GPU).add(line("a"))
    with path.open("a") as file:
        file.write('{"measurement": "b", "rows"')
    record = Record(path, GPU)
    record.add(line("c"))
    assert set(Record(path, GPU).rows) == {"a", "c"}
    with pytest.raises(ValueError, match="other settings"):
        Record(path, CPU)
    with pytest.raises(ValueError, match="other settings"):
        Record(path, Settings(small=False, device="cuda", device_name="NVIDIA H200"))


def test_a_measurement_that_does_not_fit_the_time_is_left_to_the_next_call(tmp_path: Path) -> None:
    record = Record(tmp_path / "steps.jsonl", GPU)
    long = Measurement("long", "steps:measure_ours", expected_s=100.0)
    assert measure_missing(record, [long], {}, tmp_path, 1, time.monotonic() + 60, cwd=ROOT) == []
    assert record.lines[1:] == []


def test_a_failure_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    record = Record(tmp_path / "smoke.jsonl", CPU)
    wrong = Measurement("wrong", "environment:no_such_function")
    more = Measurement("wrong too", "environment:describe")  # takes no job
    failed = measure_missing(record, [wrong, more], {"device": "cpu"}, tmp_path, 1, time.monotonic() + 300, cwd=ROOT)
    assert failed == ["wrong", "wrong too"]
    first, second = (entry["failure"] for entry in record.lines[1:])
    assert first["type"] == "AttributeError"
    assert "no_such_function" in first["message"]
    assert any("Traceback" in text for text in first["log"])
    assert second["type"] == "TypeError"
    assert (tmp_path / "logs" / "smoke-wrong-too.log").is_file()
    result = write_result(record, "smoke", smoke.judge, [wrong, more], {}, tmp_path)
    assert {entry["op"] for entry in result.targets.values()} == {"incomplete"}
    assert json.loads((tmp_path / "smoke.json").read_text())["rows"] == []


def test_a_process_is_ended_at_the_limit(tmp_path: Path) -> None:
    found = run_measurement(Measurement("slow", "smoke:measure_engine"), CPU, tmp_path / "logs" / "slow.log", 0.2, ROOT)
    assert found["failure"]["type"] == "TimeLimit"


def test_one_that_hangs_takes_neither_the_time_nor_the_turn_of_the_others(tmp_path: Path) -> None:
    record = Record(tmp_path / "smoke.jsonl", CPU)
    hangs = Measurement("hangs", "smoke:measure_engine", expected_s=0.1)
    other = Measurement("other", "environment:no_such_function")
    until = time.monotonic() + 300
    assert measure_missing(record, [hangs, other], {}, tmp_path, 3, until, cwd=ROOT) == ["hangs", "other"]
    first, second = (entry["failure"] for entry in record.lines[1:])
    assert (first["type"], second["type"]) == ("TimeLimit", "AttributeError")
    assert time.monotonic() < until - 100
    never = Measurement("never tried", "smoke:measure_engine")
    record.add(line("finished"))
    finished = Measurement("finished", "smoke:measure_engine")
    assert [one.name for one in missing(record, [hangs, finished, never], 3)] == ["never tried", "finished", "hangs"]


def rehearsed(part: str, rows: dict[str, list[dict[str, Any]]], settings: Settings, folder: Path) -> BenchmarkResult:
    record = Record(folder / f"{part}-{settings.device}.jsonl", settings)
    for name, found in rows.items():
        record.add({"measurement": name, "seconds": 1.0, "rows": found})
    module = PARTS[part]
    return write_result(record, part, module.judge, module.measurements(settings), {}, folder)


def test_targets_are_met_on_a_gpu_and_incomplete_in_a_rehearsal(tmp_path: Path) -> None:
    rows = {
        "stock": [{"arm": "stock", "seconds": 100.0}],
        "off": [{"arm": "off", "seconds": 101.0, "on_chain": 1.0}],
        "tuner at 0.6": [{"seconds": 90.0, "on_chain": 1.0}, {"seconds": 50.0, "on_chain": 1.0}],
    }
    result = rehearsed("rollout", rows, GPU, tmp_path)
    headline = "speed over stock, set acceptance 0.6, the head's real cost included"
    assert result.targets[headline] == {"value": 2.0, "target": 1.7, "op": ">=", "met": True}
    assert result.targets["speed of off over stock"]["met"]
    assert result.targets["tuner at 0.8: not measured"]["op"] == "incomplete"
    assert "rehearsal" not in result.rows[0]
    second = {
        "V2 off": [{"arm": "V2 off", "seconds": 100.0, "on_chain": 1.0}],
        "V2 tuner at 0.6": [{"seconds": 90.0}, {"seconds": 40.0}],
        "stock dynamic at 0.6": [{"arm": "stock dynamic", "seconds": 60.0}],
        "stock adaptive at 0.6": [{"arm": "stock adaptive", "unavailable": "this release has none"}],
    }
    result = rehearsed("rollout", rows | second, GPU, tmp_path / "second")
    assert result.targets["speed over stock on V2, set acceptance 0.6, the head's real cost included"]["value"] == 2.5
    assert result.targets["V2 tuner over vLLM's best own choice at 0.6"]["value"] == 1.5
    assert "V2 tuner over the best static strategy at 0.6" not in result.targets
    statics = {f"V2 eagle3-{drafts} at 0.6": [{"seconds": 36.0 + drafts}] for drafts in rollout.STATICS[0.6]}
    result = rehearsed("rollout", rows | second | statics, GPU, tmp_path / "statics")
    assert result.targets["V2 tuner over the best static strategy at 0.6"]["value"] == 0.95
    assert result.targets["speed of V2 off over stock"]["value"] == 1.0
    result = rehearsed("rollout", rows, CPU, tmp_path)
    assert {entry["op"] for entry in result.targets.values()} == {"incomplete"}
    assert not any(entry["met"] for entry in result.targets.values())
    assert all(row["rehearsal"] for row in result.rows)
    unavailable = {"V2 off": [{"arm": "V2 off", "unavailable": "no triton"}]}
    (row,) = rehearsed("rollout", unavailable, CPU, tmp_path / "no triton").rows
    assert "rehearsal" not in row, "nothing ran"


@pytest.mark.parametrize("requests", [3, 16, 128])
def test_vllms_schedule_covers_every_batch_once(requests: int) -> None:
    for acceptance in rollout.WANTED:
        found = rollout.vllm_schedule(acceptance, requests)
        assert [batch for first, last, _ in found for batch in range(first, last + 1)] == [*range(1, requests + 1)]
        assert [drafts for *_, drafts in found] == sorted((drafts for *_, drafts in found), reverse=True)


def test_colocate_targets(tmp_path: Path) -> None:
    rates = {"copy_to_host_gbs": 50.0, "copy_to_device_gbs": 50.0}
    phases = [
        {"phase": "update", "mfu": 0.41},
        {"phase": "offload", "turn": 0, "moved_gb": 20.0, "offload_s": 9.0, "reload_s": 9.0, **rates},
        {"phase": "offload", "turn": 1, "moved_gb": 20.0, "offload_s": 0.5, "reload_s": 0.8, **rates},
        {"phase": "reshard", "verify": False, "seconds": 0.013, "device_copy_s": 0.01},
        {"phase": "reshard", "verify": True, "seconds": 1.0, "device_copy_s": 0.01},
    ]
    targets = rehearsed("colocate", {"phases": phases}, GPU, tmp_path).targets
    met = {name: entry["met"] for name, entry in targets.items() if entry["op"] != "incomplete"}
    assert met == {
        "update MFU": True,
        "offload over a pinned copy's bandwidth": True,
        "reload over a pinned copy's bandwidth": False,
        "reshard over a device copy": True,
    }


def test_operations_of_an_update_and_the_peak() -> None:
    config = {"tie_word_embeddings": True, "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 10}
    assert colocate.train_flops(config, 1000, 4, 16) == 4 * (6 * 1000 + 6 * 2 * 8 * 16)
    assert colocate.train_flops(config | {"tie_word_embeddings": False}, 1000, 1, 0) == 6 * (1000 - 80)
    assert colocate.peak_flops("NVIDIA H200") == colocate.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert colocate.peak_flops("cpu") is None


def test_the_environment_names_versions_and_the_device() -> None:
    found = describe()
    assert found["torch"] and found["megatron_core"] and found["numpy"] and found["date"]
    assert command.device_name(found) == ("cpu" if found["device"] == "cpu" else found["gpu_names"][0])
    text = "NVIDIA H100, 580.159.04, 81559 MiB, 4 MiB, 345 MHz, 2619 MHz, 1980 MHz, 2619 MHz, 700.00 W, 30, 5, 16\n"
    state = parse_gpu_state(text)
    assert state is not None
    assert (state["name"], state["clocks.sm"], state["pcie.link.width.current"]) == ("NVIDIA H100", "345 MHz", "16")
    assert parse_gpu_state("No devices were found\n") is None


def test_a_bundle_is_unpacked_where_its_parts_are_whole(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "bundled_for_test.py").write_text("ANSWER = 42\n")
    (package / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='bundled-for-test', version='1', py_modules=['bundled_for_test'],"
        " install_requires=['numpy>=2', 'wanted; python_version >= \"3.12\"', 'unwanted; extra == \"more\"'])\n"
    )
    wheels = tmp_path / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*build, str(package)], check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    assert [one.name for one in gpu_wheels.requirements_of(wheel, (), "3.12")] == ["numpy", "wanted"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(random.Random(0).randbytes(2 << 20))
    parts, site = tmp_path / "parts", tmp_path / "site"
    bundle = ["bash", str(ROOT / "tools" / "bench" / "gpu_bundle.sh"), "--wheels", str(wheels), "--part-mib", "1"]
    subprocess.run(
        [*bundle, "--drop", "*.dist-info", str(parts), str(tmp_path / "model")], check=True, capture_output=True
    )
    assert len(list(parts.glob("bundle.tar.*"))) == 3
    unpack = ["bash", str(parts / "unpack.sh"), str(parts), str(site)]
    subprocess.run(unpack, check=True, capture_output=True)
    answer = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(site)!r}); import bundled_for_test as b; print(b.ANSWER)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "42"
    assert (site / "model" / "weights").stat().st_size == 2 << 20
    assert not list(site.glob("*.dist-info"))
    (parts / "bundle.tar.001").unlink()
    assert subprocess.run(unpack, capture_output=True).returncode != 0


def test_extras_that_a_later_requirement_adds_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mistral-common takes pydantic-extra-types with an extra, FastAPI takes it without one and comes first."""
    metadata = {
        "first": "Requires-Dist: shared",
        "second": "Requires-Dist: shared[more]",
        "shared": 'Requires-Dist: inner; extra == "more"\nProvides-Extra: more',
        "inner": "",
    }

    def download(requirement: Requirement, python: str, folder: Path) -> Path:
        file = folder / f"{requirement.name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            name = f"{requirement.name}-1.0.dist-info/METADATA"
            wheel.writestr(name, f"Name: {requirement.name}\n{metadata[requirement.name]}\n")
        return file

    monkeypatch.setattr(gpu_wheels, "download", download)
    roots = [Requirement("first"), Requirement("second")]
    assert gpu_wheels.collect(roots, {}, "3.12", tmp_path) == []
    assert {file.name.partition("-")[0] for file in tmp_path.iterdir()} == {"first", "second", "shared", "inner"}


def test_names_of_a_package_list(tmp_path: Path) -> None:
    file = tmp_path / "have.txt"
    file.write_text("torch==2.11.0\nPyYAML==6.0.3\nlocal_one @ file:///x\n# no\n\n")
    assert gpu_wheels.version_of(Path("numpy-2.3.5-cp312-cp312-manylinux_2_28_x86_64.whl")) == "2.3.5"
    assert gpu_wheels.version_of(Path("some-name-1.0.tar.gz")) == "1.0"
    assert gpu_wheels.read_have(file) == {"torch": "2.11.0", "pyyaml": "6.0.3", "local-one": ""}
