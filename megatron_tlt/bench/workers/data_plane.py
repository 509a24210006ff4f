"""One rank of a training step without its computation: memory and seconds from the engine's responses to the loss.

The product's own collector, step and policy run, around an engine, a model and verifiers that compute nothing. This
runs in releases before ``RolloutBatch`` too, with an older tree first in ``PYTHONPATH``: both are measured alike.
"""

from __future__ import annotations

import json
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import megatron_tlt
from megatron_tlt.actor.batches import form_micro_batches, plan_shares
from megatron_tlt.actor.megatron_routing import RouterReplays
from megatron_tlt.actor.policy import Policy
from megatron_tlt.bench.workers.memory import PeakSampler
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.types import Response, SamplingSpec
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer import experience
from megatron_tlt.trainer.step import StepResult, TrainingStep

# isort: split
from megatron.core import parallel_state

PROMPT_TOKENS, GROUP = 64, 8
VOCABULARY = 150_000
"""As large as a real one: Python keeps one object for each of the smallest integers only."""


def _is_sharded() -> bool:
    with suppress(ImportError):
        from megatron_tlt.data import rollout_batch

        return bool(rollout_batch)
    return False


SHARDED = _is_sharded()


class _Engine:
    """Has as many tokens as asked for at once; vLLM's lists become responses as the release at hand makes them."""

    tensor_parallel_group = None
    versions = {"policy": 0}  # noqa: RUF012

    def __init__(self) -> None:
        self.made_s = self.made_cpu_s = 0.0

    def generate(
        self, requests: Sequence[Any], finished: Callable[[Response], None], stepped: object, speculation: object
    ) -> list[Response]:
        generator = np.random.default_rng(rank())
        responses = []
        for request in requests:
            began, cpu = time.perf_counter(), time.process_time()
            length = request.sampling.max_tokens
            tokens = generator.integers(1000, VOCABULARY, length).tolist()
            log_probs = (-generator.random(length, dtype=np.float32)).tolist()
            self.made_s += time.perf_counter() - began
            self.made_cpu_s += time.process_time() - cpu
            columns: tuple[Any, Any] = tuple(tokens), tuple(log_probs)
            if SHARDED:
                columns = array("i", tokens), array("f", log_probs)
            responses.append(Response(request.request_id, request.prompt_token_ids, *columns, "length", 0.0))
            finished(responses[-1])
        return responses

    def sleep(self, level: int) -> None:
        """Nothing to give up."""


class _Pool:
    def __init__(self) -> None:
        self._names: list[str] = []

    def submit(self, name: str, problem: Problem, text: str) -> None:
        self._names.append(name)

    def collect(self) -> dict[str, Reward]:
        rng = random.Random(rank())
        return {name: Reward(float(rng.random() < 0.5), True) for name in self._names}


class _OneAtATime:
    """Micro-batches, each formed when it is asked for: on a GPU their tensors are not the host's, in no release."""

    def __init__(self, form: Callable[[Sequence[int]], Any], groups: Sequence[Sequence[int]]) -> None:
        self._form, self.groups = form, groups

    def __iter__(self) -> Iterator[Any]:
        return map(self._form, self.groups)


