"""Optimizer steps on a long-tailed batch: packed against padded, and work balanced against dealt out in turn."""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.algorithms.types import TrainingSample
from megatron_tlt.config.schema import ActorConfig, ArchitectureConfig, RecipeConfig
from megatron_tlt.data.packing import balance, sequence_cost
from megatron_tlt.models.recipe import write_untrained
from megatron_tlt.observe.benchmark import BenchmarkResult, interleave, ratio_of_medians
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.platform.device import initialize_distributed, prepare

VOCAB = 128
PROMPT = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 24, 192], help="sequences in a step")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest response")
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=[1100, 2048, 4096], help="tokens per micro-batch to try"
    )
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks whose shares are timed one by one")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats")


def long_tailed_samples(count: int, longest: int, seed: int = 0) -> list[TrainingSample]:
    """Random tokens; response lengths follow a Pareto law cut off at ``longest``, with a median near 40."""
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        length = PROMPT + min(longest, int(20 * rng.paretovariate(1.0)))
        samples.append(TrainingSample(tuple(rng.randrange(2, VOCAB) for _ in range(length)), PROMPT))
    return samples


def _policy(folder: Path, bound: int, packing: bool) -> Policy:
    actor = ActorConfig(
        transformer_impl="local", packing=packing, max_tokens_per_micro_batch=bound, optimizer={"lr": 0.0}
    )
    return Policy(folder, actor, seed=0)


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Every form takes the bound that suits it best; the learning rate is 0, so that all steps do the same work.

    The padded form is sorted by length, which leaves little padding where a step has many sequences. A data-parallel
    rank's share of a step is small, so several sizes are measured; the target is held against their median.
    """
    prepare()
    initialize_distributed()
    result = BenchmarkResult(environment=describe_environment(), name="packing")
    with tempfile.TemporaryDirectory() as folder:
        architecture = ArchitectureConfig(max_position_embeddings=arguments.longest + PROMPT)
        write_untrained(Path(folder), architecture, RecipeConfig(), VOCAB, 1)
        policies = {
            form: {bound: _policy(Path(folder), bound, form == "packed") for bound in arguments.bounds}
            for form in ("padded", "packed")
        }
    ratios, differences = zip(
        *(_compare(result, policies, count, arguments) for count in arguments.samples), strict=True
    )
    result.target("packed_over_padded_tokens_per_s", statistics.median(ratios), ">=", 2.2)
    result.target("relative_difference_of_loss", max(differences), "<=", 1e-5)
    _balance(result, policies["packed"][max(arguments.bounds)], arguments)
    return result


def _compare(
    result: BenchmarkResult, policies: dict[str, dict[int, Policy]], count: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """Adds a row for steps of ``count`` samples; returns the ratio of speeds and the relative difference of losses."""
    samples = long_tailed_samples(count, arguments.longest)
    losses: dict[tuple[str, int], float] = {}

    def step(form: str, bound: int) -> None:
        losses[form, bound] = policies[form][bound].update(samples, negative_log_likelihood)["loss"]

    cases = {f"{form} {bound}": partial(step, form, bound) for form in policies for bound in policies[form]}
    times = interleave(cases, arguments.repeats, warmups=1)
    best = {
        form: min((name for name in cases if name.startswith(form)), key=lambda name: statistics.median(times[name]))
        for form in policies
    }
    ratio = ratio_of_medians(times[best["padded"]], times[best["packed"]])
    tokens = sum(len(sample.token_ids) for sample in samples)
    result.rows.append(
        {
            "samples": count,
            "tokens": tokens,
            "padded": best["padded"].split()[1],
            "packed": best["packed"].split()[1],
            "packed_tokens_per_s": tokens / statistics.median(times[best["packed"]]),
            "packed_over_padded": ratio,
            "seconds": times,
        }
    )
    return ratio["ratio"], max(losses.values()) / min(losses.values()) - 1.0


def _balance(result: BenchmarkResult, policy: Policy, arguments: argparse.Namespace) -> None:
    """Times each rank's share by itself, one after another on the same core."""
    samples = long_tailed_samples(max(arguments.samples), arguments.longest)
    costs = [sequence_cost(len(sample.token_ids), policy.model.attention_share) for sample in samples]
    ranks = arguments.ranks
    shares = {
        "balanced": balance(costs, ranks),
        "in turn": [list(range(rank, len(samples), ranks)) for rank in range(ranks)],
    }
    cases = {
        f"{name} {rank}": partial(policy.update, [samples[i] for i in share], negative_log_likelihood)
        for name, parts in shares.items()
        for rank, share in enumerate(parts)
    }
    times = interleave(cases, arguments.repeats, warmups=1)
    for name in shares:
        best = [min(times[f"{name} {rank}"]) for rank in range(ranks)]
        ratio = max(best) * ranks / sum(best)
        result.rows.append({"samples": f"{len(samples)}, {name}", "shares": best, "max_over_mean": ratio})
        if name == "balanced":
            result.target("time_max_over_mean", ratio, "<=", 1.10)
