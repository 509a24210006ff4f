"""The suffix benchmark: its way of decoding, its laws, a whole run in small."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from megatron_tlt.bench import suffix
from megatron_tlt.bench.responses import PolicyLaw, TraceResponse, read_recorded, synthetic_responses
from megatron_tlt.errors import ConfigError
from megatron_tlt.speculation.ngram import NgramDrafter
from megatron_tlt.speculation.suffix import SuffixDrafter


def arguments_of(*values: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    suffix.add_arguments(parser)
    return parser.parse_args(values)


def test_a_response_seen_before_is_accepted_whole() -> None:
    tokens = tuple(range(10, 40))
    responses = [TraceResponse("p", epoch, (1, 2), tokens) for epoch in (1, 2)]
    accepted = suffix.decode([SuffixDrafter(prompt_tokens=2)], responses, 1, 4)
    # 30 rounds of nothing; then after a match of m tokens at most m drafts: 2, 4, 4, 4, 4, 4 and the last round's 1
    assert accepted == [0.0, (2 + 5 * 4 + 1) / 7]
    assert suffix.decode([NgramDrafter()], responses, 1, 4) == [0.0, 0.0], "it forgets a step"


def test_samples_side_by_side_and_one_after_another() -> None:
    tokens = tuple(range(10, 40))
    responses = [TraceResponse("p", 1, (1, 2), tokens) for _ in range(2)]
    # the first takes 30 rounds, the second 6 of four drafts and one token more
    assert suffix.decode([NgramDrafter()], responses, 1, 4) == [24 / 36]
    # side by side each is drafted from the other wherever that one is ahead
    assert suffix.decode([NgramDrafter()], responses, 2, 4)[0] > 24 / 36


@pytest.mark.parametrize("engines", [2, 8])
def test_over_engines_as_much_is_accepted_as_on_one(engines: int) -> None:
    """Five epochs over problems that are dealt anew in each; what other engines decoded is drafted from."""
    responses = suffix.reordered(synthetic_responses(PolicyLaw(), 24, 2, 5))
    order = [list(dict.fromkeys(r.problem for r in responses if r.epoch == epoch)) for epoch in (1, 2)]
    moved = sum(order[0].index(problem) % engines != i % engines for i, problem in enumerate(order[1]))
    assert moved > 24 / 3, "many problems come to another engine"
    one, many = (suffix.decode([SuffixDrafter() for _ in range(n)], responses, 8, 8) for n in (1, engines))
    assert one[-1] > 2 * one[0]
    assert all(accepted >= 0.95 * alone for accepted, alone in zip(many, one, strict=True))


def test_the_law_repeats_itself_and_only_where_it_should() -> None:
    responses = synthetic_responses(PolicyLaw(), 4, 2, 3)
    assert responses == synthetic_responses(PolicyLaw(), 4, 2, 3)
    assert [len({r.problem for r in responses if r.epoch == epoch}) for epoch in (1, 2, 3)] == [4, 4, 4]
    assert len({r.problem for r in responses}) == 4
    assert len({r.problem for r in synthetic_responses(PolicyLaw(repeated=False), 4, 2, 3)}) == 12
    still = synthetic_responses(PolicyLaw(drift=0.0, habit=1.0, slip=0.0), 4, 2, 3)
    assert len({(r.problem, r.tokens) for r in still}) == 4, "without change and chance all are the same"


def test_recorded_responses_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text(
        '{"problem": "p", "epoch": 1, "token_ids": [3, 4]}\n\n{"problem": 7, "epoch": 2, "token_ids": [5]}\n'
    )
    assert read_recorded(path) == [TraceResponse("p", 1, (), (3, 4)), TraceResponse("7", 2, (), (5,))]
    for bad in ('{"problem": "p", "epoch": 1}', '{"problem": "p", "epoch": 1, "token_ids": [-3]}', "[]", "{"):
        path.write_text('{"problem": "p", "epoch": 1, "token_ids": [3, 4]}\n' + bad + "\n")
        with pytest.raises(ConfigError, match=r"responses\.jsonl, line 2: .*allowed: problem, epoch, token_ids"):
            read_recorded(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_recorded(tmp_path / "none")


def test_a_small_run(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    recorded = synthetic_responses(PolicyLaw(), 3, 2, 2)
    rows = [{"problem": r.problem, "epoch": r.epoch, "token_ids": r.tokens, "prompt_ids": r.prompt} for r in recorded]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    small = ("--sizes", "2000", "4000", "--repeats", "2", "--appends", "30000", "--bound-mb", "1")
    result = suffix.run(arguments_of("--responses", str(path), *small))
    assert {row["part"] for row in result.rows} >= {"acceptance", "engines", "speed", "memory"}
    assert all(math.isfinite(target["value"]) for target in result.targets.values())
    assert result.targets["held_over_bound"]["met"]
    assert result.targets["accepted_8_engines_over_1_least_of_epochs"]["met"]
    assert result.targets["accepted_with_over_without_history_never_repeated"]["value"] == 1.0
    memory = next(row for row in result.rows if row["part"] == "memory")
    assert memory["stored_tokens"] == 30000 and memory["evictions"]
    with pytest.raises(ConfigError, match="no responses"):
        path.write_text("")
        suffix.run(arguments_of("--responses", str(path), *small))
