"""Acceptance of drafters while a policy changes under reinforcement learning, after every step.

One process: the policy, an engine that drafts by n-grams (and decodes the training rollouts), and one that drafts with
a head, alternately with the weights of the frozen drafter and of a trained one.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_tlt.actor.policy import Policy
from megatron_tlt.bench.drafter import MORE, WEIGHTED
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.models.hf_folder import side_files_of
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.device import initialize_distributed, prepare, seed_everything
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.rewards.verifiers import verifiers_of
from megatron_tlt.rollout.interface import RolloutEngine
from megatron_tlt.rollout.types import DraftStats, Response
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.drafter_manager import DrafterManager
from megatron_tlt.trainer.experience import ExperienceCollector
from megatron_tlt.trainer.requests import one_request_each, training_sampling
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.step import TrainingStep
from megatron_tlt.trainer.synchronization import drafter_sync, policy_sync


class _Together:
    """Several drafters that learn from the same steps; the measurement chooses which one an engine holds.

    The one that learns only from the ``first`` policy's responses has that policy's LM head.
    """

    def __init__(self, drafters: Mapping[str, DrafterManager], first: Policy) -> None:
        self._drafters, self._first = drafters, first
        self.aux_layers = next(iter(drafters.values())).aux_layers

    def check(self, engine: RolloutEngine) -> None:
        """The rollout's engine drafts by n-grams."""

    def add(
        self, step: int, scored: Sequence[ScoredResponse], batch: RolloutBatch, states: Mapping[int, torch.Tensor]
    ) -> None:
        for name, drafter in self._drafters.items():
            if name != MORE:
                drafter.add(step, scored, batch, states)

    def leave_device(self) -> None:
        for drafter in self._drafters.values():
            drafter.leave_device()

    def train(self, step: int, policy: Policy) -> dict[str, float]:
        found = {
            name: drafter.train(step, self._first if name == MORE else policy)
            for name, drafter in self._drafters.items()
        }
        return {f"{name}/{key}": value for name, metrics in found.items() for key, value in metrics.items()}

    def synchronize(self, verify: bool) -> None:
        """See above."""


