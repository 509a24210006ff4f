"""Clusters and workflows for the benchmark of plans over unequal devices."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

from megatron_tlt.planning.hetero.cluster import (
    Cluster,
    ClusterSection,
    HeldSection,
    LinkSection,
    NodeSection,
    build_cluster,
)
from megatron_tlt.planning.hetero.workflow import Task, Workflow
from megatron_tlt.planning.model_size import ModelSize

_KINDS = ("A100-80GB", "A100-40GB", "L40S-48GB", "L4-24GB")
# hidden, feed-forward, layers, heads, KV heads, vocabulary, tied embeddings: Qwen2.5's
_SIZES = {
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False),
}


def model(name: str) -> ModelSize:
    """One of the Qwen2.5 models."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip((*keys, "vocab_size", "tie_word_embeddings"), _SIZES[name], strict=True))
    return ModelSize.of(SimpleNamespace(model_type="qwen2", **sizes))


def step(sizes: ModelSize, sequences: int, response: float, longest: float, *, asynchronous: bool) -> Workflow:
    """A step of this package with a reference model and a drafter."""
    of = Task("rollout", "generate", sizes, sequences, 512.0, response, longest, weights_from="actor")
    return Workflow(
        (
            of,
            replace(of, name="reference", kind="score", after=("rollout",), weights_from=None),
            replace(
                of,
                name="actor",
                kind="train",
                after=("rollout", "reference"),
                weights_from=None,
                updates=2,
                scores_first=True,
            ),
            replace(of, name="drafter", kind="train", drafter=True, after=("rollout",), weights_from=None),
        ),
        asynchronous,
    )


def mixed_64() -> Cluster:
    """16 A100, 24 L40S and 24 L4 in eight nodes; the A100 have a faster network, the L4 are at another site."""
    nodes = (("a100", 2, "A100-80GB"), ("l40s", 3, "L40S-48GB"), ("l4", 3, "L4-24GB"))
    links = ((("*", "*"), 20, 1.56), (("a100-*", "a100-*"), 8, 12.5), (("a100-*", "l4-*"), 2000, 0.15))
    return build_cluster(
        ClusterSection(
            nodes=[NodeSection(name=n, count=c, devices=[HeldSection(device=d, count=8)]) for n, c, d in nodes],
            links=[
                LinkSection(between=list(ends), latency_us=wait, bandwidth=rate)
                for ends, wait, rate in (*links, (("l40s-*", "l4-*"), 2000, 0.15))
            ],
        )
    )


def small_instance(seed: int, most: int = 6) -> tuple[Cluster, Workflow]:
    """2 to ``most`` devices of random kinds in random nodes with random links, and a random step; it may not fit."""
    rng = random.Random(seed)
    left = rng.randint(2, most)
    nodes: list[NodeSection] = []
    while left:
        count = rng.randint(1, min(left, 4))
        nodes.append(NodeSection(name=f"n{len(nodes)}", devices=[HeldSection(device=rng.choice(_KINDS), count=count)]))
        left -= count
    links = [LinkSection(between=["*", "*"], latency_us=20, bandwidth=12.5)]
    for a in range(len(nodes)):
        for b in range(a):
            rate, wait = rng.choice(((12.5, 10), (1.5, 50), (0.15, 5000)))
            links.append(LinkSection(between=[f"n{b}", f"n{a}"], latency_us=wait, bandwidth=rate))
    sizes = model(rng.choice(("Qwen2.5-1.5B", "Qwen2.5-7B")))
    response = rng.choice((512.0, 2048.0))
    workflow = step(
        sizes, rng.choice((32, 64, 128)), response, rng.choice((2, 8)) * response, asynchronous=rng.random() < 0.5
    )
    kept = rng.choice(
        (("rollout", "actor"), ("rollout", "reference", "actor"), ("rollout", "reference", "actor", "drafter"))
    )
    tasks = tuple(
        replace(task, after=tuple(name for name in task.after if name in kept))
        for task in workflow.tasks
        if task.name in kept
    )
    return build_cluster(ClusterSection(nodes=nodes, links=links)), Workflow(tasks, workflow.asynchronous)
