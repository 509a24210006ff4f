"""One rank of `tlt bench spot`: whole runs that differ only in speculation, interleaved by step, in one process."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tlt.bench.chain_model import chain_responses, write_chain_model
from megatron_tlt.bench.recorded_lengths import RecordedLengths
from megatron_tlt.bench.rollout_cases import of_length
from megatron_tlt.bench.workers.quickstart import warm_head
from megatron_tlt.bench.workers.rl_steps import measure_pinned, serving, steps_in_turns, tell
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.tokenizer import encode_prompt, load_tokenizer
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.drafter import DataBuffer, DrafterTrainer, Pair, WarmupPlan, first_drafter, train_session
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, rank, world_size
from megatron_tlt.rollout.types import Request
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.loop import Run
from megatron_tlt.trainer.requests import one_request_each, training_sampling

_PROMPT = 48
BUBBLES = ("with", "without", "alone")
"""Work of waiting ranks: train the drafter; nothing; or the same training steps on a private drafter that coordinator,
checkpoints and other ranks do not know. The cost of the last is that of sharing cores."""


@dataclass(frozen=True)
class SpotTarget:
    """A model to train: its launch config, common overrides of all arms, and responses for the heads' warm-up."""

    config: Path
    folder: Path
    overrides: Mapping[str, Any]
    pairs: Callable[[], Sequence[Pair]]


def quickstart(given: Mapping[str, Any], work: Path) -> SpotTarget:
    """The recipe's model, which answers and learns; its head starts with worked solutions, like the model itself."""
    config, folder = Path(given["config"]), Path(given["model"])

    def pairs() -> list[Pair]:
        loaded, tokenizer = load_config(config, ["launcher.nproc_per_node=1"]), load_tokenizer(folder)
        problems = map(build_sources(loaded.tasks, "train", given["seed"] + 1).problem, range(given["warm_problems"]))
        longest = loaded.rollout.max_response_tokens
        return [
            Pair(tuple(encode_prompt(tokenizer, problem)), tuple(tokenizer.encode(problem.solution or "")[:longest]))
            for problem in problems
        ]

    return SpotTarget(config, folder, {"model.recipe": "null", "model.path": folder}, pairs)


def large(given: Mapping[str, Any], work: Path) -> SpotTarget:
    """A chain of tokens: all rewards are 0, so the complete update leaves the model unchanged."""
    file, folder, longest = work / "large.yaml", work / "large", given["longest"]
    if rank() == 0:
        train_tokenizer([], given["vocab"], folder)
        write_chain_model(folder, given["layers"], given["vocab"], given["certainty"], given["hidden"])
        responses = given["prompts"] * given["group"]
        vllm = {"dtype": "bfloat16", "max_num_seqs": responses, "num_gpu_blocks_override": 8 * responses}
        config = {
            "run": {"name": "large"},
            "model": {"path": str(folder)},
            "tasks": [{"name": "gcd", "params": {"sizes": {"min": 9, "max": 19}}}],
            "actor": {
                "transformer_impl": "local",
                "max_tokens_per_micro_batch": longest + _PROMPT,
                "megatron": {"bf16": True},
                "optimizer": {"lr": 1e-6},
            },
            "rollout": {"max_prompt_tokens": _PROMPT, "max_response_tokens": longest, "vllm": vllm},
        }
        file.write_text(json.dumps(config), encoding="utf-8")

    def pairs() -> list[Pair]:
        count, vocab, certainty = given["warm_problems"], given["vocab"], given["certainty"]
        return [Pair(r[:8], r[8:]) for r in chain_responses(count, 64, vocab, certainty, given["seed"])]

    barrier()
    return SpotTarget(file, folder, {}, pairs)


def first_head(target: SpotTarget, given: Mapping[str, Any], work: Path) -> Path:
    """The common initial head of all arms, made by the first rank."""
    folder = work / "head"
    if rank() == 0:
        drafter = DrafterConfig(kind="eagle", lr=given["lr"], unroll_steps=given["unroll"])
        warm_head(
            target.folder, target.pairs(), drafter, WarmupPlan(given["warm_steps"], given["warm_entries"]), folder
        )
        tell("a first head")
    barrier()
    return folder / "drafter"


def arm_config(target: SpotTarget, head: Path, arm: str, given: Mapping[str, Any], work: Path) -> TltConfig:
    """An arm's config: its own settings on top of the common ones."""
    off = {"speculation.enabled": "false"}
    trained = {
        "speculation.drafter": "eagle",
        "drafter.kind": "eagle",
        "speculation.num_speculative_tokens": given["drafts"],
        "drafter.path": head,
        "drafter.lr": given["lr"],
        "drafter.unroll_steps": given["unroll"],
        "drafter.session_steps": given["session_steps"],
        "drafter.entries_per_step": given["entries"],
        "drafter.max_tokens_per_micro_batch": given["micro_batch"],
    }
    if given["tuner"] != "none":
        trained["speculation.adaptive.tuner"] = given["tuner"]
    spot = {
        "spot.min_replicas": min(2, max(1, world_size() - 1)),
        "spot.min_entries": 1,
        "spot.session_timeout_s": 60,
    }
    own = {"off": off, "SD": trained, "SD + spot": {**trained, **spot}}[arm]
    overrides = {
        **target.overrides,
        **own,
        "launcher.nproc_per_node": world_size(),
        "run.dir": work / arm.replace(" ", ""),
        "run.seed": given["seed"],
        "run.deterministic": "false",
        "trainer.prompts_per_step": given["prompts"],
        "algorithm.group_size": given["group"],
        "reshard.verify_every": 0,
    }
    return load_config(target.config, [f"{key}={value}" for key, value in overrides.items()])


