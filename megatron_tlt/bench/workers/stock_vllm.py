"""A target with a drafter in plain vLLM, as users serve them: imports nothing of this project.

stock_vllm.py TARGET DRAFTER METHOD K PROMPTS.json MAX_TOKENS MAX_MODEL_LEN STOP_IDS OUT.json
"""

import json
import os
import sys
from pathlib import Path


def main(
    target: str,
    drafter: str,
    method: str,
    depth: str,
    prompts: str,
    max_tokens: str,
    max_model_len: str,
    stop_ids: str,
    out: str,
) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the engine's imports happen in this process
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=target,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=int(max_model_len),
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 28,  # by default vLLM takes nearly all memory
        gpu_memory_utilization=0.1,
        disable_log_stats=False,
        speculative_config={"method": method, "model": drafter, "num_speculative_tokens": int(depth)},
    )
    stops = json.loads(stop_ids)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=int(max_tokens), ignore_eos=not stops, stop_token_ids=stops, detokenize=False
    )
    given = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    outputs = llm.generate(given, sampling, use_tqdm=False)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counts["vllm:spec_decode_num_drafts"],
        "accepted": counts["vllm:spec_decode_num_accepted_tokens"],
        "imported": sorted(name for name in sys.modules if name.partition(".")[0] == "megatron_tlt"),
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
