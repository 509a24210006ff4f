"""Captures a plan's CUDA graphs in a vLLM engine with dummy weights, and writes their device memory.

graph_memory.py JOB.json OUT.json

Needs a GPU and the supported vLLM. One process per plan, so that memory left by one does not count for the next.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_tlt.rollout.vllm_graphs import planned_graphs
from megatron_tlt.speculation.graph_pool import Graph, GraphPlan
from megatron_tlt.speculation.strategy import Strategy

VOCAB = 128256
MAX_MODEL_LEN = 4096


def main(given: str, out: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # keeps the hook and the captures in this process
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    job = json.loads(Path(given).read_text(encoding="utf-8"))
    plan = read_plan(job)
    from vllm import LLM
    from vllm.compilation.counter import compilation_counter
    from vllm.config.load import LoadConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    captures: list[tuple[int, float]] = []
    upstream = GPUModelRunner.capture_model

    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        started = time.perf_counter()
        taken = upstream(self, profile_only=profile_only)
        if not profile_only:
            captures.append((taken, time.perf_counter() - started))
        return taken

    GPUModelRunner.capture_model = capture_model
    with tempfile.TemporaryDirectory() as folder:
        target = write_config(Path(folder) / "target", job["model"], job["model"]["num_hidden_layers"])
        arguments = dict(job["arguments"])
        if "speculative_config" in arguments:
            head = write_config(Path(folder) / "head", job["model"], 1)
            arguments["speculative_config"] |= {
                "method": "eagle",
                "model": str(head),
                "draft_load_config": LoadConfig(load_format="dummy"),
            }
        with planned_graphs(plan):
            LLM(
                model=str(target),
                load_format="dummy",
                dtype="bfloat16",
                skip_tokenizer_init=True,
                max_model_len=MAX_MODEL_LEN,
                async_scheduling=False,
                gpu_memory_utilization=0.7,
                **arguments,
            )
    taken, seconds = captures[-1]
    found = {"bytes": taken, "seconds": seconds, "captured": compilation_counter.num_cudagraph_captured}
    Path(out).write_text(json.dumps(found), encoding="utf-8")


def read_plan(job: dict[str, Any]) -> GraphPlan:
    """Reads a job's plan."""
    graphs = tuple(
        Graph(kind, batch, tokens, None if owner is None else Strategy.parse(owner))
        for kind, batch, tokens, owner in job["graphs"]
    )
    return GraphPlan(job["kind"], graphs, tuple(map(Strategy.parse, job["strategies"])))


def write_config(folder: Path, model: dict[str, Any], num_hidden_layers: int) -> Path:
    """Writes a Llama configuration, without weights."""
    folder.mkdir()
    named = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: model[name] for name in named},
        "num_hidden_layers": num_hidden_layers,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


if __name__ == "__main__":
    main(*sys.argv[1:])
