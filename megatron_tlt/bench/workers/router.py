"""Responses of an engine with a mixture of experts, scored by the actor with its own and with the engine's experts."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.mismatch import Mismatch, mismatch_per_sample
from megatron_tlt.config.schema import ActorConfig, RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.data.routes import RouteFormat, routes_of
from megatron_tlt.models.hf_folder import read_hf_config
from megatron_tlt.platform.device import initialize_distributed, prepare
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.rollout.types import Request, Response, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine

PROMPT_TOKENS, RESPONSE_TOKENS = 16, 96


def _requests(seed: int, count: int, vocabulary: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingSpec(temperature=1.0, max_tokens=RESPONSE_TOKENS)
    prompts = torch.randint(vocabulary, (count, PROMPT_TOKENS), generator=generator).tolist()
    return [Request(str(i), tuple(prompt), sampling, seed=1000 * seed + i) for i, prompt in enumerate(prompts)]


def _batch(responses: list[Response]) -> RolloutBatch:
    return RolloutBatch.of_sequences(
        [[*one.prompt_token_ids, *one.token_ids] for one in responses],
        [len(one.prompt_token_ids) for one in responses],
        rollout_log_probs_G=torch.cat([torch.tensor(one.log_probs, dtype=torch.float32) for one in responses]),
        routes_SF=routes_of(responses),
    )


def _mismatch(policy: Policy, batch: RolloutBatch) -> Mismatch:
    scores = policy.log_probs(batch)
    return Mismatch.of(mismatch_per_sample(batch.with_columns(old_log_probs_G=scores.log_probs_G)))


def main(model: str, given: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    prepare()
    initialize_distributed(300)
    values: dict[str, Any] = json.loads(given)
    folder, vocabulary = Path(model), read_hf_config(Path(model)).vocab_size
    vllm = {"dtype": values["dtype"], "max_num_seqs": 64, "num_gpu_blocks_override": 128}
    rollout = RolloutConfig(
        max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=RESPONSE_TOKENS, router_replay="ids_and_weights", vllm=vllm
    )
    engine = VllmEngine(folder, rollout, SpeculationConfig(enabled=False), seed=1)
    actor = ActorConfig(transformer_impl="local", megatron={"bf16": values["dtype"] == "bfloat16"})
    policy, rows = Policy(folder, actor, seed=1, trainable=False), []
    config = policy.model.config
    ids_width = RouteFormat(config.num_layers, config.moe_router_topk, values["experts"]).width
    for seed in values["seeds"]:
        responses = engine.generate(_requests(seed, values["responses"], vocabulary))
        batch = _batch(responses)
        routes_SF = batch.routes_SF
        assert routes_SF is not None
        for name, given_SF in (("own", None), ("ids", routes_SF[:, :ids_width]), ("ids_and_weights", routes_SF)):
            mismatch = _mismatch(policy, batch.with_columns(routes_SF=given_SF))
            rows.append(
                {
                    "seed": seed,
                    "experts": name,
                    "tokens": sum(len(one.token_ids) for one in responses),
                    "agreement": policy.agreement,
                    "mean_abs": mismatch.mean_abs,
                    "k3_kl": mismatch.k3_kl,
                }
            )
    engine.shutdown()
    atomic_write_text(Path(out), json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
