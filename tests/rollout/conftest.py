"""One tiny model and its engines, shared by this folder's tests (an engine takes seconds to start)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import AdaptiveConfig, NgramConfig, SpeculationConfig
from megatron_tlt.speculation.strategy import MODEL_FREE, OFF, Strategy
from megatron_tlt.speculation.suffix import SuffixDrafter
from tests.helpers.eagle_heads import build_eagle_head
from tests.helpers.tiny_models import build_qwen2, load_qwen2, logits_of, write_letters_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine

VOCAB = 32
# blocks of 32 tokens (128 by default on a CPU), so that these short prompts meet the prefix cache
ROLLOUT = RolloutConfig(
    max_prompt_tokens=80,
    max_response_tokens=64,
    vllm={"dtype": "float32", "max_num_seqs": 256, "block_size": 32},
)
# single tokens are looked up, so that any prompt which holds the whole vocabulary leads to drafts at every position
SPECULATION = SpeculationConfig(num_speculative_tokens=3, ngram=NgramConfig(prompt_lookup_min=1, prompt_lookup_max=3))
NUM_DRAFTS = 3
NGRAM = Strategy("ngram", NUM_DRAFTS)


def strategies_of(engine: VllmEngine) -> list[Strategy]:
    """Off, every drafter of the engine with one token and with the most; drafts that are sure, and a pair's."""
    sure = [Strategy(engine.drafters[-1], NUM_DRAFTS, least_percent=5)]
    if "suffix" in engine.drafters and engine.drafters[-1] not in MODEL_FREE:
        sure.append(Strategy(f"suffix+{engine.drafters[-1]}", NUM_DRAFTS, least_percent=5))
    return [OFF, *(Strategy(name, length) for name in engine.drafters for length in (1, NUM_DRAFTS)), *sure]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_qwen2(tmp_path_factory.mktemp("qwen2"), vocab_size=VOCAB, tie=False, scale=0.16)
    write_letters_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Qwen2ForCausalLM:
    return load_qwen2(model_folder)


@pytest.fixture(scope="session")
def engine(model_folder: Path) -> Iterator[VllmEngine]:
    """An engine that speculates."""
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(model_folder, ROLLOUT, SPECULATION, seed=7, token_drafters={"suffix": SuffixDrafter()})
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def plain_engine(model_folder: Path, engine: VllmEngine) -> Iterator[VllmEngine]:
    """An engine built without speculation (after the other one, which owns the process group)."""
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(model_folder, ROLLOUT, SpeculationConfig(enabled=False), seed=7)
    yield engine
    engine.shutdown()


HEADS = [
    ("eagle", None, "greedy"),
    ("eagle3", None, "probabilistic"),
    ("eagle3", 20, "greedy"),
    ("eagle3", 20, "probabilistic"),
]
"""Kind, size of the draft vocabulary, how drafts are chosen."""


@pytest.fixture(scope="session", params=HEADS, ids=lambda each: "-".join(str(part) for part in each if part))
def head_and_method(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    kind, drafted, method = request.param
    return build_eagle_head(kind, model_folder, tmp_path_factory.mktemp("heads") / kind, drafted=drafted), method


@pytest.fixture(scope="session")
def head(head_and_method: tuple[Path, str]) -> Path:
    return head_and_method[0]


@pytest.fixture(scope="session")
def drafting(head_and_method: tuple[Path, str], model_folder: Path, plain_engine: VllmEngine) -> Iterator[VllmEngine]:
    """An engine with that drafter (after the others, one of which owns the process group)."""
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    head, method = head_and_method
    speculation = SPECULATION.model_copy(
        update={
            "drafter": head.name,
            "path": head,
            "draft_sample_method": method,
            "adaptive": AdaptiveConfig(strategies=["off", "ngram-3", "suffix-3", f"{head.name}-3"]),
        }
    )
    engine = VllmEngine(model_folder, ROLLOUT, speculation, seed=7)
    yield engine
    engine.shutdown()


def likely_path(edges: torch.Tensor) -> list[int]:
    """A path through all nodes along heavy edges; edges (nodes, nodes), taken from the heaviest down where they fit."""
    follower: dict[int, int] = {}
    start = {node: node for node in range(len(edges))}  # of the piece that ends in a node
    for edge in edges.flatten().argsort(descending=True).tolist():
        a, b = divmod(edge, len(edges))
        if a in start and b in start.values() and start[a] != b:
            end = next(node for node, first in start.items() if first == b)
            follower[a], start[end] = b, start.pop(a)
    path = list(start.values())
    while path[-1] in follower:
        path.append(follower[path[-1]])
    return path


@pytest.fixture(scope="session")
def prompt(reference: Qwen2ForCausalLM) -> tuple[int, ...]:
    """Each token of the vocabulary once, and one more: the first block of the prefix cache and a token.

    Whatever is sampled is found in it and drafted from it. A token's follower is likely to follow it once more, as far
    as that can be had (the order changes the probabilities, so several are tried), so that drafts are often right.
    """
    tried: list[tuple[float, tuple[int, ...]]] = []
    order = list(range(VOCAB))
    for _ in range(8):
        prompt = (*order, order[3])
        logits = logits_of(reference, prompt)[-1]
        after = torch.stack([logits_of(reference, (*prompt, token))[-1] for token in range(VOCAB)])
        pairs = logits.softmax(-1)[:, None] * after.softmax(-1)
        tried.append((float(sum(pairs[a, b] for a, b in itertools.pairwise(order))), prompt))
        order = likely_path(pairs)
    return max(tried)[1]


@pytest.fixture(scope="module")
def folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return model_folder, build_eagle_head("eagle", model_folder, tmp_path_factory.mktemp("heads") / "eagle")
