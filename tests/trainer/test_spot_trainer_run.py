"""A run whose waiting ranks train the drafter: inside their idle time, for all engines, from where a kill left it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_tlt.checkpoint.files import LATEST
from megatron_tlt.observe.metrics import read_metrics
from megatron_tlt.observe.timeline import SPOT_TRACK
from tests.trainer.conftest import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LEAST = 2
# two of four problems are the first rank's, and each takes its engine several rounds: the two others wait
OVERRIDES = (
    "launcher.nproc_per_node=3",
    "run.deterministic=false",
    "trainer.steps=3",
    "trainer.prompts_per_step=4",
    "algorithm.group_size=24",
    "rollout.vllm.max_num_seqs=2",
    "drafter.kind=eagle",
    "speculation.drafter=eagle",
    "speculation.num_speculative_tokens=2",
    "drafter.entries_per_step=2",
    "spot.min_replicas=2",
    "spot.min_entries=1",
    "spot.checkpoint_every=2",
    f"spot.min_steps={LEAST}",
)


def newest_checkpoint(run: Path) -> int:
    try:
        return int((run / "drafter" / "spot" / LATEST).read_text().rpartition("-")[2])
    except FileNotFoundError:
        return 0


@pytest.mark.representative("spot training")
def test_bubbles_train_the_drafter_and_a_killed_run_goes_on_from_them(runs: Runs) -> None:
    run = runs.folder / "bubble"
    process = runs.start("bubble", *OVERRIDES, fresh=False)
    end = time.monotonic() + 300
    while newest_checkpoint(run) <= LEAST:
        assert process.poll() is None and time.monotonic() < end, runs.log("bubble")
        time.sleep(0.05)
    runs.kill("bubble")
    process.wait()
    left = newest_checkpoint(run)
    runs.train("bubble", *OVERRIDES)

    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3]
    versions = [row["drafter/version"] for row in rows]
    # a rollout with an older version than the newest would have ended the run
    assert versions == sorted(versions) and rows[-1]["drafter/version"] > left
    assert all(row["drafter/steps"] >= LEAST and row["spot/failed"] == 0 for row in rows)
    trained = [row for row in rows if row["spot/steps"]]
    assert trained and all(0 < row["spot/used_s"] < row["spot/idle_s"] + 0.5 for row in trained)
    assert all(row["spot/sessions"] == 1 and row["spot/preempt_ms"] < 2000 for row in trained)
    assert newest_checkpoint(run) >= max(row["drafter/version"] for row in trained) - LEAST

    events = list(json.loads((run / "timeline.json").read_text())["traceEvents"])
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == SPOT_TRACK}
    spans = [e for e in events if e["ph"] == "X"]
    sessions = [e for e in spans if (e["pid"], e["tid"]) in tracks]
    idle = [e for e in spans if e["name"] == "idle"]
    assert sum(e["args"]["steps"] for e in sessions) >= 2 * sum(row["spot/steps"] for row in trained)
    # which ranks wait in a step is for its responses to say: the first has most of them, seldom the shortest
    assert len({e["pid"] for e in sessions}) >= 2 and all(e["args"]["members"] >= 2 for e in sessions)
    for session in sessions:
        around = [
            e
            for e in idle
            if e["pid"] == session["pid"]
            and e["ts"] <= session["ts"]
            and session["ts"] + session["dur"] <= e["ts"] + e["dur"]
        ]
        assert len(around) == 1 and session["args"]["ended"] == "stopped"
