"""Optimizer steps on a long-tailed batch: packed against padded, and balanced against round-robin ranks."""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_tlt.actor.batches import MicroBatches, form_micro_batches
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.bench.result import BenchmarkResult, interleave, ratio_of_medians
from megatron_tlt.config.schema import ActorConfig, ArchitectureConfig, RecipeConfig
from megatron_tlt.data.packing import balance, sequence_cost
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.models.recipe import write_untrained
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.platform.device import initialize_distributed, prepare

VOCAB = 128
PROMPT = 16
PADDED = ("padded, sorted by length", "padded, in order of arrival")
"""The compared forms; the target uses the first."""
PACKED = "packed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 24, 192], help="sequences in a step")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest response")
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=[1100, 2048, 4096], help="tokens per micro-batch to try"
    )
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks, whose shares are timed one by one")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats")


def long_tailed_samples(count: int, longest: int, seed: int = 0) -> RolloutBatch:
    """Random tokens; response lengths follow a Pareto law cut off at ``longest``, with a median near 40."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(count):
        length = PROMPT + min(longest, int(20 * rng.paretovariate(1.0)))
        sequences.append([rng.randrange(2, VOCAB) for _ in range(length)])
    return RolloutBatch.of_sequences(sequences, [PROMPT] * count)


def plan_in_order(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups neighbours in order of arrival, as many as fit ``max_tokens`` when padded to the longest of them.

    Returns lists of indices into ``lengths``; each occurs once, ascending. A sequence above ``max_tokens`` is alone.
    """
    groups: list[list[int]] = []
    for i, length in enumerate(lengths):
        if groups and (len(groups[-1]) + 1) * max(length, *(lengths[j] for j in groups[-1])) <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class _InOrder(Policy):
    """Forms micro-batches in the order of the samples, in one process."""

    def micro_batches(self, batch: RolloutBatch, alone: bool = False) -> MicroBatches:
        shape = self._batch_shape
        return form_micro_batches(batch, plan_in_order(batch.lengths, shape.max_tokens), shape, self._device)


def _policy(folder: Path, bound: int, form: str) -> Policy:
    actor = ActorConfig(
        transformer_impl="local", packing=form == PACKED, max_tokens_per_micro_batch=bound, optimizer={"lr": 0.0}
    )
    return (_InOrder if form == PADDED[1] else Policy)(folder, actor, seed=0)


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Each form uses its best bound; the learning rate is 0, so that all steps do the same work.

    The padded form sorted by length has little padding in steps with many sequences; in order of arrival it has much. A
    data-parallel rank's share of a step is small, so several sizes are measured; the target uses the median of the
    ratios to the sorted form. ``padded_over_packed_positions`` is an upper bound of the linear layers' gain.
    """
    prepare()
    initialize_distributed()
    result = BenchmarkResult(environment=describe_environment(), name="packing")
    with tempfile.TemporaryDirectory() as folder:
        architecture = ArchitectureConfig(max_position_embeddings=arguments.longest + PROMPT)
        write_untrained(Path(folder), architecture, RecipeConfig(), VOCAB, 1)
        policies = {
            form: {bound: _policy(Path(folder), bound, form) for bound in arguments.bounds}
            for form in (*PADDED, PACKED)
        }
    ratios, differences = zip(
        *(_compare(result, policies, count, arguments) for count in arguments.samples), strict=True
    )
    result.target("packed_over_padded_tokens_per_s", statistics.median(ratios), ">=", 2.2)
    result.target("relative_difference_of_loss", max(differences), "<=", 1e-5)
    _balance(result, policies[PACKED][max(arguments.bounds)], arguments)
    return result


def _compare(
    result: BenchmarkResult, policies: dict[str, dict[int, Policy]], count: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """Adds a row per padded form for steps of ``count`` samples.

    Returns the ratio of speeds to the sorted form, and the relative difference of all forms' losses.
    """
    samples = long_tailed_samples(count, arguments.longest)
    losses: dict[tuple[str, int], float] = {}

    def step(form: str, bound: int) -> None:
        losses[form, bound] = policies[form][bound].update(samples, negative_log_likelihood)["loss"]

    cases = {f"{form} {bound}": partial(step, form, bound) for form in policies for bound in policies[form]}
    times = interleave(cases, arguments.repeats, warmups=1)
    best = {
        form: min(policies[form], key=lambda bound: statistics.median(times[f"{form} {bound}"])) for form in policies
    }
    seconds = {form: times[f"{form} {bound}"] for form, bound in best.items()}
    positions = {
        form: sum(batch.tokens_RT.numel() for batch in policies[form][bound].micro_batches(samples))
        for form, bound in best.items()
    }
    tokens = sum(samples.lengths)
    ratios = {form: ratio_of_medians(seconds[form], seconds[PACKED]) for form in PADDED}
    for form in PADDED:
        result.rows.append(
            {
                "samples": count,
                "tokens": tokens,
                "against": form,
                "bounds": f"{best[form]}, packed {best[PACKED]}",
                "padded_over_packed_positions": positions[form] / positions[PACKED],
                "packed_tokens_per_s": tokens / statistics.median(seconds[PACKED]),
                "packed_over_padded": ratios[form],
                "seconds": {name: times[name] for name in times if name.startswith((form, PACKED))},
            }
        )
    return ratios[PADDED[0]]["ratio"], max(losses.values()) / min(losses.values()) - 1.0


def _balance(result: BenchmarkResult, policy: Policy, arguments: argparse.Namespace) -> None:
    """Times each rank's share alone, one after another on the same core."""
    samples = long_tailed_samples(max(arguments.samples), arguments.longest)
    costs = [sequence_cost(length, policy.model.attention_share) for length in samples.lengths]
    ranks = arguments.ranks
    shares = {
        "balanced": balance(costs, ranks),
        "in turn": [list(range(rank, samples.num_samples, ranks)) for rank in range(ranks)],
    }
    cases = {
        f"{name} {rank}": partial(policy.update, samples.select(share), negative_log_likelihood)
        for name, parts in shares.items()
        for rank, share in enumerate(parts)
    }
    times = interleave(cases, arguments.repeats, warmups=1)
    for name in shares:
        best = [min(times[f"{name} {rank}"]) for rank in range(ranks)]
        ratio = max(best) * ranks / sum(best)
        result.rows.append({"samples": f"{samples.num_samples}, {name}", "shares": best, "max_over_mean": ratio})
        if name == "balanced":
            result.target("time_max_over_mean", ratio, "<=", 1.10)
