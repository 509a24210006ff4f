"""Optimizer steps on a long-tailed batch: packed against padded, and work balanced against dealt out in turn."""

from __future__ import annotations

import argparse
import random
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
    parser.add_argument("--samples", type=int, default=192, help="sequences in a step")
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
    """Every form takes the bound that suits it best; the learning rate is 0, so that all steps do the same work."""
    prepare()
    initialize_distributed()
    samples = long_tailed_samples(arguments.samples, arguments.longest)
    tokens = sum(len(sample.token_ids) for sample in samples)
    result = BenchmarkResult(environment=describe_environment(), name="packing")
    with tempfile.TemporaryDirectory() as folder:
        architecture = ArchitectureConfig(max_position_embeddings=arguments.longest + PROMPT)
        write_untrained(Path(folder), architecture, RecipeConfig(), VOCAB, 1)
        policies = {
            (form, bound): _policy(Path(folder), bound, form == "packed")
            for form in ("padded", "packed")
            for bound in arguments.bounds
        }
    losses: dict[tuple[str, int], float] = {}

    def step(key: tuple[str, int]) -> None:
        losses[key] = policies[key].update(samples, negative_log_likelihood)["loss"]

    names = {f"{form} {bound}": (form, bound) for form, bound in policies}
    times = interleave({name: partial(step, key) for name, key in names.items()}, arguments.repeats, warmups=1)
    medians = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in times.items()}
    for name, (form, bound) in names.items():
        result.rows.append(
            {
                "form": form,
                "bound": bound,
                "seconds": times[name],
                "tokens_per_s": tokens / medians[name],
                "loss": losses[form, bound],
            }
        )
    best = {
        form: min((name for name in names if name.startswith(form)), key=medians.__getitem__)
        for form in ("padded", "packed")
    }
    speedup = ratio_of_medians(times[best["padded"]], times[best["packed"]])
    result.rows.append({"form": f"{best['packed']} over {best['padded']}", "ratio": speedup})
    result.target("packed_over_padded_tokens_per_s", speedup["ratio"], ">=", 2.2)
    spread = max(losses.values()) / min(losses.values()) - 1.0
    result.target("relative_difference_of_loss", spread, "<=", 1e-5)
    _balance(result, policies[names[best["packed"]]], samples, arguments)
    return result


def _balance(
    result: BenchmarkResult, policy: Policy, samples: list[TrainingSample], arguments: argparse.Namespace
) -> None:
    """Times each rank's share by itself, one after another on the same core."""
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
        result.rows.append({"form": f"shares {name}", "seconds": best, "max_over_mean": ratio})
        if name == "balanced":
            result.target("time_max_over_mean", ratio, "<=", 1.10)
