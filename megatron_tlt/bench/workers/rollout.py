"""Interleaved rollouts with every method of speculation; one process holds all engines of one target."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.bench.chain_model import write_chain_model
from megatron_tlt.bench.engines import one_of_several
from megatron_tlt.bench.rollout import ABLE
from megatron_tlt.bench.rollout_cases import Epochs, ReplayDrafter, RolloutCase, make_cases, of_length, pareto_lengths
from megatron_tlt.bench.rollout_oracle import OracleChooser, RateTable
from megatron_tlt.bench.workers.quickstart import prepare_quickstart, train_head
from megatron_tlt.bench.workers.stock_engine import StockEngine
from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import AdaptiveConfig, SpeculationConfig
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.observe.summary import describe_lengths
from megatron_tlt.platform.device import initialize_distributed, prepare
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.rollout.adaptive import build_controller
from megatron_tlt.rollout.engine_speculation import EngineSpeculation
from megatron_tlt.rollout.recorded_states import RecordedStates
from megatron_tlt.rollout.types import DraftStats, Request, Response, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.speculation.strategy import OFF, Strategy
from megatron_tlt.speculation.token_drafter import FinishedResponse, TokenDrafter

Rollout = Callable[[Sequence[Request]], list[Response]]


class RolloutTarget:
    """One target: its engines, its requests, and a rollout function per arm.

    ``given["states_bytes"]``: the engine that can draft keeps hidden states for the bubble, as in a run.
    """

    def __init__(
        self,
        folder: Path,
        rollout: RolloutConfig,
        speculation: SpeculationConfig,
        drafters: Mapping[str, TokenDrafter],
        statics: Sequence[Strategy],
        given: dict[str, Any],
    ) -> None:
        seed, rollout = given["seed"], one_of_several(rollout)
        self._plain = VllmEngine(folder, rollout, SpeculationConfig(enabled=False), seed)
        self._engine = VllmEngine(folder, rollout, speculation, seed, drafters)
        self._recorded = RecordedStates(given["states_bytes"]) if given.get("states_bytes") else None
        self._engine.record_into(self._recorded)
        self.table = RateTable()
        self._finished: list[FinishedResponse] = []
        self.arms: dict[str, Rollout] = {"off": self._plain.generate, ABLE: self._able}
        strategies = [OFF, *statics]
        lengths = given["lengths"]
        # with budgets, which fix each request's tokens, an engine's default strategies are off and each one's maximum
        names = [] if lengths == "optimal" else [strategy.name for strategy in strategies]
        for strategy in statics:
            self.arms[strategy.name] = self._static(strategy)
        for tuner in given.get("tuners", ("beg_mab", "solver")):
            adaptive = AdaptiveConfig(tuner=tuner, strategies=names, threshold=given["threshold"], lengths=lengths)
            section = speculation.model_copy(update={"adaptive": adaptive})
            chooser = build_controller(section, rollout.max_response_tokens, seed, rollout.vllm.get("max_num_seqs"))
            self.arms[tuner] = self._adaptive(EngineSpeculation(section, chooser))
        oracle = OracleChooser(strategies, self.table)
        self.arms["oracle"] = lambda requests: self._generate(requests, chooser=oracle)
        tokens = speculation.num_speculative_tokens
        self.arms[f"vLLM's ngram-{tokens}"] = StockEngine(folder, rollout, "ngram", tokens, seed).generate
        self._suffix: StockEngine | None = None
        if importlib.util.find_spec("arctic_inference"):
            self._suffix = StockEngine(folder, rollout, "suffix", tokens, seed)
            self.arms[f"vLLM's suffix-{tokens}"] = self._suffix.generate

    def _able(self, requests: Sequence[Request]) -> list[Response]:
        self._engine.set_strategy(OFF)
        return self._generate(requests)

    def _static(self, strategy: Strategy) -> Rollout:
        def rollout(requests: Sequence[Request]) -> list[Response]:
            self._engine.set_strategy(strategy)
            return self._generate(requests, on_step=self.table.add)

        return rollout

    def _adaptive(self, engine: EngineSpeculation) -> Rollout:
        """Rolls out as in a run's training, including the steps without drafts from which its gain is estimated."""

        def rollout(requests: Sequence[Request]) -> list[Response]:
            engine.begin_step()
            engine.begin_rollout(requests)
            try:
                return self._generate(requests, on_finished=engine.finished, chooser=engine)
            finally:
                engine.end_rollout(requests)
                engine.keep_rollout()

        return rollout

    def _generate(self, requests: Sequence[Request], **how: Any) -> list[Response]:
        if self._recorded is not None:
            self._recorded.begin()
        responses = self._engine.generate(requests, **how)
        if self._recorded is not None:
            self._recorded.end()
        self._finished += [
            FinishedResponse(request.problem_key, response.prompt_token_ids, response.token_ids)
            for request, response in zip(requests, responses, strict=True)
        ]
        return responses

    def begin_case(self, name: str) -> None:
        """Starts a case. Cases share requests, each with its own history, ours by ``Request.problem_key``."""
        if self._suffix is not None:
            self._suffix.use_history(name)

    def learn_off(self, requests: Sequence[Request]) -> list[Response]:
        """Rolls out without drafts, for the table and for lengths."""
        return self._plain.generate(requests, on_step=self.table.add)

    def end_epoch(self) -> None:
        """Ends a round of all arms; its responses become a past epoch for drafters without a model."""
        for drafter in self._engine.token_drafters.values():
            drafter.end_rollout(self._finished)
            drafter.begin_step()
        self._finished.clear()


