"""``tlt simulate CONFIG``: estimates the gain by speculation, the spot trainer and tail batching on a cluster."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_tlt.cli import preflight, runs, simulate_failures
from megatron_tlt.cli.plan_tables import table_of
from megatron_tlt.cli.planned import memory_of
from megatron_tlt.config.drafter_kinds import MODEL_FREE
from megatron_tlt.config.rounding import times_at_least
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import DEFAULT_DEVICE, device, known_devices
from megatron_tlt.planning.job import job_of
from megatron_tlt.planning.machine import find_machine
from megatron_tlt.planning.simulation.acceptance import DraftShape, chain
from megatron_tlt.planning.simulation.constants import Constants, documented, of_kind, shipped
from megatron_tlt.planning.simulation.from_config import scenario_of
from megatron_tlt.planning.simulation.lengths import LengthDistribution, LongTail, Recorded, fit_long_tail, read_lengths
from megatron_tlt.planning.simulation.policies import POLICIES
from megatron_tlt.planning.simulation.rounds import RoundKind
from megatron_tlt.planning.simulation.scenario import Scenario
from megatron_tlt.planning.simulation.steps import PHASES, Outcome, simulate, summarize

_MANY = 50_000
"""Responses per step above which one seed is enough by default."""
_MOST_DRAFTS = 7
"""Length of the simulated chain if the config has no learned drafter."""
_QUANTILES, _UNSEEN_CUT, _MOST_CUT = 1000, 0.01, 0.5
"""Quantiles that are looked at, and the shares of cut lengths that need no note, and that are refused."""
_PRICES: dict[RoundKind | None, str] = {
    "tail": "trains on responses that were kept because they are short",
    "continue": "trains on tokens of earlier policies, and on short problems first",
    "partial": "trains on tokens of earlier policies, and on short problems first",
    "one_step_off": "trains on tokens of the policy before",
}
_PLOTS = (".svg", ".png", ".pdf")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("simulate", help="simulate steps of a config's cluster, policy by policy")
    runs.add_config_arguments(parser)
    parser.add_argument("--failures", action="store_true", help="project the effective training time with failures")
    simulate_failures.add_arguments(parser)
    parser.add_argument(
        "--device", default=DEFAULT_DEVICE, metavar="NAME", help=f"one of {', '.join(sorted(known_devices()))}"
    )
    parser.add_argument("--nodes", metavar="N,N,...", help="numbers of nodes (default: launcher.nnodes)")
    parser.add_argument(
        "--policies", metavar="P,P,...", default=",".join(POLICIES), help=f"any of {', '.join(POLICIES)} (default: all)"
    )
    parser.add_argument("--lengths", metavar="PATH", type=Path, help="recorded response lengths, or a run's folder")
    parser.add_argument("--fit", action="store_true", help="draw from a distribution fitted to --lengths")
    parser.add_argument("--prompt-tokens", type=float, metavar="N", help="per prompt (default: half of the longest)")
    parser.add_argument("--steps", type=int, default=5, help="number of RL steps; tail batching has a cycle of 5")
    parser.add_argument("--seeds", type=int, help=f"repetitions (default 3; 1 above {_MANY:,} responses a step)")
    parser.add_argument("--first-seed", type=int, default=0, help="first of consecutive seeds")
    parser.add_argument(
        "--constant", metavar="NAME=VALUE", action="append", default=[], help="override a constant of the data file"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures to FILE")
    parser.add_argument("--plot", metavar="FILE", type=Path, help=f"write a plot to FILE ({', '.join(_PLOTS)})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = preflight.load_checked(arguments.config, arguments.overrides, starts=False)
    if arguments.failures:
        return simulate_failures.run(arguments, config)
    constants = _constants(arguments.constant)
    policies, nodes = _policies(arguments.policies), _nodes(arguments, config)
    lengths = _lengths(arguments, config, constants)
    arms, note = _arms(config)
    notes = [note, _cut(lengths, config.rollout.max_response_tokens)]
    scenario = scenario_of(config, device(arguments.device), constants, lengths, arms, arguments.prompt_tokens)
    machine = find_machine(arguments.device)  # the KV cache as `tlt plan` has it
    scenario = replace(scenario, kv_tokens=memory_of(config, job_of(config, not machine.is_cpu), machine).cache_tokens)
    if any("tail" in policy or "continue" in policy for policy in policies):
        notes.append(_cycles(scenario, arguments.steps))
    seeds = range(arguments.first_seed, arguments.first_seed + _seeds(arguments, scenario))
    for count in nodes:
        scenario.on(count).check()
    by_nodes = {
        count: simulate(scenario.on(count), policies, seeds, arguments.steps, watch=arguments.plot is not None)
        for count in nodes
    }
    runs.write_json(arguments.json, _figures(scenario, by_nodes))
    _print(scenario, by_nodes, [one for one in notes if one], len(seeds), arguments.steps)
    if arguments.plot is not None:
        from megatron_tlt.planning.simulation.plots import plot

        plot(by_nodes, arguments.plot, f"{config.run.name}: {max(by_nodes)} node(s) of {arguments.device}, simulated")
        print(f"plot: {arguments.plot}")
    return 0


def _cycles(scenario: Scenario, steps: int) -> str | None:
    """A note if the steps are not whole cycles of tail batching, whose long rounds would be too few."""
    left = times_at_least(scenario.tail.eta_prompts, scenario.prompts) - scenario.prompts
    shorts = math.lcm(scenario.prompts, left) // left if left else 0
    cycle = shorts + shorts * left // scenario.prompts
    if not left or steps % cycle == 0:
        return None
    return f"--steps {steps}: tail batching has a cycle of {cycle} steps here, and means over other numbers favour it"


def _constants(given: list[str]) -> Constants:
    allowed = [field.name for field in fields(Constants)]
    changed: dict[str, float] = {}
    for item in given:
        name, _, value = item.partition("=")
        try:
            changed[name] = float(value)
        except ValueError:
            raise ConfigError(f"--constant: found {item!r}; allowed: NAME=VALUE with a number") from None
        if name not in allowed:
            raise ConfigError(f"--constant: found {name!r}; allowed: {', '.join(allowed)}")
        if not 0.0 < changed[name] < float("inf"):
            raise ConfigError(f"--constant: {name} is {changed[name]:g}; allowed: above 0")
    return replace(shipped(), **changed)


def _policies(given: str) -> list[str]:
    names = [name.strip() for name in given.split(",")]
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError(f"--policies: found {', '.join(unknown)}; allowed: {', '.join(POLICIES)}")
    return list(dict.fromkeys(["off", *names]))  # baseline of the comparison


def _nodes(arguments: argparse.Namespace, config: TltConfig) -> list[int]:
    if arguments.plot is not None and arguments.plot.suffix not in _PLOTS:
        raise ConfigError(f"--plot: found {arguments.plot.name}; allowed: one of the extensions {', '.join(_PLOTS)}")
    for name in ("steps", "seeds"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}: found {value}; allowed: at least 1")
    if arguments.nodes is None:
        return [config.launcher.nnodes]
    try:
        counts = sorted({int(count) for count in arguments.nodes.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise ConfigError(f"--nodes: found {arguments.nodes!r}; allowed: positive integers, separated by commas")
    return counts


def _lengths(arguments: argparse.Namespace, config: TltConfig, constants: Constants) -> LengthDistribution:
    if arguments.lengths is None:
        if arguments.fit:
            raise ConfigError("--fit: found no --lengths; allowed: only with recorded lengths")
        return LongTail(constants.length_median, constants.length_sigma)
    recorded = read_lengths(arguments.lengths)
    return fit_long_tail(recorded.tokens, config.rollout.max_response_tokens) if arguments.fit else recorded


def _cut(lengths: LengthDistribution, longest: int) -> str | None:
    """A note if the config's limit cuts some of the lengths.

    Raises:
        ConfigError: it cuts more than half of them, so the simulated lengths would be the limit's, not the given ones.
    """
    drawn = lengths.at(np.array([NormalDist().inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)]), np.inf)
    share = float(np.mean(drawn > longest))
    found = f"{longest} cuts {share:.1%} of the lengths, which go up to {drawn.max():.0f}"
    if share > _MOST_CUT:
        raise ConfigError(
            f"rollout.max_response_tokens: {found}; allowed: at most {_MOST_CUT:.0%} (a larger limit, other --lengths, "
            "or --constant length_median=TOKENS)"
        )
    return f"rollout.max_response_tokens: {found}" if share > _UNSEEN_CUT else None


def _arms(config: TltConfig) -> tuple[list[DraftShape], str | None]:
    """The strategies of speculation, the static one first, and a note on what was assumed."""
    from megatron_tlt.rollout.adaptive import default_strategies, strategies_of

    speculation, note = config.speculation, None
    strategies = strategies_of(speculation)
    if not speculation.enabled or speculation.drafter in MODEL_FREE:
        found = speculation.drafter if speculation.enabled else "nothing"
        note = f"the config drafts with {found}: an EAGLE head with chains of up to {_MOST_DRAFTS} is simulated instead"
        strategies, static = default_strategies("eagle", _MOST_DRAFTS), ("eagle", 3)
    else:
        static = (speculation.drafter, speculation.num_speculative_tokens)
    found_arms = {
        # a pair is simulated as its head, for which the simulation has more data
        (one.drafters[-1], one.num_tokens): chain(one.num_tokens, one.drafters[-1])
        for one in strategies
        if one.num_tokens
    }
    first = found_arms.pop(static, chain(static[1], static[0]))
    return [first, *found_arms.values()], note


def _seeds(arguments: argparse.Namespace, scenario: Scenario) -> int:
    if arguments.seeds is not None:
        return int(arguments.seeds)
    return 1 if scenario.prompts * scenario.group > _MANY else 3


def _figures(scenario: Scenario, by_nodes: dict[int, dict[str, Outcome]]) -> dict[str, Any]:
    constants = {
        name: {**documented()[name], "value": getattr(scenario.constants, name)}
        | (
            {}
            if getattr(scenario.constants, name) == documented()[name]["value"]
            else {"kind": "given", "source": None}
        )
        for name in documented()
    }
    law = scenario.lengths
    lengths = {"recorded": len(law.tokens)} if isinstance(law, Recorded) else vars(law)
    return {
        "device": scenario.device.name,
        "devices_per_node": scenario.per_node,
        "engine_devices": scenario.engine_devices,
        "responses": scenario.prompts * scenario.group,
        "prompt_tokens": scenario.prompt_tokens,
        "kv_tokens": scenario.limits().kv_tokens,
        "actor": asdict(scenario.actor),
        "strategies": [arm.name for arm in scenario.arms],
        "lengths": lengths,
        "constants": constants,
        "nodes": {
            str(count): [{**row, "step_s_by_seed": outcomes[row["policy"]].totals()} for row in summarize(outcomes)]
            for count, outcomes in by_nodes.items()
        },
    }


def _print(
    scenario: Scenario, by_nodes: dict[int, dict[str, Outcome]], notes: list[str], seeds: int, steps: int
) -> None:
    console, law = Console(), scenario.lengths
    said = (
        f"{len(law.tokens)} recorded lengths"
        if isinstance(law, Recorded)
        else f"lengths log-normal, median {law.median:.0f}, sigma {law.sigma:.2f}"
        if isinstance(law, LongTail)
        else "lengths given"
    )
    cache = f"{int(scenario.limits().kv_tokens):,}"
    console.print(
        f"{scenario.prompts} prompts x {scenario.group} responses of up to {scenario.max_response_tokens} tokens "
        f"({said}); engines of {scenario.engine_devices} x {scenario.device.name}, KV cache {cache} tokens; "
        f"{seeds} seed(s) of {steps} step(s)",
        highlight=False,
    )
    for note in notes:
        console.print(f"note: {note}", highlight=False)
    for count, outcomes in by_nodes.items():
        devices, engines = scenario.on(count).devices, scenario.on(count).engines
        rows = summarize(outcomes)
        console.print(_times(rows, f"{count} node(s), {devices:,} devices, {engines:,} engines: seconds of a step"))
        if seeds > 1:
            console.print(_ranges(rows), highlight=False)
        console.print(_rollouts(rows))
        console.print(_advice(rows), highlight=False)
    fitted = ", ".join(f"{name} {getattr(scenario.constants, name):.4g}" for name in of_kind("fitted"))
    console.print(
        f"computed, not measured; of the constants {fitted} were fitted to TLT's 7B runs, the sources of the others "
        "are in planning/simulation/constants.yaml and planning/constants.yaml",
        highlight=False,
    )


def _times(rows: list[dict[str, Any]], title: str) -> Table:
    table = table_of(title, "policy", "speed-up", "step", *(name.replace("_", " ") for name in PHASES))
    for row in rows:
        seconds = (row[f"{name}_s"] for name in ("step", *PHASES))
        table.add_row(row["policy"], f"{row['speedup']['ratio']:.2f}", *(f"{value:.1f}" for value in seconds))
    return table


def _ranges(rows: list[dict[str, Any]]) -> str:
    ranges = (f"{row['policy']} {row['speedup']['low']:.2f} to {row['speedup']['high']:.2f}" for row in rows[1:])
    return f"speed-ups by seed: {', '.join(ranges)}"


def _advice(rows: list[dict[str, Any]]) -> str:
    """Which policy pays: of all, and of those that change nothing but time."""
    best = max(rows, key=lambda row: row["speedup"]["ratio"])
    exact = max(
        (row for row in rows if POLICIES[row["policy"]].is_synchronous), key=lambda row: row["speedup"]["ratio"]
    )
    said = f"fastest: {best['policy']}, {best['speedup']['ratio']:.2f} times as fast as off"
    if best is exact:
        return said
    return (
        f"{said}, which {_PRICES[POLICIES[best['policy']].rounds]}; of those that only save time: {exact['policy']}, "
        f"{exact['speedup']['ratio']:.2f}"
    )


def _rollouts(rows: list[dict[str, Any]]) -> Table:
    table = table_of(
        "the rollout", "policy", "idle", "speculating", "tokens/round", "drafter steps", "streamed", "kept length (all)"
    )
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['idle']:.0%}",
            f"{row['speculating']:.0%}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['drafter_steps']:.0f}",
            f"{row['streamed']:.0%}",
            f"{row['kept_length_mean']:.0f} ({row['full_length_mean']:.0f})",
        )
    return table
