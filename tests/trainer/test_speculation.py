"""What speculation learns over a run: epochs, checkpoints, and the choice itself in real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.observe.metrics import read_metrics
from megatron_tlt.observe.report_data import last_rollout
from megatron_tlt.observe.timeline import read_trace
from megatron_tlt.rollout.types import Request, SamplingSpec, StepRecord
from megatron_tlt.rollout.vllm_strategies import token_drafters_of
from megatron_tlt.speculation.strategy import OFF, Strategy
from megatron_tlt.trainer.speculation import Speculating
from tests.trainer.conftest import Runs

ADAPTIVE = {
    "drafter": "suffix",
    "num_speculative_tokens": 3,
    "adaptive": {"tuner": "beg_mab", "threshold": 8, "patience": 1, "lengths": "classes"},
}
TASK = {"name": "gcd"}


def speculating(**adaptive: object) -> Speculating:
    section = {**ADAPTIVE, "adaptive": {**ADAPTIVE["adaptive"], **adaptive}}  # type: ignore[dict-item]
    config = TltConfig.model_validate({"model": {"path": "m"}, "tasks": [TASK], "speculation": section})
    return Speculating(config, token_drafters_of(config.speculation))


def respond(made: Speculating, problem: str, tokens: list[int]) -> None:
    for name, drafter in made._drafters.items():
        drafter.start(f"{problem}-{name}", problem, [1, 2])
        drafter.extend(f"{problem}-{name}", tokens)
        drafter.finish(f"{problem}-{name}")


def propose(made: Speculating, name: str, problem: str, context: list[int]) -> list[int]:
    drafter = made._drafters[name]
    drafter.start("asked", problem, [1, 2])
    drafter.extend("asked", context)
    found = drafter.propose("asked", 3).tokens
    drafter.finish("asked")
    return found


def roll_out(made: Speculating, steps: int) -> list[str]:
    assert made.chooser is not None
    requests = [Request(str(i), (1, 2), SamplingSpec(), i, f"p{i}") for i in range(4)]
    made.chooser.begin_rollout(requests)
    chosen = []
    before = OFF
    for at in range(steps):
        strategy, budgets = made.chooser.next(4, {request.request_id: at for request in requests})
        assert budgets is None or set(budgets) == {"0", "1", "2", "3"}
        tokens = 4 + 4 * strategy.num_tokens // 2
        seconds = 0.01 * (1 + 0.1 * strategy.num_tokens)
        made.chooser.observe(StepRecord(at, seconds, 4, tokens, 0, tokens - 4, before, strategy))
        chosen.append(strategy.name)
        before = strategy
    made.chooser.end_rollout(requests)
    return chosen


def test_an_epoch_ends_where_a_problem_comes_again() -> None:
    made = speculating()
    suffix = made._drafters["suffix"]
    for problems in (["a", "b"], ["c", "d"], ["a", "c"], ["e"]):
        made.begin_step(problems)
    assert suffix.epoch == 1  # type: ignore[attr-defined]


def test_a_section_says_how_suffixes_are_kept_and_drafted_from() -> None:
    suffix = {"scope": "global", "own_tree": False, "factor": 0.5, "offset": 2.0, "min_probability": 0.3, "window": 4}
    section = {"drafter": "suffix", "suffix": suffix}
    config = TltConfig.model_validate({"model": {"path": "m"}, "tasks": [TASK], "speculation": section})
    found = token_drafters_of(config.speculation)
    assert list(found) == ["suffix"]
    own = found["suffix"].config  # type: ignore[attr-defined]
    assert (own.scope, own.own_tree, own.window) == ("global", False, 4)
    assert (own.rule.factor, own.rule.offset, own.rule.min_probability) == (0.5, 2.0, 0.3)
    with pytest.raises(ValueError, match=r"factor is 0\.5 and offset 0\.0; allowed: a sum of 1 and more"):
        TltConfig.model_validate({"model": {"path": "m"}, "tasks": [TASK], "speculation": {"suffix": {"factor": 0.5}}})


def test_a_new_version_of_the_drafter_is_told_to_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    made = speculating()
    assert made.chooser is not None
    told: list[str] = []
    monkeypatch.setattr(made.chooser, "drafter_changed", told.append)
    for version in (0, 0, 5, 5, 6):
        made.begin_step([], version)
    assert told == ["suffix", "suffix"]


def test_n_grams_are_of_the_step_and_suffixes_of_all_epochs() -> None:
    made = speculating(strategies=["off", "ngram-3", "suffix-3"])
    made.begin_step(["a"])
    respond(made, "a", [5, 6, 7, 8, 9])
    assert propose(made, "ngram", "a", [5, 6]) == [7, 8, 9]
    made.begin_step(["a"])
    assert propose(made, "ngram", "a", [5, 6]) == []
    assert propose(made, "suffix", "a", [5, 6]) == [7, 8, 9]


def test_what_was_learnt_survives_in_a_checkpoint(tmp_path: Path) -> None:
    made = speculating()
    made.begin_step(["a"])
    respond(made, "a", [5, 6, 7, 8, 9])
    roll_out(made, 60)
    made.save(tmp_path)
    again = speculating()
    again.load([tmp_path])
    assert propose(again, "suffix", "a", [5, 6]) == propose(made, "suffix", "a", [5, 6])
    assert again.chooser is not None and made.chooser is not None
    assert again.chooser.state() == made.chooser.state()
    assert roll_out(again, 40) == roll_out(made, 40)


def test_another_tuners_state_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = speculating()
    roll_out(made, 20)
    made.save(tmp_path)
    other = speculating(tuner="solver")
    other.load([tmp_path])
    assert "is not used" in capsys.readouterr().err
    assert len(roll_out(other, 10)) == 10


def test_shares_of_steps_are_metrics() -> None:
    made = speculating()
    chosen = roll_out(made, 50)
    shares = {name: value for name, value in made.metrics().items() if name.startswith("speculation/share_")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["speculation/share_off"] >= 1 / 50
    assert {name.removeprefix("speculation/share_") for name in shares} <= {"off", *chosen}


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
    runs.train("adaptive", *overrides, "trainer.steps=2")
    rows = [row for row in read_metrics(runs.folder / "adaptive" / "metrics.jsonl") if row["step"]]
    tried = {key for row in rows for key in row if key.startswith("speculation/share_")}
    # which ones is for measured times to say
    assert len(tried) >= 2 and "speculation/share_off" in tried
    stretches = last_rollout(read_trace(runs.folder / "adaptive" / "timeline.json"))
    names = {strategy.name for strategy in (OFF, Strategy("suffix", 3), *(Strategy("eagle", k) for k in (1, 3)))}
    assert {stretch.strategy for stretch in stretches} <= names
    newest = max((runs.folder / "adaptive" / "checkpoints").glob("step_*"))
    learnt = json.loads((newest / "speculation" / "rank_00000" / "state.json").read_text())
    assert sum(learnt["chooser"]["controller"]["steps"].values()) > 0
    assert (newest / "speculation" / "rank_00001" / "suffix.bin").is_file()