def own_trainer(config: TltConfig, target: SpotTarget) -> DrafterTrainer:
    """A trainer equal to the run's, but unknown to the run."""
    assert config.drafter is not None
    drafter = first_drafter(config.drafter, target.folder, config.run.seed)
    return DrafterTrainer(drafter, config.drafter, config.run.seed)


class SpotBench:
    """All arms of one target on this rank."""

    def __init__(self, given: Mapping[str, Any], work: Path) -> None:
        self._given, self._work = given, work
        target = {"quickstart": quickstart, "large": large}[given["target"]](given, work)
        head = first_head(target, given, work)
        self._lengths = RecordedLengths(given["prompts"], given["group"], given["longest"], given["seed"])
        self._configs = {arm: arm_config(target, head, arm, given, work) for arm in given["arms"]}
        self._runs = {arm: Run(config, self._lengths) for arm, config in self._configs.items()}
        self._own = own_trainer(self._configs["SD + spot"], target) if "SD + spot" in self._configs else None
        tensors = SafetensorsFolder(target.folder)
        self.weights = sum(math.prod(tensors.shape(name)) for name in tensors.names)

    def run(self) -> dict[str, Any]:
        """Interleaved steps of all arms, then rollouts of the last one with and without training in the bubble."""
        with serving(self._runs):
            rows = list(itertools.chain.from_iterable(map(self._round, range(self._given["rounds"]))))
            pairs = [self._pair(number) for number in range(self._given["pairs"])] if "SD + spot" in self._runs else []
        return {"steps": rows, "pairs": pairs, "weights": self.weights}

    def _round(self, number: int) -> list[dict[str, Any]]:
        self._lengths.begin(number)
        return steps_in_turns(self._runs, number)

    def _pair(self, number: int) -> dict[str, Any]:
        """The same rollout in each of ``BUBBLES``, on the same weights; the order changes."""
        rollout = self._given["rounds"] + number
        requests = self._requests(rollout)
        found: dict[str, Any] = {}
        turn = number % len(BUBBLES)
        for bubble in BUBBLES[turn:] + BUBBLES[:turn]:
            found |= self._rollout(rollout, requests, bubble)
        seconds = ", ".join(f"{found[bubble]:.2f} s {bubble}" for bubble in BUBBLES)
        tell(f"rollout {number + 1}: {seconds}")
        return found

    def _requests(self, rollout: int) -> list[Request]:
        """This rank's share of a rollout, as the trainer assigns it; of equal lengths, as times are compared."""
        run, config = self._runs["SD + spot"], self._configs["SD + spot"]
        count, lengths = config.trainer.prompts_per_step, self._lengths.begin(self._given["rounds"])
        problems = build_sources(config.tasks, "train", config.run.seed)
        mine = range(rank(), count, world_size())
        asked = one_request_each(
            [problems.problem(rollout * count + index) for index in mine for _ in lengths[index]],
            run.tokenizer,
            training_sampling(config.rollout, run.tokenizer),
            "pair",
            rollout,
        )
        wanted = [length for index in mine for length in lengths[index]]
        return [of_length(request, length) for request, length in zip(asked, wanted, strict=True)]

    def _rollout(self, rollout: int, requests: Sequence[Request], bubble: str) -> dict[str, Any]:
        run, trains = self._runs["SD + spot"], bubble == "with"
        assert run.bubble is not None and run.drafting is not None
        barrier()
        if trains:
            run.bubble.begin(rollout)
        began = time.perf_counter()
        run.engine.generate(requests)
        seconds = time.perf_counter() - began
        if trains:
            run.bubble.train_until_rollout_ends(rollout)
        if bubble == "alone":
            self._train_until_all_are_here(run.drafting.buffer, rollout)
        barrier()
        slowest = max(all_gather_data(seconds, float))
        if not trains:
            return {bubble: slowest}
        # the drafter learns, but no engine receives it: both rollouts draft alike
        metrics = run.drafting.train(rollout, run.policy)
        return {"with": slowest, **{name: value for name, value in metrics.items() if name.startswith("spot/")}}

    def _train_until_all_are_here(self, buffer: DataBuffer, rollout: int) -> None:
        """Trains with steps of the size of a session with one member."""
        assert self._own is not None
        folder = self._work / f"ended-{rollout}"
        folder.mkdir(exist_ok=True)
        (folder / str(rank())).touch()
        while len(list(folder.iterdir())) < world_size():
            train_session(self._own, buffer, rollout, self._given["entries"] * world_size(), 1)


def main(given_json: str, work: str, out: str) -> None:
    measure_pinned(given_json, out, lambda given: SpotBench(given, Path(work)).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
