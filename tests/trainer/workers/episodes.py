"""All ranks are one engine: responses of several turns, whose tokens are held against what the environment read."""

from __future__ import annotations

import json
import string
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import AdaptiveConfig, NgramConfig, SpeculationConfig
from megatron_tlt.config.task import EnvironmentConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.environments.pool import EnvironmentPool
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.device import initialize_distributed
from megatron_tlt.rewards import RewardPool
from megatron_tlt.rollout.adaptive import build_controller
from megatron_tlt.rollout.engine_speculation import EngineSpeculation
from megatron_tlt.rollout.replay import ReplayEngine
from megatron_tlt.rollout.types import DraftStats, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.experience import ExperienceCollector

STOPS = tuple(string.ascii_lowercase[3:])
ENVIRONMENT = EnvironmentConfig(name="tests.helpers.letters_environment.Letters", stop=STOPS, max_turn_tokens=12)
PROBLEMS = [
    Problem(f"p/{i}", "p", "abcdefgh"[i : i + 4], "1", "math", environment=ENVIRONMENT.model_dump(mode="json"))
    for i in range(4)
]
PLAIN = Problem("q/0", "q", "abc", "1", "math")


def main(model_folder: str, out: str) -> None:
    initialize_distributed(600)
    folder, ranks = Path(model_folder), dist.get_world_size()
    vllm = {"dtype": "float32", "max_num_seqs": 32, "num_gpu_blocks_override": 64}
    rollout = RolloutConfig(max_prompt_tokens=8, max_response_tokens=40, tensor_parallel_size=ranks, vllm=vllm)
    adaptive = AdaptiveConfig(strategies=["off", "ngram-2"], lengths="classes", threshold=32)
    speculation = SpeculationConfig(num_speculative_tokens=2, ngram=NgramConfig(prompt_lookup_min=1), adaptive=adaptive)
    engine = VllmEngine(folder, rollout, speculation, seed=7)
    tokenizer = load_tokenizer(folder)
    with RewardPool(1, 30.0, ["math"]) as pool, EnvironmentPool(1, 30.0) as environments:
        given: dict[str, Any] = {
            "max_prompt_tokens": rollout.max_prompt_tokens,
            "max_response_tokens": rollout.max_response_tokens,
            "timeline": Timeline(0),
        }
        drafts = EngineSpeculation(speculation, build_controller(speculation, 40, 0, 32))
        collector = ExperienceCollector(
            engine,
            tokenizer,
            pool,
            tensor_parallel_size=ranks,
            environments=environments,
            speculation=drafts,
            **given,
        )
        sampling = SamplingSpec(max_tokens=40, stop_token_ids=tokenizer.stop_ids)
        recording = Path(out, "recording")
        scored, batch, _ = collector.collect([*PROBLEMS, PLAIN], 8, sampling, (0,), recording=recording)
        dist.barrier()
        replay = ReplayEngine(folder, rollout, SpeculationConfig(enabled=False), 7, path=str(recording))
        replayed = ExperienceCollector(replay, tokenizer, pool, tensor_parallel_size=1, **given)
        again, repeated, _ = replayed.collect([*PROBLEMS, PLAIN], 8, sampling, (0,))
        same = [replace(one, draft=DraftStats()) for one in scored] == again
        if ranks == 1:
            same &= all(
                torch.equal(getattr(batch, name), getattr(repeated, name))
                for name in ("tokens_S", "rollout_log_probs_G", "loss_mask_G", "rewards_N")
            )
        mixed = batch.loss_mask_G is not None
        plain, second, _ = collector.collect([PLAIN], 2, sampling, (0,))
    rows = []
    for index, one in enumerate(scored if dist.get_rank() == 0 else []):
        tokens, mask = batch.response("tokens_S", index).tolist(), batch.response("loss_mask_G", index).tolist()
        runs: list[list[int]] = [[]]
        for token, own in zip(tokens, mask, strict=True):
            if own:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        said = [tokenizer.decode([t for t in run if t not in tokenizer.stop_ids]) for run in runs if run]
        zeros = [
            x for x, own in zip(batch.response("rollout_log_probs_G", index).tolist(), mask, strict=True) if not own
        ]
        rows.append(
            {
                "turns": one.turns,
                "said": said,
                "heard": one.reward.extracted,
                "value": one.reward.value,
                "count": one.said,
                "own": sum(mask),
                "length": one.length,
                "finish": one.finish_reason,
                "zeros": not any(zeros),
                "problem": one.problem,
            }
        )
    found = {"rows": rows, "mixed": mixed, "plain": second.loss_mask_G is None and len(plain) == 2, "same": same}
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3])
