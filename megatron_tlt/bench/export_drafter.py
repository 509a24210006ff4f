"""Compares a drafter in our engine with its export served by stock vLLM."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megatron_tlt.bench import workers
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.bench.workers.quickstart import ALONE
from megatron_tlt.cli import main
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.drafter_kinds import KINDS
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.drafter import Pair, TargetStates, WarmupPlan, aux_layers_of, drafter_from_target, warm_up
from megatron_tlt.drafter.model import Kind
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.progress import Progress
from megatron_tlt.platform.device import initialize_distributed, prepare
from megatron_tlt.rollout.types import DraftStats, Request, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.requests import one_request_each

VOCAB = 64
PROMPT = 8
RESPONSE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--target-steps", type=int, default=300, help="steps that the target is trained on the chain")
    parser.add_argument("--steps", type=int, default=100, help="steps of the drafter's warm-up")
    parser.add_argument("--prompts", type=int, default=64, help="number of greedy responses to compare")
    parser.add_argument("--depth", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--model", type=Path, help="your own target, with --drafter (default: made here)")
    parser.add_argument("--drafter", type=Path, help="its drafter, written by tlt export-drafter")
    parser.add_argument(
        "--config", type=Path, default=Path("launch/smollm2-135m-cpu.yaml"), help="config of its held-out problems"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for stock vLLM")


def chain(count: int, length: int, seed: int) -> torch.Tensor:
    """Sequences (count, length); the next token is from a table, by the last token and the one before it modulo 4.

    One token in ten is drawn uniformly instead.
    """
    table = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (count, length), generator=generator)
    kept = torch.rand(count, length, generator=generator) < 0.9
    for t in range(2, length):
        tokens[:, t] = torch.where(kept[:, t], table[tokens[:, t - 1], tokens[:, t - 2] % 4], tokens[:, t])
    return tokens


def write_chain_target(folder: Path, steps: int) -> float:
    """Trains a model of 0.2 million weights on the chain; returns its last loss."""
    write_tiny_model("qwen2-untied", folder, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for step in range(steps):
        tokens = chain(32, PROMPT + RESPONSE, seed=1 + step)
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return loss.item()


@torch.no_grad()
def _responses(target: Path, count: int) -> list[Pair]:
    """Responses sampled by the target."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rows = model.generate(chain(count, PROMPT, seed=10**6), max_new_tokens=RESPONSE, do_sample=True, top_k=0)
    return [Pair(tuple(row[:PROMPT]), tuple(row[PROMPT:])) for row in rows.tolist()]


def _warmed_up(target: Path, kind: Kind, pairs: list[Pair], folder: Path, steps: int) -> Path:
    """Warms a drafter up in ``folder``; returns its exported folder."""
    model = drafter_from_target(target, kind, seed=1)
    states = TargetStates(target, aux_layers_of(model.config), torch.device("cpu"))
    plan = WarmupPlan(steps=steps)
    with Progress(0, steps, enabled=False) as progress:
        report = warm_up(model, DrafterConfig(kind=kind, lr=1e-3), pairs, states, folder, plan, progress)
    assert report is not None
    exported = folder.with_name(f"{folder.name}-exported")
    if main(["export-drafter", str(folder), str(exported)]):
        raise RunError(f"tlt export-drafter {folder} failed")
    return exported


@dataclass(frozen=True)
class _Served:
    """A target and its drafter, and the prompts for both engines."""

    target: Path
    drafter: Path
    kind: Kind
    prompts: list[list[int]]
    depth: int
    stop_ids: tuple[int, ...] = ()
    """End tokens of a response in both engines; without any, each response has maximum length."""

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts))

    @property
    def max_model_len(self) -> int:
        """vLLM stops drafting for the whole batch if a request comes within K tokens of this length."""
        return self.longest_prompt + RESPONSE + 48


def _inside(served: _Served) -> dict[str, Any]:
    """Results of this package's engine; the same fields as for stock vLLM."""
    options = {"dtype": "float32", "max_num_seqs": 32, "max_model_len": served.max_model_len}
    rollout = RolloutConfig(max_prompt_tokens=served.longest_prompt, max_response_tokens=RESPONSE, vllm=options)
    speculation = SpeculationConfig(drafter=served.kind, path=served.drafter, num_speculative_tokens=served.depth)
    engine = VllmEngine(served.target, rollout, speculation, seed=0)
    greedy = SamplingSpec(temperature=0.0, max_tokens=RESPONSE, stop_token_ids=served.stop_ids)
    responses = engine.generate([Request(str(i), tuple(ids), greedy, i) for i, ids in enumerate(served.prompts)])
    engine.shutdown()
    stats = sum((response.draft for response in responses), DraftStats())
    tokens = [list(response.token_ids) for response in responses]
    return {"tokens": tokens, "drafts": stats.num_drafts, "accepted": stats.num_accepted_tokens}


