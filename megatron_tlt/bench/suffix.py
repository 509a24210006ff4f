"""Drafters without a model: drafts accepted per epoch, speed, memory."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_tlt.bench.arctic import ArcticDrafter, SuffixDecodingCache
from megatron_tlt.bench.responses import PolicyLaw, TraceResponse, read_recorded, synthetic_responses
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.suffix_speed import bounded_memory, speed
from megatron_tlt.config.speculation import SuffixConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.speculation.ngram import NgramDrafter
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.token_drafter import FinishedResponse, TokenDrafter
from megatron_tlt.tasks.seeding import stable_int
from megatron_tlt.trainer.dealing import Dealing

WINDOWS = (0, 1, 4, 16)
OURS = "suffix, window 16"
FORGETFUL = "suffix, window 0"
"""Learns only from samples of the same epoch."""
EVERYWHERE = "suffix, global"
ENGINES = (1, 2, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--responses", type=Path, help="JSON lines: problem, epoch, token_ids (default: a stated distribution)"
    )
    parser.add_argument("--problems", type=int, default=96, help="problems per epoch")
    parser.add_argument("--samples", type=int, default=4, help="samples per problem, decoded concurrently")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--concurrent", type=int, default=32, help="concurrent requests")
    parser.add_argument("--drafts", type=int, default=8, help="maximum draft tokens per round")
    parser.add_argument("--depth", type=int, default=32, help="depth of the trees")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10**4, 10**6, 10**7], help="numbers of stored tokens to time"
    )
    parser.add_argument("--repeats", type=int, default=15, help="responses timed at each size, interleaved")
    parser.add_argument("--appends", type=int, default=10**7, help="tokens appended under the memory bound")
    parser.add_argument("--bound-mb", type=int, default=256, help="that bound")


def decode(
    drafters: Sequence[TokenDrafter], responses: Sequence[TraceResponse], concurrent: int, drafts: int
) -> list[float]:
    """Decodes recorded responses greedily with drafts; returns the drafts accepted per round in each epoch.

    Each engine has a drafter. An epoch is a training step: its problems are assigned to the engines in their order in
    the step, as by the trainer; afterwards every engine receives all responses of the step.
    """
    accepted_per_round, dealing = [], Dealing(len(drafters))
    for _, group in groupby(responses, lambda response: response.epoch):
        epoch = list(group)
        positions = {problem: i for i, problem in enumerate(dict.fromkeys(response.problem for response in epoch))}
        accepted = rounds = 0
        for engine, drafter in enumerate(drafters):
            drafter.begin_step()
            share = [r for r in epoch if dealing.engine_of(positions[r.problem]) == engine]
            more, more_rounds = _decode_share(drafter, share, concurrent, drafts)
            accepted, rounds = accepted + more, rounds + more_rounds
        for drafter in drafters:
            drafter.end_rollout(FinishedResponse(r.problem, r.prompt, r.tokens) for r in epoch)
        accepted_per_round.append(accepted / rounds)
    return accepted_per_round


def _decode_share(
    drafter: TokenDrafter, responses: Sequence[TraceResponse], concurrent: int, drafts: int
) -> tuple[int, int]:
    """One engine's rollout: accepted drafts and rounds.

    A round verifies one proposal: it accepts the longest prefix that matches the response, and one more token follows.
    ``concurrent`` requests decode at once, in the given order; when one ends, the next starts.
    """
    waiting = list(responses)[::-1]
    decoding: dict[str, tuple[TraceResponse, int]] = {}
    rounds = accepted = number = 0
    while waiting or decoding:
        while waiting and len(decoding) < concurrent:
            number += 1
            response = waiting.pop()
            drafter.start(str(number), response.problem, response.prompt)
            decoding[str(number)] = (response, 0)
        for request_id, (response, done) in list(decoding.items()):
            left = response.tokens[done:]
            proposal = drafter.propose(request_id, drafts).tokens
            good = 0
            while good < min(len(proposal), len(left) - 1) and proposal[good] == left[good]:
                good += 1
            rounds, accepted = rounds + 1, accepted + good
            drafter.extend(request_id, left[: good + 1])
            decoding[request_id] = (response, done + good + 1)
            if done + good + 1 >= len(response.tokens):
                drafter.finish(request_id)
                del decoding[request_id]
    return accepted, rounds


def reordered(responses: Sequence[TraceResponse], seed: int = 0) -> list[TraceResponse]:
    """Reorders each epoch's problems, as in a file's rows, so that another engine decodes them."""
    shuffled = []
    for epoch, group in groupby(responses, lambda response: response.epoch):
        by_problem: dict[str, list[TraceResponse]] = {}
        for response in group:
            by_problem.setdefault(response.problem, []).append(response)
        problems = list(by_problem)
        random.Random(stable_int(seed, "epoch", epoch)).shuffle(problems)
        shuffled += [response for problem in problems for response in by_problem[problem]]
    return shuffled


def _engines(result: BenchmarkResult, responses: Sequence[TraceResponse], arguments: argparse.Namespace) -> None:
    """The same problems over several engines: responses of one are drafted from by the others in the next epoch."""
    shuffled = reordered(responses)
    found = {}
    for engines in ENGINES:
        drafters = [SuffixDrafter(SuffixConfig(max_depth=arguments.depth)) for _ in range(engines)]
        found[engines] = decode(drafters, shuffled, arguments.concurrent, arguments.drafts)
        result.rows.append(_row("engines", f"suffix, {engines} engine{'s' * (engines > 1)}", found[engines]))
    for engines in ENGINES[1:]:
        ratios = [many / one if one else 1.0 for many, one in zip(found[engines], found[1], strict=True)]
        result.target(f"accepted_{engines}_engines_over_1_least_of_epochs", min(ratios), ">=", 0.95)


def _drafters(depth: int) -> dict[str, Callable[[], TokenDrafter]]:
    def suffix(**changes: Any) -> Callable[[], TokenDrafter]:
        return lambda: SuffixDrafter(SuffixConfig(max_depth=depth, **changes))

    drafters: dict[str, Callable[[], TokenDrafter]] = {
        f"suffix, window {window}": suffix(window=window) for window in WINDOWS
    }
    drafters[EVERYWHERE] = suffix(scope="global")
    drafters["suffix, without own tree"] = suffix(own_tree=False)
    drafters["n-gram"] = NgramDrafter
    if SuffixDecodingCache is not None:
        drafters["arctic, global"] = lambda: ArcticDrafter(depth, per_problem=False)
        drafters["arctic, per problem"] = lambda: ArcticDrafter(depth, per_problem=True)
    return drafters


def _laws(arguments: argparse.Namespace) -> dict[str, list[TraceResponse]]:
    """Responses by epoch to problems that repeat, and to problems that never do."""
    if arguments.responses is None:
        sizes = (arguments.problems, arguments.samples, arguments.epochs)
        return {
            "repeated": synthetic_responses(PolicyLaw(), *sizes),
            "never repeated": synthetic_responses(PolicyLaw(repeated=False), *sizes),
        }
    recorded = sorted(read_recorded(arguments.responses), key=lambda response: response.epoch)
    if not recorded:
        raise ConfigError(f"{arguments.responses}: no responses")
    renamed = [replace(response, problem=f"{response.problem} in epoch {response.epoch}") for response in recorded]
    return {"repeated": recorded, "never repeated": renamed}


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Rows by ``part``: acceptance per epoch, the same over engines, speed by stored tokens, bounded memory.

    Raises:
        ConfigError: ``--responses`` is not such a file.
    """
    result = BenchmarkResult(environment=describe_environment(), name="suffix")
    laws = _laws(arguments)
    bounded_memory(result, arguments.appends, arguments.bound_mb << 20)
    _acceptance(result, laws, arguments)
    _engines(result, laws["repeated"], arguments)
    if SuffixDecodingCache is None:
        result.rows.append({"part": "arctic-inference", "case": "not installed: not compared"})
    speed(result, arguments.sizes, arguments.repeats, arguments.depth, arguments.drafts)
    return result


