"""Shared by rollout benchmarks: the recipe's model, its requests, and heads trained on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.bench.rollout_cases import of_length
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.drafter import Pair, TargetStates, WarmupPlan, aux_layers_of, drafter_from_target, warm_up
from megatron_tlt.drafter.model import Kind
from megatron_tlt.observe.progress import Progress
from megatron_tlt.platform.device import current_device
from megatron_tlt.rollout.types import Request
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.requests import one_request_each, training_sampling

ALONE = ("launcher.nproc_per_node=1", "spot=null")
"""Overrides that reduce a launch config to a single process."""


@dataclass(frozen=True)
class Quickstart:
    """``pool``: held-out problems at the training temperature; each response has its first response's length.

    ``pairs``: responses to training problems, for the heads' training.
    """

    config: TltConfig
    folder: Path
    pool: list[Request]
    pairs: list[Pair]


def prepare_quickstart(
    config_file: str,
    folder: Path,
    requests: int,
    warm_problems: int,
    seed: int,
    overrides: Sequence[str] = (),
) -> Quickstart:
    """Samples ``pairs`` and the pool's lengths with an engine without speculation."""
    config = load_config(config_file, [*ALONE, *overrides])
    tokenizer = load_tokenizer(folder)
    sampling = training_sampling(config.rollout, tokenizer)
    engine = VllmEngine(folder, config.rollout, SpeculationConfig(enabled=False), seed)
    problems = build_sources(config.tasks, "train", config.run.seed)
    asked = one_request_each(map(problems.problem, range(warm_problems)), tokenizer, sampling, "head")
    pairs = [Pair(r.prompt_token_ids, tuple(r.token_ids)) for r in engine.generate(asked)]
    held_out = build_sources(config.tasks, "held_out", config.run.seed).held_out(requests)
    found = one_request_each(held_out, tokenizer, sampling, "rollout")
    pool = [of_length(r, len(response.token_ids)) for r, response in zip(found, engine.generate(found), strict=True)]
    engine.shutdown()
    return Quickstart(config, folder, pool, pairs)


def train_head(quickstart: Quickstart, kind: Kind, steps: int, work: Path) -> Path:
    """The folder of a head of this kind, trained for ``steps`` steps on the pairs."""
    drafter = DrafterConfig(kind=kind, lr=1e-3)
    return warm_head(quickstart.folder, quickstart.pairs, drafter, WarmupPlan(steps=steps), work / kind)


def warm_head(target: Path, pairs: Sequence[Pair], drafter: DrafterConfig, plan: WarmupPlan, folder: Path) -> Path:
    """The folder of a head initialized from the target's last layer and trained on the pairs."""
    device = current_device().torch_device
    model = drafter_from_target(
        target, drafter.kind, 1, drafter.aux_hidden_state_layer_ids, draft_vocab_size=drafter.draft_vocab_size
    ).to(device)
    model.share(model.shared.to(device))
    states = TargetStates(target, aux_layers_of(model.config), device)
    with Progress(0, plan.steps, enabled=False) as progress:
        warm_up(model, drafter, pairs, states, folder, plan, progress)
    return folder / "drafter"
