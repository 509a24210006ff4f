"""What speculation learns over a run: epochs, checkpoints, and the choice itself in real runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.observe.metrics import read_metrics
from megatron_tlt.observe.report_data import last_rollout
from megatron_tlt.observe.timeline import read_trace
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.adaptive import default_strategies
from megatron_tlt.rollout.token_drafters import token_drafters_of
from megatron_tlt.rollout.types import DraftStats, Request, Response, SamplingSpec
from megatron_tlt.speculation.strategy import OFF, StepRecord
from megatron_tlt.speculation.suffix_file import read_responses
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer import speculation_state
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.speculation_state import SpeculationState
from tests.trainer.conftest import Runs, rows_of

ADAPTIVE = {
    "drafter": "suffix",
    "num_speculative_tokens": 3,
    "adaptive": {"tuner": "beg_mab", "threshold": 8, "patience": 1, "lengths": "classes"},
}
TASK = {"name": "gcd"}


def speculating(
    suffix: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **adaptive: object
) -> SpeculationState:
    section = {**ADAPTIVE, "adaptive": {**ADAPTIVE["adaptive"], **adaptive}, "suffix": suffix or {}}  # type: ignore[dict-item]
    sections = {"speculation": section, "rollout": rollout or {}}
    config = TltConfig.model_validate({"model": {"path": "m"}, "tasks": [TASK], **sections})
    return SpeculationState(config, token_drafters_of(config.speculation))


def respond(made: SpeculationState, problem: str, tokens: list[int]) -> None:
    for name, drafter in made._drafters.items():
        drafter.start(f"{problem}-{name}", problem, [1, 2])
        drafter.extend(f"{problem}-{name}", tokens)
        drafter.finish(f"{problem}-{name}")


def propose(made: SpeculationState, name: str, problem: str, context: list[int]) -> list[int]:
    drafter = made._drafters[name]
    drafter.start("asked", problem, [1, 2])
    drafter.extend("asked", context)
    found = drafter.propose("asked", 3).tokens
    drafter.finish("asked")
    return found


def responses_to(
    *responses: tuple[str, list[int]], recurs: bool = True
) -> tuple[list[Problem], list[ScoredResponse], RolloutBatch]:
    """A step with one response to each problem, in the order of their positions."""
    problems = [Problem(uid, "s", "?", "1", "math", recurs=recurs) for uid, _ in responses]
    reward = Reward(1.0, True)
    scored = [
        ScoredResponse(i, 0, 2, len(tokens), "stop", DraftStats(), reward) for i, (_, tokens) in enumerate(responses)
    ]
    return (
        problems,
        scored,
        RolloutBatch.of_sequences([(1, 2, *tokens) for _, tokens in responses], [2] * len(responses)),
    )


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setattr(speculation_state, "rank", lambda: rank)
    monkeypatch.setattr(speculation_state, "world_size", lambda: world_size)


def roll_out(made: SpeculationState, steps: int) -> list[str]:
    assert made.engine is not None
    requests = [Request(str(i), (1, 2), SamplingSpec(), i, f"p{i}") for i in range(4)]
    made.engine.begin_rollout(requests)
    chosen = []
    before = OFF
    for at in range(steps):
        strategy, budgets = made.engine.next(4, {request.request_id: at for request in requests})
        assert budgets is None or set(budgets) == {"0", "1", "2", "3"}
        tokens = 4 + 4 * strategy.num_tokens // 2
        seconds = 0.01 * (1 + 0.1 * strategy.num_tokens)
        accepted = (4,) * (strategy.num_tokens // 2)
        drafts = 4 if before.num_tokens else 0
        made.engine.observe(
            StepRecord(
                before, 4, seconds, tokens, 0, accepted, next_strategy=strategy, num_drafts=drafts, start=at,
            )
        )  # fmt: skip
        chosen.append(strategy.name)
        before = strategy
    made.engine.end_rollout(requests)
    return chosen


def test_a_section_says_how_suffixes_are_kept_and_drafted_from() -> None:
    suffix = {"scope": "global", "own_tree": False, "factor": 0.5, "offset": 2.0, "min_probability": 0.3, "window": 4}
    section = {"drafter": "suffix", "suffix": suffix}
    config = TltConfig.model_validate({"model": {"path": "m"}, "tasks": [TASK], "speculation": section})
    found = token_drafters_of(config.speculation)
    assert list(found) == ["suffix"]
    own = found["suffix"].config  # type: ignore[attr-defined]
    assert (own.scope, own.own_tree, own.window) == ("global", False, 4)
    assert (own.factor, own.offset, own.min_probability) == (0.5, 2.0, 0.3)
    with pytest.raises(ValueError, match=r"factor is 0\.5 and offset 0\.0; allowed: a sum of at least 1"):
        TltConfig.model_validate({"model": {"path": "m"}, "tasks": [TASK], "speculation": {"suffix": {"factor": 0.5}}})


def test_a_new_version_of_the_drafter_is_told_to_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    made = speculating()
    assert made.chooser is not None
    told: list[str] = []
    monkeypatch.setattr(made.chooser.tuner, "drafter_changed", told.append)
    for version in (0, 0, 5, 5, 6):
        made.begin_step(version)
    assert told == ["suffix", "suffix"]


def test_n_grams_are_of_the_step_and_suffixes_of_all_epochs() -> None:
    made = speculating(strategies=["off", "ngram-3", "suffix-3"])
    made.begin_step()
    respond(made, "a", [5, 6, 7, 8, 9])
    assert propose(made, "ngram", "a", [5, 6]) == [7, 8, 9]
    made.end_rollout(*responses_to(("a", [5, 6, 7, 8, 9])))
    made.begin_step()
    assert propose(made, "ngram", "a", [5, 6]) == []
    assert propose(made, "suffix", "a", [5, 6]) == [7, 8, 9]


def test_what_was_learnt_survives_in_a_checkpoint(tmp_path: Path) -> None:
    made = speculating()
    made.begin_step()
    respond(made, "a", [5, 6, 7, 8, 9])
    made.end_rollout(*responses_to(("a", [5, 6, 7, 8, 9])))
    roll_out(made, 60)
    made.save(tmp_path)
    again = speculating()
    again.load([tmp_path])
    assert propose(again, "suffix", "a", [5, 6]) == propose(made, "suffix", "a", [5, 6]) == [7, 8, 9]
    assert again.chooser is not None and made.chooser is not None
    assert again.chooser.state() == made.chooser.state()
    assert roll_out(again, 40) == roll_out(made, 40)


def test_every_engine_drafts_from_what_another_one_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines; problems are dealt by position, and change places in the second step."""
    engines = []
    step = [("a", [5, 6, 7, 8, 9]), ("b", [15, 16, 17, 18])]
    for engine in range(2):
        as_rank(monkeypatch, engine, 2)
        engines.append(speculating())
        respond(engines[engine], *step[engine])
        engines[engine].end_rollout(*responses_to(*step))
        lengths = engines[engine].chooser.state()["lengths"]["history"]["problems"]  # type: ignore[union-attr]
        assert sorted(lengths) == [[["b", [4]]], [["a", [5]]]][engine], "its own come from the rollout itself"
    for made in engines:
        made.begin_step()
        assert propose(made, "suffix", "a", [5, 6]) == [7, 8, 9]
        assert propose(made, "suffix", "b", [15, 16]) == [17, 18]


