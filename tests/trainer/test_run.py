"""The whole loop on the real libraries: what it leaves, and that stopping it anywhere changes nothing."""

from __future__ import annotations

import html
import json
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.checkpoint.manifest import verify_manifest
from megatron_tlt.observe.jsonl import read_jsonl
from megatron_tlt.observe.timeline import read_trace
from tests.helpers.launch import REPOSITORY, python, run_logged, slowness
from tests.helpers.traces import trace_problems
from tests.trainer.conftest import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def weights(run: Path) -> bytes:
    return (run / "hf" / "model.safetensors").read_bytes()


def rows(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    if not file.is_file():
        return []
    lines = file.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def samples(run: Path) -> list[dict[str, object]]:
    return read_jsonl(run / "samples.jsonl")


def assert_same_samples(resumed: Path, reference: Path) -> None:
    """Each once, those of steps that were done again too."""
    found, wanted = samples(resumed), samples(reference)
    assert found == wanted
    keys = [tuple(row[key] for key in ("step", "origin", "problem", "sample")) for row in found]
    assert len(set(keys)) == len(keys)
    assert [row["step"] for row in found] == sorted(row["step"] for row in found)


def wait_for_rows(runs: Runs, name: str, count: int, process: object, checkpoints: int = 0) -> None:
    """Until ``count`` steps are in the run's metrics and it has that many checkpoints."""
    deadline = time.monotonic() + 900 * slowness()
    run = runs.folder / name
    while (
        len([row for row in rows(run) if row["step"]]) < count
        or len(list((run / "checkpoints").glob("step_*"))) < checkpoints
    ):
        assert time.monotonic() < deadline, runs.log(name)
        assert process.poll() is None, runs.log(name)  # type: ignore[attr-defined]
        time.sleep(0.05)


@pytest.mark.representative("end-to-end run")
def test_summary_says_what_ran_and_that_the_engines_held_the_weights(uninterrupted: Path) -> None:
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["steps"] == 4
    assert summary["actor"]["backend"] == "megatron-core" and summary["rollout"]["backend"] == "vllm"
    assert summary["reshard"]["verified_tensors"] == summary["reshard"]["tensors"] > 0
    assert summary["rollout"]["logprob_mismatch"]["max_abs"] < 1e-3
    assert summary["rollout"]["draft_acceptance_rate"] is not None, "nothing was drafted"
    assert summary["rollout"]["acceptance_length"] >= 1.0
    assert 0 <= summary["eval"]["start"]["pass_at_1"] <= summary["eval"]["start"]["pass_at_k"] <= 1
    assert [row["step"] for row in rows(uninterrupted)] == [0, 1, 2, 3, 4]
    assert all(row["actor/grad_norm"] > 1e-3 for row in rows(uninterrupted)[1:]), "equal bits would show nothing"
    assert rows(uninterrupted)[-1]["checkpoint/background_s"] > 0
    for file in ("report.html", "config.resolved.yaml", "lengths.jsonl", "hf/config.json", "hf/tokenizer.model"):
        assert (uninterrupted / file).is_file(), file


@pytest.mark.representative("end-to-end run")
def test_timeline_is_a_valid_trace_with_a_row_per_rank(uninterrupted: Path) -> None:
    trace = read_trace(uninterrupted / "timeline.json")
    assert trace_problems(trace) == []
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {"rollout", "idle", "reward", "log_probs", "update", "reshard"} <= {event["name"] for event in spans}


@pytest.mark.representative("end-to-end run")
def test_what_the_policy_says_can_be_read(uninterrupted: Path) -> None:
    found = samples(uninterrupted)
    steps = [row for row in found if row["origin"] == "train"]
    held_out = [row for row in found if row["origin"] == "evaluation"]
    assert {(row["step"], row["task"]) for row in held_out} == {(s, t) for s in (0, 4) for t in ("chain_sum", "gcd")}
    assert len(held_out) + len(steps) == len(found), "no greedy evaluation was asked for"
    for row in rows(uninterrupted)[1:]:
        own = [sample for sample in steps if sample["step"] == row["step"]]
        tasks = {name.split("/")[1] for name in row if name.startswith("task/") and name.endswith("/reward")}
        assert tasks == {sample["task"] for sample in own} and tasks, row["step"]
        for task in tasks:
            chosen = {why: sample for sample in own if sample["task"] == task for why in sample["chosen"]}
            assert chosen.keys() == {"best", "worst", "longest"}
            assert chosen["longest"]["length"] == row[f"task/{task}/length_max"]
            assert chosen["worst"]["reward"] <= row[f"task/{task}/reward"] <= chosen["best"]["reward"]
    for row in found:
        assert row["problem"].startswith(f"{row['task']}/{'train' if row['origin'] == 'train' else 'held_out'}/")
        assert row["prompt"].startswith("sum " if row["task"] == "chain_sum" else "gcd "), row["prompt"]
        assert row["response"].endswith("</s>") == (row["finish_reason"] == "stop")
        assert not row["correct"] or row["extracted"] == row["answer"]
    page = (uninterrupted / "report.html").read_text(encoding="utf-8")
    assert all(html.escape(row["response"], quote=False) in page for row in found if row["step"] == 4)


@pytest.mark.representative("end-to-end run")
def test_metrics_by_task_are_shares_of_those_of_all(uninterrupted: Path) -> None:
    for row in rows(uninterrupted)[1:]:
        tasks = {name.split("/")[1] for name in row if name.startswith("task/") and name.endswith("/responses")}
        assert sum(row[f"task/{task}/responses"] for task in tasks) == 16
        for part, whole in (
            ("reward", "reward/mean"),
            ("length_mean", "length/mean"),
            ("truncated", "length/truncated"),
        ):
            mean = sum(row[f"task/{task}/responses"] * row[f"task/{task}/{part}"] for task in tasks) / 16
            assert mean == pytest.approx(row[whole], abs=1e-9), part
        entropies = [row[f"task/{task}/entropy"] for task in tasks]
        assert 0 < min(entropies) <= row["rollout/entropy"] <= max(entropies)
        assert 0 <= row["reward/std"] <= (row["reward/max"] - row["reward/min"]) / 2 + 1e-9
    summary = json.loads((uninterrupted / "summary.json").read_text())
    ends = summary["eval"]["end"]
    assert {"chain_sum", "gcd"} == ends["pass_at_1_by_task"].keys()
    assert rows(uninterrupted)[-1]["task/gcd/eval_pass_at_1"] == ends["pass_at_1_by_task"]["gcd"]
    seen = [row["tokens/seen"] for row in rows(uninterrupted)[1:]]
    responses = [sum(row["lengths"]) for row in read_jsonl(uninterrupted / "lengths.jsonl")]
    assert all(now - before > own for before, now, own in zip([0, *seen], seen, responses, strict=False))
    assert summary["tokens_seen"] == seen[-1]


@pytest.mark.representative("killed run")
def test_killed_three_times_with_a_checkpoint_damaged_it_still_ends_with_the_same_bits(
    runs: Runs, uninterrupted: Path
) -> None:
    seed = time.time_ns() % 2**32
    print(f"moments drawn with seed {seed}")
    moments = random.Random(seed)
    for kill in range(3):
        process = runs.start("killed", fresh=False)
        last = kill == 2  # one checkpoint is to be damaged, and one to be left
        wait_for_rows(runs, "killed", moments.randint(kill, kill + 1), process, checkpoints=2 if last else 0)
        time.sleep(moments.uniform(0, 0.3 if last else 2.0))
        runs.kill("killed")
        process.wait()
    run = runs.folder / "killed"
    newest = max((run / "checkpoints").glob("step_*"))
    file = max((newest / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    shown = runs.train("killed")
    first = next(line for line in shown.splitlines() if not line.startswith("note: "))
    assert first == f"run tiny: 2 process(es), folder {run}, from the checkpoint of step {int(newest.name[-6:])}"
    (warning,) = (line for line in shown.splitlines() if line.startswith("warning: "))
    assert f"checkpoint {newest} is not complete" in warning, "on the terminal, once"
    assert warning in (run / "logs" / "workers.log").read_text()
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    assert weights(run) == weights(uninterrupted)
    assert_same_samples(run, uninterrupted)
    assert [row.get("tokens/seen") for row in rows(run)] == [row.get("tokens/seen") for row in rows(uninterrupted)]


def test_sigterm_saves_and_the_same_command_goes_on(runs: Runs, uninterrupted: Path) -> None:
    process = runs.start("stopped", "trainer.save_every=0")
    wait_for_rows(runs, "stopped", 1, process)
    psutil.Process(process.pid).send_signal(signal.SIGTERM)
    assert process.wait(300 * slowness()) == 128 + signal.SIGTERM, runs.log("stopped")
    assert "state saved; run again to continue" in runs.log("stopped")
    done = len(rows(runs.folder / "stopped")) - 1
    assert (runs.folder / "stopped" / "checkpoints" / f"step_{done:06d}").is_dir()
    runs.train("stopped", "trainer.save_every=0")
    assert weights(runs.folder / "stopped") == weights(uninterrupted)
    assert_same_samples(runs.folder / "stopped", uninterrupted)


def test_a_finished_run_is_not_run_again(runs: Runs, uninterrupted: Path) -> None:
    before = weights(uninterrupted), (uninterrupted / "summary.json").stat().st_mtime_ns
    assert "finished" in runs.train("uninterrupted")
    assert before == (weights(uninterrupted), (uninterrupted / "summary.json").stat().st_mtime_ns)


def test_without_speculation_the_same_kind_of_summary(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["speculation"]["enabled"] is False
    assert summary["rollout"]["acceptance_length"] == pytest.approx(1.0, abs=0.05)


def test_a_checkpoint_converts_to_the_trained_model_and_back_to_what_a_run_starts_from(
    runs: Runs, uninterrupted: Path
) -> None:
    def convert(source: Path, target: Path) -> None:
        tool = REPOSITORY / "tools" / "convert_checkpoint.py"
        run_logged([python(), str(tool), str(source), str(target)], timeout_s=180)

    newest = max((uninterrupted / "checkpoints").glob("step_*"))
    convert(newest, runs.folder / "converted")
    trained = load_file(uninterrupted / "hf" / "model.safetensors")
    converted = load_file(runs.folder / "converted" / "model.safetensors")
    assert trained.keys() == converted.keys() and all(torch.equal(trained[n], converted[n]) for n in trained)
    assert (runs.folder / "converted" / "tokenizer.model").is_file()

    convert(runs.folder / "converted", runs.folder / "megatron")
    runs.train("from-megatron", "model.recipe=null", f"model.path={runs.folder / 'megatron'}", "trainer.steps=1")
    summary = json.loads((runs.folder / "from-megatron" / "summary.json").read_text())
    assert summary["reshard"]["verified_tensors"] == summary["reshard"]["tensors"] > 0
    assert summary["rollout"]["logprob_mismatch"]["max_abs"] < 1e-3


@pytest.mark.representative("end-to-end run")
def test_cache_of_recipes_holds_finished_models_only(uninterrupted: Path, runs: Runs) -> None:
    for model in (runs.folder / "models").iterdir():
        assert (model / "recipe.json").is_file() and verify_manifest(model) == [], model


def test_a_run_that_cannot_learn_says_so_once(runs: Runs) -> None:
    small = ("trainer.steps=7", "trainer.save_every=0", "trainer.prompts_per_step=2", "evaluation.problems=2")
    shown = runs.train("untaught", *small, "rollout.max_response_tokens=1")  # no answer fits into one token
    assert shown.count("warning: no learning for 5 steps: the verifier finds an answer in almost no response") == 1
    untaught = [row for row in rows(runs.folder / "untaught") if row["step"]]
    assert [row["reward/extracted"] for row in untaught] == [0.0] * 7
    assert [row["learning/warnings"] >= 1 for row in untaught] == [step >= 5 for step in range(1, 8)]
    summary = json.loads((runs.folder / "untaught" / "summary.json").read_text())
    assert summary["learning"]["warnings"] >= 1 and summary["reward"]["mean"] == 0.0


def test_data_sets_of_the_evaluation_have_figures_of_their_own(runs: Runs) -> None:
    rows_file = runs.folder / "eval.jsonl"
    rows_file.write_text(
        "".join(
            json.dumps({"prompt": f"sum {n}+1", "reward_model": {"ground_truth": str(n + 1)}}) + "\n" for n in range(6)
        )
    )
    sets = (
        "evaluation.sets=["
        f"{{name: rows, tasks: [{{kind: file, name: rows, path: {rows_file}}}], problems: 9, samples: 3}}, "
        "{name: longer, tasks: [{name: gcd, params: {sizes: {min: 9, max: 19}}}], problems: 4, samples: 2, "
        "temperature: 0.5, greedy: false}]"
    )
    output = runs.train("sets", "trainer.steps=1", sets)
    figures = {"pass_at_1", "pass_at_k", "best_of_k", "maj_at_k"}
    for row in rows(runs.folder / "sets"):
        assert {f"eval/rows/{name}" for name in figures | {"greedy"}} <= row.keys()
        assert {f"eval/longer/{name}" for name in figures} <= row.keys() and "eval/longer/greedy" not in row
    summary = json.loads((runs.folder / "sets" / "summary.json").read_text())
    assert summary["eval"]["end"]["sets"].keys() == {"rows", "longer"}
    assert "; longer: pass@1 " in output
