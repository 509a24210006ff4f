"""Greedy responses of vLLM, without speculation and with a drafter folder, and all proposed drafts."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.rollout import vllm_setup
from megatron_tlt.rollout.vllm_patches import apply_all_patches

ROLLOUT = RolloutConfig(max_prompt_tokens=64, max_response_tokens=64, vllm={"dtype": "float32", "max_num_seqs": 4})


def build(target: str, speculative: dict[str, Any] | None) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = vllm_setup.engine_args(Path(target), ROLLOUT, SpeculationConfig(enabled=False), seed=1)
    arguments["speculative_config"] = speculative
    with vllm_setup.launcher_variables(), vllm_setup.isolated_random_state(), vllm_setup.readable_weights():
        return LLMEngine.from_engine_args(EngineArgs(**arguments))


def record_drafts(engine: Any) -> list[dict[str, Any]]:
    """Record every proposal: the position of the target's last token, the token after it, the drafts."""
    proposer = vllm_setup.model_runner_of(engine).drafter
    upstream = proposer.propose
    records: list[dict[str, Any]] = []

    def propose(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(upstream).bind(*args, **kwargs).arguments
        at = given.get("token_indices_to_sample")
        at = given["common_attn_metadata"].query_start_loc[1:] - 1 if at is None else at
        positions, following = given["target_positions"][at].tolist(), given["next_token_ids"].tolist()
        drafts = upstream(*args, **kwargs)
        for row, position in enumerate(positions):
            records.append({"position": position, "next": following[row], "drafts": drafts[row].tolist()})
        return drafts

    proposer.propose = propose
    return records


def generate(engine: Any, prompts: list[list[int]], records: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Generate one prompt at a time, so that a record belongs to one response."""
    from vllm import SamplingParams

    rows = []
    for i, prompt in enumerate(prompts):
        if records is not None:
            records.clear()
        sampling = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        outputs: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs = list(output.outputs[0].token_ids)
        rows.append({"prompt": prompt, "response": outputs, "records": list(records or [])})
    return rows


def main(target: str, folder: str, method: str, prompts: str, out: str) -> None:
    vllm_setup.prepare_environment()
    apply_all_patches()
    vllm_setup.ensure_process_group()
    plain = build(target, None)  # keep a reference: destroying the engine destroys the process group
    found = {"plain": generate(plain, json.loads(prompts), None)}
    engine = build(target, {"method": method, "model": folder, "num_speculative_tokens": 2})
    found["drafted"] = generate(engine, json.loads(prompts), record_drafts(engine))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