def lengths_of(made: SpeculationState) -> dict[str, list[int]]:
    assert made.chooser is not None
    return dict(made.chooser.state()["lengths"]["history"]["problems"])


def test_a_response_counts_once_on_each_engine_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends on the first engine and waits; the step that trains on it deals its problem to the second one."""
    problem, other = Problem("a", "s", "?", "1", "math"), Problem("b", "s", "?", "1", "math")
    engines = []
    for engine in range(2):
        as_rank(monkeypatch, engine, 2)
        made = speculating()
        assert made.engine is not None and made.chooser is not None and made.chooser.lengths is not None
        if engine == 0:
            made.engine.begin_rollout([Request("0-0", (1, 2), SamplingSpec(), 0, "a")])
            response = Response("0-0", (1, 2), [5] * 7, [-1.0] * 7, "stop", 0.0)
            made.engine.finished(response, goes_on=True)
        made.end_round([problem], {(0, 0): 7}, {})
        engines.append(made)
    assert [lengths_of(made) for made in engines] == [{"a": [7]}] * 2
    for made in engines:
        scored = ScoredResponse(1, 0, 2, 7, "stop", DraftStats(), Reward(1.0, True), versions=((0, 7),))
        goes_on = replace(scored, problem=0, length=9)  # two tokens of it are new
        batch = RolloutBatch.of_sequences([(1, 2, *[5] * 9), (1, 2, *[5] * 7)], [2, 2])
        made.end_rollout([other, problem], [goes_on, scored], batch)
    assert [lengths_of(made) for made in engines] == [{"a": [7]}, {"a": [7], "b": [9]}]


def test_an_aborted_response_that_nothing_continues_is_known_to_be_longer() -> None:
    made = speculating()
    assert made.chooser is not None and made.chooser.lengths is not None
    for length in (10, 20, 30):
        made.chooser.lengths.record("a", length)
    problem = Problem("a", "s", "?", "1", "math")
    made.end_round([problem], {}, {(0, 2): 15, (0, 3): 0})
    assert lengths_of(made) == {"a": [10, 20, 30, 20]}, "the median of those above 15; nothing of one without tokens"


def test_a_problem_that_never_comes_again_takes_no_memory() -> None:
    made = speculating()
    respond(made, "a", [5, 6, 7, 8, 9])
    made.end_rollout(*responses_to(("a", [5, 6, 7, 8, 9]), recurs=False))
    assert made._drafters["suffix"].memory_bytes == 0
    everywhere = speculating(suffix={"scope": "global"})
    everywhere.end_rollout(*responses_to(("a", [5, 6, 7, 8, 9]), recurs=False))
    assert propose(everywhere, "suffix", "other", [5, 6]) == [7, 8, 9], "others are drafted from it"


def test_another_number_of_engines_goes_on_with_the_same_history(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From four engines of a rank to two of two ranks and back: all ranks of an engine draft alike."""
    saved = []
    for rank in range(4):
        as_rank(monkeypatch, rank, 4)
        made = speculating()
        roll_out(made, 5 + rank)
        made.end_rollout(*responses_to(*((f"p{i}", [5 + 5 * i, 6, 7, 8]) for i in range(4))))
        saved.append(tmp_path / f"rank_{rank}")
        saved[rank].mkdir()
        made.save(saved[rank])
    assert [(folder / "suffix.bin").is_file() for folder in saved] == [True, False, False, False]
    two = []
    for rank in range(4):
        as_rank(monkeypatch, rank, 4)
        two.append(speculating(rollout={"tensor_parallel_size": 2}))
        two[rank].load(saved)
        assert [propose(two[rank], "suffix", f"p{i}", [5 + 5 * i, 6]) for i in range(4)] == [[7, 8]] * 4
    states = [made.chooser.state() for made in two if made.chooser is not None]
    assert states[0] == states[1] and states[2] == states[3]
    for rank, made in enumerate(two):
        as_rank(monkeypatch, rank, 4)
        made.save(saved[rank])
    as_rank(monkeypatch, 1, 4)
    made = speculating()
    made.load(saved)
    assert made.chooser is not None and made.chooser.state() == states[2], "the second engine's, of its first rank"


