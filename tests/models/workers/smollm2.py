"""A real pretrained model in float32: greedy responses under every drafter, and log-probs of all who compute them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import ActorConfig, RolloutConfig
from megatron_tlt.config.speculation import AdaptiveConfig, SpeculationConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.drafter import drafter_from_target, save_drafter
from megatron_tlt.platform.device import initialize_distributed, prepare
from megatron_tlt.rollout.types import DraftStats, Request, Response, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.speculation.strategy import OFF, Strategy
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.requests import one_request_each
from tests.helpers.samples import Sample, batch_of, log_probs_of_all

PROMPTS, TOKENS, DRAFTS = 24, 12, 3
CONFIG = Path(__file__).resolve().parents[3] / "launch" / "smollm2-135m-cpu.yaml"
ROLLOUT = RolloutConfig(
    max_prompt_tokens=96,
    max_response_tokens=TOKENS,
    vllm={
        "dtype": "float32",
        "max_num_seqs": PROMPTS,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 120,
    },
)


def tokens_of(responses: list[Response]) -> list[list[int]]:
    return [list(response.token_ids) for response in responses]


def greedy_responses(folder: Path, work: Path, requests: list[Request]) -> tuple[dict[str, list[list[int]]], list[int]]:
    """By strategy; and how many draft tokens each strategy had verified."""
    plain = VllmEngine(folder, ROLLOUT, SpeculationConfig(enabled=False), seed=1)
    found, drafted = {"off": tokens_of(plain.generate(requests))}, []
    plain.shutdown()
    for kind in ("eagle", "eagle3"):
        vocabulary = 4096 if kind == "eagle3" else None
        model = drafter_from_target(folder, kind, 1, draft_vocab_size=vocabulary)
        if vocabulary:
            said = torch.tensor([token for row in found["off"] for token in row])
            model.choose_vocabulary(torch.bincount(said, minlength=49152).double())
        save_drafter(model, work / kind)
        names = ["off", f"ngram-{DRAFTS}", f"suffix-{DRAFTS}", f"{kind}-{DRAFTS}"]
        section = SpeculationConfig(
            drafter=kind,
            path=work / kind,
            num_speculative_tokens=DRAFTS,
            adaptive=AdaptiveConfig(strategies=names),
        )
        engine = VllmEngine(folder, ROLLOUT, section, seed=1)
        for name in names if kind == "eagle" else names[-1:]:
            engine.set_strategy(Strategy.parse(name) if name != "off" else OFF)
            responses = engine.generate(requests)
            found[f"{kind} engine, {name}"] = tokens_of(responses)
            if name != "off":
                drafted.append(sum((response.draft for response in responses), DraftStats()).num_draft_tokens)
        engine.shutdown()
    return found, drafted


def log_probs(folder: Path, requests: list[Request]) -> dict[str, list[list[float]]]:
    """Of the same sampled responses: the engine's, the actor's, transformers', and these in float64."""
    engine = VllmEngine(folder, ROLLOUT, SpeculationConfig(enabled=False), seed=1)
    responses = engine.generate(requests)
    engine.shutdown()
    samples = [
        Sample((*response.prompt_token_ids, *response.token_ids), len(response.prompt_token_ids))
        for response in responses
    ]
    actor = ActorConfig(transformer_impl="local", max_tokens_per_micro_batch=1024, log_prob_chunk_tokens=512)
    policy = Policy(folder, actor, seed=1, trainable=False)
    scores = policy.log_probs(batch_of(samples))
    return {
        "engine": [list(response.log_probs) for response in responses],
        "actor": log_probs_of_all(batch_of(samples), scores),
        "transformers": reference_log_probs(folder, samples, torch.float32),
        "exact": reference_log_probs(folder, samples, torch.float64),
    }


@torch.no_grad()
def reference_log_probs(folder: Path, samples: list[Sample], dtype: torch.dtype) -> list[list[float]]:
    """By transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    found = []
    for sample in samples:
        tokens = torch.tensor(sample.token_ids)
        rows = model(tokens[None]).logits[0, sample.prompt_length - 1 : -1].log_softmax(-1)
        found.append(rows.gather(1, tokens[sample.prompt_length :, None])[:, 0].tolist())
    return found


def main(folder: Path, work: Path) -> None:
    prepare()
    initialize_distributed(600)
    torch.set_num_threads(2)
    config = load_config(
        CONFIG, ["launcher.nproc_per_node=1", "spot=null", "model.recipe=null", f"model.path={folder}"]
    )
    problems = build_sources(config.tasks, "held_out", 1).held_out(PROMPTS)
    tokenizer = load_tokenizer(folder)

    def requests(temperature: float) -> list[Request]:
        return one_request_each(problems, tokenizer, SamplingSpec(temperature, max_tokens=TOKENS), "r")

    greedy, drafted = greedy_responses(folder, work, requests(0.0))
    sampled = log_probs(folder, requests(1.0)[:8])
    (work / "out.json").write_text(json.dumps({"greedy": greedy, "drafted": drafted, "log_probs": sampled}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