class _DrafterBench:
    def __init__(self, given: dict[str, Any], work: Path) -> None:
        self._given, self._work = given, work
        self._config = config = self._variant("eagle")
        self._folder = Path(given["model"])
        prepare(deterministic=config.run.deterministic)
        seed_everything(config.run.seed)
        self._tokenizer = load_tokenizer(side_files_of(self._folder))
        self._policy = Policy(self._folder, config.actor, config.run.seed, total_steps=given["steps"])
        self._first = Policy(self._folder, config.actor, config.run.seed, trainable=False)
        self._rollout = config.rollout.model_copy(update={"vllm": {"load_format": "dummy", **config.rollout.vllm}})
        ngram = config.speculation.model_copy(update={"drafter": "ngram"})
        self._ngram = VllmEngine(self._folder, self._rollout, ngram, config.run.seed)
        self._pool = RewardPool(config.rewards.workers, config.rewards.timeout_s, verifiers_of(config.tasks))
        self._collector = ExperienceCollector(
            self._ngram,
            self._tokenizer,
            self._pool,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
            tensor_parallel_size=1,
            timeline=Timeline(0),
        )
        self._sampling = training_sampling(config.rollout, self._tokenizer)
        self._to_ngram = policy_sync(config, self._policy, self._ngram)
        self._first_to_ngram = policy_sync(config, self._first, self._ngram)
        problems = build_sources(config.tasks, "held_out", config.run.seed).held_out(given["problems"])
        self._requests = one_request_each(problems, self._tokenizer, self._sampling, "bench")

    def _variant(self, loss: str, **drafter: Any) -> TltConfig:
        given = self._given
        overrides = {
            "launcher.nproc_per_node": 1,
            "spot": "null",
            "run.seed": given["seed"],
            "run.dir": self._work,
            "trainer.steps": given["steps"],
            "speculation.drafter": given["kind"],
            "speculation.num_speculative_tokens": given["drafts"],
            "drafter.kind": given["kind"],
            "drafter.loss.name": loss,
            "drafter.lr": given["lr"],
            "drafter.session_steps": given["session_steps"],
            "drafter.entries_per_step": given["entries"],
            **({"drafter.unroll_steps": given["unroll"]} if given["unroll"] else {}),
            **{f"drafter.{key}": value for key, value in drafter.items()},
        }
        return load_config(given["config"], [*given["set"], *(f"{key}={value}" for key, value in overrides.items())])

    def _start(self) -> tuple[Path, dict[str, DrafterManager]]:
        """The common initial head, trained on responses of the first policy, and the drafters by arm."""
        given = self._given
        self._to_ngram.sync(version=0, verify=False)
        head = self._work / "head" if given["head"] is None else Path(given["head"])
        if given["head"] is None:
            config = self._variant("eagle", session_steps=given["warm_steps"])
            warm = DrafterManager(config, self._folder, self._work / "warm", self._policy)
            self._learn_first(warm, 0, self._first_responses(0, given["warm_problems"]))
            warm.train(0, self._policy)
            warm.write(head)
        variants = {loss: (loss, False) for loss in given["losses"]}
        if given["weighted"]:
            variants |= {loss + WEIGHTED: (loss, True) for loss in given["losses"]}
        if given["more"]:
            variants[MORE] = (given["losses"][0], False)
        drafters = {}
        for name, (loss, weighted) in variants.items():
            config = self._variant(loss, path=head, **{"loss.reward_weighting": weighted})
            drafters[name] = DrafterManager(config, self._folder, self._work / name, self._policy)
        return head, drafters

    def _first_responses(self, start: int, count: int) -> tuple[list[ScoredResponse], RolloutBatch]:
        """Responses of the policy that the engine holds, to problems from number ``start`` on that no RL step has."""
        config = self._config
        problems = build_sources(config.tasks, "train", config.run.seed + 1)
        batch = [problems.problem(start + i) for i in range(count)]
        return self._collector.collect(batch, 1, self._sampling, (config.run.seed, "warm", start))[:2]

    def _learn_first(
        self, drafter: DrafterManager, step: int, responses: tuple[Sequence[ScoredResponse], RolloutBatch]
    ) -> None:
        """Give a drafter responses of the first policy, with that policy's states."""
        _, states = self._first.log_probs_and_states(responses[1], aux_layers=drafter.aux_layers)
        drafter.add(step, *responses, states)

    def _learn_more(self, drafter: DrafterManager, step: int) -> None:
        """Adds as many new responses of the first policy as the others get of the current one."""
        config = self._config
        count = config.trainer.prompts_per_step * config.algorithm.group_size
        self._first_to_ngram.sync(version=step, verify=False)
        self._learn_first(drafter, step - 1, self._first_responses(self._given["warm_problems"] + step * count, count))
        self._to_ngram.sync(version=step, verify=False)

    def run(self) -> list[dict[str, float]]:
        """A row after every step, the first before any: acceptance lengths by drafter."""
        given = self._given
        with self._pool:
            head, drafters = self._start()
            speculation = self._config.speculation.model_copy(update={"path": head})
            engine = VllmEngine(self._folder, self._rollout, speculation, self._config.run.seed)
            to_engine = policy_sync(self._config, self._policy, engine)
            for drafter in drafters.values():
                drafter.attach(engine)
            frozen = load_file(head / "model.safetensors")
            shapes = {name: tuple(tensor.shape) for name, tensor in frozen.items()}
            restore = drafter_sync(self._config, lambda: frozen, shapes, engine)
            step = TrainingStep(
                self._config,
                self._policy,
                None,
                self._ngram,
                self._collector,
                build_sources(self._config.tasks, "train", self._config.run.seed),
                self._to_ngram,
                Timeline(0),
                self._sampling,
                _Together(drafters, self._first),
            )
            rows = []
            for number in range(given["steps"] + 1):
                row: dict[str, float] = {"step": number}
                if number:
                    if MORE in drafters:
                        self._learn_more(drafters[MORE], number)
                    result = step.run(number - 1, _ignore, _ignore, _ignore)
                    row["reward"] = result.metrics["reward/mean"]
                    row["length"] = result.metrics["length/mean"]
                responses = self._ngram.generate(self._requests)
                row["ngram"] = _acceptance_length(responses)
                row["kl_to_first"] = self._kl_to_first(responses)
                to_engine.sync(version=number, verify=False)
                restore.sync(version=0, verify=False)
                row["frozen"] = self._measure(engine)
                for loss, drafter in drafters.items():
                    drafter.synchronize(verify=False)
                    row[loss] = self._measure(engine)
                rows.append(row)
                print(json.dumps(row), flush=True)
        return rows

    def _measure(self, engine: VllmEngine) -> float:
        """Tokens per decode step on the held-out problems, in the engine itself."""
        return _acceptance_length(engine.generate(self._requests))

    def _kl_to_first(self, responses: Sequence[Response]) -> float:
        """KL divergence of the policy to the first one, in nats per token: mean of log p - log p_first over its own."""
        samples = _samples(responses)
        now, first = (policy.log_probs(samples).log_probs_G for policy in (self._policy, self._first))
        return float((now - first).mean())


def _acceptance_length(responses: Sequence[Response]) -> float:
    return sum((response.draft for response in responses), DraftStats()).acceptance_length


def _samples(responses: Sequence[Response]) -> RolloutBatch:
    sequences = [(*one.prompt_token_ids, *one.token_ids) for one in responses]
    return RolloutBatch.of_sequences(sequences, [len(one.prompt_token_ids) for one in responses])


def _ignore(*_: object) -> None:
    """Discards the progress."""


def main(given_json: str, work: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    prepare()
    initialize_distributed(600)
    rows = _DrafterBench(json.loads(given_json), Path(work)).run()
    atomic_write_text(Path(out), json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