def test_history_of_another_release_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = speculating()
    made.end_rollout(*responses_to(("a", [5, 6, 7, 8, 9])))
    made.save(tmp_path)
    path = tmp_path / "suffix.bin"
    path.write_bytes(path.read_bytes().replace(b"TLTSUFX2", b"TLTSUFX1"))
    state = json.loads((tmp_path / "state.json").read_text())
    del state["tensor_parallel_size"]  # as it was then
    (tmp_path / "state.json").write_text(json.dumps({**state, "seen": ["a"]}))
    again = speculating()
    again.load([tmp_path])
    assert "starts without the responses of earlier steps" in capsys.readouterr().err
    assert propose(again, "suffix", "a", [5, 6]) == []


def test_another_tuners_state_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = speculating()
    roll_out(made, 20)
    made.save(tmp_path)
    other = speculating(tuner="solver")
    other.load([tmp_path])
    assert "starts without the statistics of earlier steps" in capsys.readouterr().err
    assert len(roll_out(other, 10)) == 10


def test_shares_of_steps_are_metrics() -> None:
    made = speculating()
    chosen = roll_out(made, 50)
    shares = {name: value for name, value in made.metrics().items() if name.startswith("speculation/share_")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["speculation/share_off"] >= 1 / 50
    assert {name.removeprefix("speculation/share_") for name in shares} <= {"off", *chosen}
    assert 0.9 < made.metrics()["speculation/gate_open"] <= 1.0
    assert made.metrics()["speculation/acceptance_length_suffix"] > 1.0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_chooses_its_strategies_and_goes_on_choosing(runs: Runs) -> None:
    overrides = (
        "run.deterministic=false",
        "speculation.drafter=eagle",
        "drafter.kind=eagle",
        "drafter.session_steps=5",
        "drafter.entries_per_step=4",
        "speculation.num_speculative_tokens=3",
        "speculation.adaptive.patience=1",
    )
    log = runs.train("adaptive", *overrides, "trainer.steps=2")
    # the first rollout, whose head is a guess, and the tuner's looks at "off" are steps without drafts
    assert re.fullmatch(r"speculation: (\d\.\d\d x the rollout without.*|gain unknown: .*)", log.splitlines()[-1]), log
    summary = json.loads((runs.folder / "adaptive" / "summary.json").read_text())["speculation"]
    assert (summary["gain"] is None) == (summary["gain_unknown"] is not None)
    rows = [row for row in read_metrics(runs.folder / "adaptive" / "metrics.jsonl") if row["step"]]
    tried = {key for row in rows for key in row if key.startswith("speculation/share_")}
    # which ones is for measured times to say
    assert len(tried) >= 2 and "speculation/share_off" in tried
    stretches = last_rollout(read_trace(runs.folder / "adaptive" / "timeline.json"))
    assert {stretch.strategy for stretch in stretches} <= {one.name for one in default_strategies("eagle", 3)}
    newest = max((runs.folder / "adaptive" / "checkpoints").glob("step_*"))
    learnt = json.loads((newest / "speculation" / "rank_00000" / "state.json").read_text())
    assert sum(learnt["chooser"]["controller"]["steps"].values()) > 0
    assert (newest / "speculation" / "rank_00000" / "suffix.bin").is_file()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_drafts_from_what_the_other_engine_decoded(runs: Runs) -> None:
    """A file of two rows, which change places between two engines from step to step; a greedy policy that stays."""
    questions = ("12+34+5=", "60+7+81=", "3+95+24=", "41+8+16=")
    answers = ("12+34=46\n46+5=51\n#### 51", "60+7=67\n67+81=148\n#### 148") * 2
    rows = [json.dumps({"question": q, "answer": a}) for q, a in zip(questions, answers, strict=True)]
    file, held_out = runs.folder / "two.jsonl", runs.folder / "others.jsonl"
    file.write_text("\n".join(rows[:2]))
    held_out.write_text("\n".join(rows[2:]))
    task = {"kind": "file", "name": "two", "path": str(file), "held_out_path": str(held_out)}
    # a seed with which each row is the other engine's in the second step
    for seed in range(100):
        problems = build_sources([TaskConfig.model_validate(task)], "train", seed).problems(0, 4)
        uids = [problem.uid for problem in problems]
        if uids[0] == uids[3] != uids[1] == uids[2]:
            break
    runs.train(
        "two_engines",
        f"run.seed={seed}",
        f"tasks={json.dumps([task])}",
        "trainer.steps=2",
        "trainer.prompts_per_step=2",
        "actor.optimizer.lr=0",
        "rollout.sampling.temperature=0",
        "speculation.drafter=suffix",
        "speculation.num_speculative_tokens=3",
        "speculation.suffix.own_tree=false",
    )
    first, second = rows_of(runs.folder / "two_engines")
    assert first["length/mean"] == second["length/mean"] and (first["length/mean"] or 0) > 5, "the same responses"
    accepted = [step["speculation/acceptance_length"] or 0 for step in (first, second)]
    assert accepted[1] > 1.5 * accepted[0], accepted
    newest = max((runs.folder / "two_engines" / "checkpoints").glob("step_*"))
    stored = read_responses(newest / "speculation" / "rank_00000" / "suffix.bin")
    visits = sorted((problem, visit) for problem, visit, _ in stored if problem in uids)
    assert visits == sorted((uid, visit) for uid in uids[:2] for visit in (1, 2) for _ in range(4))
    assert not (newest / "speculation" / "rank_00001" / "suffix.bin").exists()