def _outside(served: _Served, timeout_s: float) -> dict[str, Any]:
    """Runs stock vLLM in a Python without this project on its path, in a separate folder.

    Raises:
        RunError: it failed, exceeded ``timeout_s``, or imported this project nevertheless.
    """
    with tempfile.TemporaryDirectory() as name:
        away = Path(name)
        worker = Path(shutil.copy(Path(workers.__file__).with_name("stock_vllm.py"), away))
        (away / "prompts.json").write_text(json.dumps(served.prompts), encoding="utf-8")
        values = [
            served.target.absolute(),
            served.drafter.absolute(),
            served.kind,
            served.depth,
            "prompts.json",
            RESPONSE,
            served.max_model_len,
            json.dumps(served.stop_ids),
            "out.json",
        ]
        # a user of stock vLLM would not have the variables that this process set for its own engine
        own = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHDYNAMO_DISABLE")
        environment = {key: value for key, value in os.environ.items() if key not in own}
        command = [sys.executable, str(worker), *map(str, values)]
        try:
            done = subprocess.run(command, cwd=away, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"stock vLLM with {served.kind}: still running after {timeout_s} s") from error
        if done.returncode:
            end = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
            raise RunError(f"stock vLLM with {served.kind}: status {done.returncode}\n{end}")
        found: dict[str, Any] = json.loads((away / "out.json").read_text(encoding="utf-8"))
    if found["imported"]:
        raise RunError(
            f"stock vLLM with {served.kind}: it imported {', '.join(found['imported'][:5])}; allowed: nothing of it"
        )
    return found


def acceptance_length(found: dict[str, Any]) -> float:
    """Tokens per verification, without a response's first token, which comes from its prompt.

    Computed from drafts and tokens alone: engines count drafts accepted beyond a response's end differently.
    """
    tokens = sum(len(ids) - 1 for ids in found["tokens"])
    return tokens / found["drafts"] if found["drafts"] else 1.0


def _chain_cases(arguments: argparse.Namespace, root: Path) -> Iterator[tuple[_Served, dict[str, Any]]]:
    """A drafter of each kind for a target trained on the chain, and its training results."""
    loss = write_chain_target(root / "target", arguments.target_steps)
    pairs = _responses(root / "target", 200)
    prompts = chain(arguments.prompts, PROMPT, seed=2 * 10**6).tolist()
    for kind in arguments.kinds:
        began = time.perf_counter()
        drafter = _warmed_up(root / "target", kind, pairs, root / kind, arguments.steps)
        report = json.loads((root / kind / "report.json").read_text(encoding="utf-8"))
        about = {
            "target_loss": loss,
            "warm_up_s": time.perf_counter() - began,
            "teacher_forced_before": report["history"][0]["acceptance_length"],
            "teacher_forced_after": report["history"][-1]["acceptance_length"],
        }
        yield _Served(root / "target", drafter, kind, prompts, arguments.depth), about


def _own_case(arguments: argparse.Namespace) -> tuple[_Served, dict[str, Any]]:
    """The command line's target and drafter, on held-out problems of the config."""
    if len(arguments.kinds) != 1:
        raise ConfigError(f"--kinds: found {' '.join(arguments.kinds)}; allowed with --drafter: its own alone")
    config = load_config(arguments.config, ALONE)
    tokenizer = load_tokenizer(arguments.model)
    problems = build_sources(config.tasks, "held_out", config.run.seed).held_out(arguments.prompts)
    asked = one_request_each(problems, tokenizer, SamplingSpec(), "export")
    prompts = [list(request.prompt_token_ids) for request in asked]
    kind, stop_ids = arguments.kinds[0], tokenizer.stop_ids
    return _Served(arguments.model, arguments.drafter, kind, prompts, arguments.depth, stop_ids), {}


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per drafter: greedy responses to the same prompts in this package's engine and in stock vLLM.

    Raises:
        ConfigError: a model is given without a drafter or vice versa, or a drafter for several kinds.
    """
    if (arguments.model is None) != (arguments.drafter is None):
        raise ConfigError("--model and --drafter: found one; allowed: both or none")
    prepare()
    initialize_distributed()
    result = BenchmarkResult(environment=describe_environment(), name="export-drafter")
    with tempfile.TemporaryDirectory() as name:
        cases = _chain_cases(arguments, Path(name)) if arguments.model is None else [_own_case(arguments)]
        for served, about in cases:
            outside = _outside(served, arguments.timeout)
            inside = _inside(served)
            same = sum(a == b for a, b in zip(inside["tokens"], outside["tokens"], strict=True))
            ratio = acceptance_length(outside) / acceptance_length(inside)
            result.rows.append(
                {
                    "kind": served.kind,
                    **about,
                    "acceptance_length_here": acceptance_length(inside),
                    "acceptance_length_stock": acceptance_length(outside),
                    "same_responses": f"{same} of {len(served.prompts)}",
                }
            )
            result.target(f"acceptance_stock_over_here_minus_1_{served.kind}", abs(ratio - 1.0), "<=", 0.02)
    return result
