"""Stock vLLM with an adapter's folder: its greedy responses and their log-probs, without and with the adapter."""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

PROMPTS = [[5, 9, 7, 11], [3, 4], [60, 2, 8]]


def main(base: str, adapter: str, out: str) -> None:
    llm = LLM(
        base,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        num_gpu_blocks_override=16,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, detokenize=False, ignore_eos=True)
    found = []
    for request in (None, LoRARequest("adapter", 1, adapter)):
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, lora_request=request, use_tqdm=False
        )
        found.append(
            [
                {
                    "tokens": list(one.outputs[0].token_ids),
                    "log_probs": [
                        row[token].logprob
                        for row, token in zip(one.outputs[0].logprobs, one.outputs[0].token_ids, strict=True)
                    ],
                }
                for one in results
            ]
        )
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:4])
