"""The drafter checkpoint benchmark, tiny: each way saves what it says, and figures are what was measured."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.bench import drafter_checkpoint
from megatron_tlt.bench.drafter_checkpoint import ASYNC, OURS, SYNC, WRITERS
from megatron_tlt.errors import RunError

TINY = ("--hidden-size", "64", "--intermediate-size", "96", "--heads", "4", "--vocabulary", "300", "--tokens", "8")


def arguments_of(*values: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    drafter_checkpoint.add_arguments(parser)
    return parser.parse_args([*TINY, *values])


def test_rows_and_the_target_are_of_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = drafter_checkpoint.run(arguments_of("--repeats", "3", "--steps", "1", "--dir", str(tmp_path)))
    rows = {row["case"]: row for row in result.rows}
    assert list(rows) == [*(f"{SYNC}, {kind}" for kind in WRITERS), ASYNC, OURS]
    assert all(len(row["stalls_s"]) == len(row["lost_s"]) == 3 for row in rows.values())
    assert all(len(row["steps_alone_s"]) == 3 * len(rows) for row in rows.values())
    shared = 2 * 300 * 64 * 2 / 1e6  # embedding and LM head, bfloat16
    assert all(
        rows[name]["megabytes"] == pytest.approx(rows[OURS]["megabytes"] + shared) for name in rows if name != OURS
    )
    medians = {name: statistics.median(row["stalls_s"]) for name, row in rows.items()}
    best = min(value for name, value in medians.items() if name.startswith(SYNC))
    (target,) = result.targets.values()
    assert target["value"] == pytest.approx(best / medians[OURS]) and target["target"] == 9.2
    assert list(tmp_path.iterdir()) == []
    assert json.dumps(result.to_dict()) and "step 4/4" in capsys.readouterr().err


def test_all_ways_save_the_same_tensors(tmp_path: Path) -> None:
    training = drafter_checkpoint._Training(arguments_of())
    full = training.full()
    for kind, write in WRITERS.items():
        way = drafter_checkpoint._AtOnce(tmp_path / kind, write)
        for version in (9, 10):
            way.save(version, full)
            assert way.done()
        (file,) = (tmp_path / kind).iterdir()
        assert file.name == "10"
        found = load_file(file) if kind == "safetensors" else torch.load(file, weights_only=True)
        assert found.keys() == full.tensors.keys()
        assert all(found[name].equal(tensor) for name, tensor in full.tensors.items())
    assert torch.serialization.get_crc32_options()


def test_a_checkpoint_that_is_not_there_is_no_result(tmp_path: Path) -> None:
    training = drafter_checkpoint._Training(arguments_of())
    way = drafter_checkpoint._InBackground(tmp_path / "ours")
    (tmp_path / "ours").write_text("no folder")
    way.save(1, training.selective())
    with pytest.raises(RunError, match=r"version 1 is not there: .*failed=1"):
        way.check()