def _row(part: str, case: str, accepted: Sequence[float]) -> dict[str, Any]:
    by_epoch = {str(epoch): value for epoch, value in enumerate(accepted, 1)}
    return {"part": part, "case": case, "accepted_per_round": by_epoch}


def _acceptance(result: BenchmarkResult, laws: dict[str, list[TraceResponse]], arguments: argparse.Namespace) -> None:
    found: dict[tuple[str, str], list[float]] = {}
    for law, responses in laws.items():
        for name, make in _drafters(arguments.depth).items():
            accepted = found[law, name] = decode([make()], responses, arguments.concurrent, arguments.drafts)
            result.rows.append(_row("acceptance", f"{name}, {law}", accepted))
    ours, control = found["repeated", OURS], found["never repeated", OURS]
    growth = ours[-1] / ours[0]
    result.target("accepted_last_over_first_epoch", growth, ">=", 1.2)
    # a more certain policy is drafted better without history: the control's rise shows that part
    result.target("growth_over_that_of_never_repeated", growth / (control[-1] / control[0]), ">=", 1.2)
    forgetful = found["never repeated", FORGETFUL][-1]
    result.target("accepted_with_over_without_history_never_repeated", control[-1] / forgetful, "<=", 1.02)
    result.target("accepted_problem_over_global", ours[-1] / found["repeated", EVERYWHERE][-1], ">=", 1.0)
    result.target("accepted_suffix_over_ngram", ours[-1] / found["repeated", "n-gram"][-1], ">=", 1.0)
    arctic = [found["repeated", name][-1] for name in _drafters(arguments.depth) if name.startswith("arctic")]
    if arctic:
        result.target("accepted_over_best_arctic", ours[-1] / max(arctic), ">=", 1.0)