def _lengths(most: int) -> list[int]:
    return sorted({k for k in (1, 3, 5) if k < most} | {most})


def quickstart(given: dict[str, Any], work: Path) -> tuple[RolloutTarget, list[Request], Path]:
    """The recipe's model, its held-out problems at the training temperature, and a head trained here."""
    folder = Path(given["model"])
    prepared = prepare_quickstart(given["config"], folder, given["requests"], given["warm_problems"], given["seed"])
    head = train_head(prepared, "eagle", given["warm_steps"], work)
    most = given["drafts"]
    statics = [Strategy("ngram", min(3, most))] + [Strategy("suffix", k) for k in sorted({min(3, most), most})]
    statics += [Strategy("eagle", k) for k in _lengths(most)]
    adaptive = AdaptiveConfig(strategies=[strategy.name for strategy in (OFF, *statics)])
    speculation = SpeculationConfig(drafter="eagle", path=head, num_speculative_tokens=most, adaptive=adaptive)
    target = RolloutTarget(folder, prepared.config.rollout, speculation, {}, statics, given)
    return target, prepared.pool, folder


def large(given: dict[str, Any], work: Path) -> tuple[RolloutTarget, list[Request], Path]:
    """A bfloat16 target of 100 million weights, whose own greedy responses are replayed as drafts."""
    vocab_size = max(512, given["large_longest"] + 16)
    folder = write_chain_model(work / "large", given["large_layers"], vocab_size)
    limit = given["large_longest"] + 128
    options = {"dtype": "bfloat16", "max_num_seqs": 128, "num_gpu_blocks_override": 512, "max_model_len": limit}
    rollout = RolloutConfig(max_prompt_tokens=16, max_response_tokens=given["large_longest"], vllm=options)
    draw = torch.Generator().manual_seed(given["seed"])
    prompts = torch.randint(0, vocab_size, (given["large_requests"], 8), generator=draw).tolist()
    lengths = pareto_lengths(len(prompts), given["large_shortest"], given["large_longest"], 1.1, given["seed"])
    greedy = SamplingSpec(temperature=0.0)
    pool = [
        of_length(Request(str(i), tuple(prompt), greedy, i, str(i)), length)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    recorded: dict[str, Sequence[int]] = {}
    drafters: dict[str, TokenDrafter] = {"suffix": ReplayDrafter(recorded, given["acceptance"], vocab_size)}
    most = given["drafts"]
    speculation = SpeculationConfig(drafter="suffix", num_speculative_tokens=most)
    statics = [Strategy("suffix", k) for k in _lengths(most)]
    target = RolloutTarget(folder, rollout, speculation, drafters, statics, given)
    epochs = epochs_of(given, pool)
    longest = [max(epochs.length(request, repeat) for repeat in range(given["repeats"] + 1)) for request in pool]
    asked = [of_length(request, length) for request, length in zip(pool, longest, strict=True)]
    recorded.update({response.request_id: response.token_ids for response in target.learn_off(asked)})
    return target, pool, folder


def epochs_of(given: Mapping[str, Any], pool: Sequence[Request]) -> Epochs:
    """The repeats of the pool's problems."""
    return Epochs(given["length_spread"], max(request.sampling.max_tokens for request in pool))


def timed(
    target: RolloutTarget, case: str, name: str, rollouts: Sequence[Sequence[Request]], repeat: int
) -> dict[str, Any]:
    """The row of an arm's consecutive rollouts of a case, in one repeat."""
    began = time.perf_counter()
    responses = [response for requests in rollouts for response in target.arms[name](requests)]
    seconds = time.perf_counter() - began
    stats = sum((response.draft for response in responses), DraftStats())
    return {
        "case": case,
        "arm": name,
        "repeat": repeat,
        "seconds": seconds,
        "tokens": sum(len(response.token_ids) for response in responses),
        "acceptance_length": stats.acceptance_length if stats.num_steps else None,
    }


def measure(
    target: RolloutTarget, cases: Sequence[RolloutCase], epochs: Epochs, repeats: int, record: Path | None
) -> list[dict[str, Any]]:
    """A row per case, arm and repeat; repeat 0 is the first round, in which tuners have no data."""
    rows = []
    names = list(target.arms)
    for repeat in range(repeats + 1):
        for case in cases:
            target.begin_case(case.name)
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                asked = [epochs.asked(requests, f"{name}/{case.name}", repeat) for requests in case.rollouts]
                rows.append(timed(target, case.name, name, asked, repeat))
            for requests in case.rollouts:
                if repeat == 0:
                    target.learn_off(requests)
            if record is not None:
                with record.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows[-len(names) :])
            print(f"repeat {repeat}, {case.name}", flush=True)
        target.end_epoch()
    return rows


def main(given_json: str, work: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    given = json.loads(given_json)
    prepare()
    initialize_distributed(600)
    make = {"quickstart": quickstart, "large": large}[given["target"]]
    target, pool, folder = make(given, Path(work))
    cases = make_cases(pool, given["batches"], given["rollouts"])
    record = Path(given["record"]) if given["record"] else None
    rows = measure(target, cases, epochs_of(given, pool), given["repeats"], record)
    tensors = SafetensorsFolder(folder)
    weights = sum(math.prod(tensors.shape(name)) for name in tensors.names)
    lengths = describe_lengths([request.sampling.max_tokens for request in pool])
    atomic_write_text(Path(out), json.dumps({"rows": rows, "weights": weights, "lengths": lengths}))


if __name__ == "__main__":
    main(*sys.argv[1:])