class _NoModel(Policy):
    """A policy whose log-probs and entropies are there already."""

    def __init__(self, max_tokens: int) -> None:
        self._actor: Any = SimpleNamespace(max_tokens_per_micro_batch=max_tokens, packing=True)
        self._device = torch.device("cpu")
        sizes = dict.fromkeys(("pipeline_model", "expert_model", "tensor_model", "context"), 1)
        config: Any = SimpleNamespace(**{f"{name}_parallel_size": size for name, size in sizes.items()})
        config.sequence_parallel = False
        self.model: Any = SimpleNamespace(config=config, chunks=[None], ddp_chunks=[], attention_share=0.0)
        self.optimizer = None
        self._routing = RouterReplays([], config)
        self._logical_shards = self.speeds = None
        if not hasattr(Policy, "_batch_shape"):  # an earlier release computes it at each use
            from megatron_tlt.actor.megatron_model import batch_shape

            given: Any = self.model, self._actor
            self._batch_shape = batch_shape(*given)
        self.memory: Any = SimpleNamespace(reload=lambda: None, offload=lambda: None)

    def micro_batches(self, samples: Any, alone: bool = False) -> Any:
        shape = self._batch_shape
        lengths = samples.lengths if SHARDED else [len(sample.token_ids) for sample in samples]
        shares = plan_shares(lengths, shape, parallel_state.get_data_parallel_world_size())
        groups = shares[parallel_state.get_data_parallel_rank()]
        return _OneAtATime(lambda group: form_micro_batches(samples, [group], shape, self._device)[0], groups)

    def _scores(self, logits_RTV: Any, batch: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        values = batch.by_sample(batch.labels_RT.float()) / -VOCABULARY
        return values, -values

    def run_schedule(self, batches: Any, after_forward: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        return [after_forward(batch, None) for batch in batches]

    def update(self, samples: Any, loss: Any, temperature: float = 1.0, judge: Any = None) -> dict[str, float]:
        batches = self.micro_batches(samples)
        measure = "_sizes" if hasattr(self, "_sizes") else "_loss_scale"  # an earlier revision's name
        getattr(self, measure)(batches, loss)
        tokens = sum(int(batch.loss_inputs.mask_BT.sum()) for batch in batches)
        return {"tokens": float(tokens)}


CORRECTION: dict[str, Any] = {"correction": {"weights": "token"}} if SHARDED else {"mismatch": {"action": "correct"}}


class _Problems:
    def problem(self, index: int) -> Problem:
        return Problem(f"p{index}", "bench", "?", "1", "math")


def make_step(responses: int, tokens: int) -> tuple[TrainingStep, _Engine]:
    """A step of the release at hand, around an engine."""
    config = TltConfig.model_validate(
        {
            "model": {"path": "none"},
            "tasks": [{"name": "gcd"}],
            "rollout": {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": tokens},
            "actor": {"max_tokens_per_micro_batch": PROMPT_TOKENS + tokens},
            "algorithm": {"group_size": GROUP, **CORRECTION},
            "trainer": {"prompts_per_step": responses // GROUP, "steps": 1},
            "speculation": {"enabled": False},
        }
    )
    nothing: Any = None
    engine: Any = _Engine()
    pool: Any = _Pool()
    sampling = SamplingSpec(max_tokens=tokens)
    collector = experience.ExperienceCollector(
        engine,
        nothing,
        pool,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=tokens,
        tensor_parallel_size=1,
        timeline=Timeline(0),
    )
    problems: Any = _Problems()
    policy = _NoModel(PROMPT_TOKENS + tokens)
    return TrainingStep(config, policy, None, engine, collector, problems, nothing, Timeline(0), sampling), engine


def measure(responses: int, tokens: int) -> dict[str, float]:
    """Of this rank: the rise of its memory at most (bytes), and the seconds of one step, by clock and of its core."""
    step: Any
    step, engine = make_step(responses, tokens)
    result = StepResult()
    ignore = lambda *_: None  # noqa: E731
    barrier()
    with PeakSampler() as memory:
        began, cpu = time.perf_counter(), time.process_time()
        if SHARDED:
            scored, batch = step.roll_out(0, None, result, ignore, ignore)
            samples = step._log_probs(0, scored, batch, result, ignore)
            del scored, batch
        else:
            scored = step._rollout(0, result, ignore, ignore)
            samples = step._log_probs(0, scored, result, ignore)
        step._update(0, samples, result, ignore)
        seconds = time.perf_counter() - began - engine.made_s
        cpu_seconds = time.process_time() - cpu - engine.made_cpu_s
    return {"bytes": float(memory.peak - memory.start), "seconds": seconds, "cpu_seconds": cpu_seconds}


def main(given_json: str, work: str, out: str) -> None:
    given = json.loads(given_json)
    initialize_distributed(3600)
    parallel_state.initialize_model_parallel()
    if hasattr(experience, "encode_prompt"):  # older releases encode elsewhere
        experience.encode_prompt = lambda tokenizer, problem: list(range(PROMPT_TOKENS))
    if hasattr(experience, "response_text"):
        experience.response_text = lambda tokenizer, token_ids: ""
    else:
        setattr(experience.ExperienceCollector, "_text", lambda self, response: "")  # noqa: B010
    measure(GROUP * 4, 64)  # what is imported and allocated once
    ranks = all_gather_data(measure(given["responses"], given["tokens"]), dict[str, float])
    if rank() == 0:
        tree = str(Path(megatron_tlt.__file__).resolve().parents[1])
        Path(out).write_text(json.dumps({"ranks": ranks, "sharded": SHARDED, "tree": tree}), encoding="utf-8")
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
