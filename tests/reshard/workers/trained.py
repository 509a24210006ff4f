"""One rank of an actor and engines: training steps, weights over, and what the engines hold and say after each.

After every synchronization the engine's slices are compared bit for bit with the exported tensors, and its greedy
responses with those of transformers, which gets the exported tensors too.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.bench.export_sync import ExportSync
from megatron_tlt.bench.workers.layout import random_samples
from megatron_tlt.config.schema import ActorConfig, ModelConfig, ReshardConfig, RolloutConfig, TltConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, prepare, rank
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.trainer.synchronization import policy_sync
from tests.helpers.tiny_models import greedy

PROMPTS = [(5, 9, 7, 11), (3,), (60, 2, 8)]


def config_of(folder: Path, case: dict[str, Any]) -> TltConfig:
    vllm = {"dtype": "float32", "load_format": "dummy", "num_gpu_blocks_override": 16, "max_num_seqs": 4}
    return TltConfig(
        model=ModelConfig(path=folder),
        tasks=[TaskConfig(name="gcd")],
        actor=ActorConfig(
            transformer_impl="local",
            megatron=case["megatron"],
            optimizer={"lr": case.get("lr", 3e-3)},
            max_tokens_per_micro_batch=96,
            lora=case.get("lora"),
        ),
        rollout=RolloutConfig(
            tensor_parallel_size=case["engine_tp"],
            max_prompt_tokens=64,
            max_response_tokens=64,
            vllm={**vllm, **case.get("vllm", {})},
        ),
        speculation=SpeculationConfig(enabled=False),
        reshard=ReshardConfig(staging_mb=0.25),
    )


def reference(folder: Path, exported: dict[str, torch.Tensor]) -> PreTrainedModel:
    """transformers' model with these weights."""
    with tempfile.TemporaryDirectory() as temporary:
        shutil.copy(folder / "config.json", temporary)
        save_file(exported, Path(temporary, "model.safetensors"), metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(temporary, dtype=torch.float32).eval()


def check(policy: Policy, engine: VllmEngine, folder: Path) -> list[list[int]]:
    """Holds the engine against the exported weights; returns its responses."""
    exported = dict(policy.export_weights())
    held = set()
    for name, view, part in engine.read_weights():
        whole = exported[name]
        expected = whole if part is None else whole.narrow(part.dim, part.start, part.length)
        assert torch.equal(view, expected), f"{name} on rank {rank()}"
        held.add(name)
    assert held, "the engine holds nothing"
    model = reference(folder, exported)
    sampling = SamplingSpec(temperature=0.0, max_tokens=20)
    requests = [Request(str(i), prompt, sampling, seed=i) for i, prompt in enumerate(PROMPTS)]
    responses = [list(response.token_ids) for response in engine.generate(requests)]
    for prompt, tokens in zip(PROMPTS, responses, strict=True):
        assert tokens == greedy(model, prompt, tokens), f"rank {rank()}: {prompt}"
    return responses


def run_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    config = config_of(folder, case)
    policy = Policy(folder, config.actor, seed=0, total_steps=4)
    engine = VllmEngine(folder, config.rollout, config.speculation, seed=0)
    direct, export = policy_sync(config, policy, engine), ExportSync(policy.export_weights, engine)
    samples = random_samples()
    said, row = [], {}
    for version in range(4):
        way = export if version == 3 else direct
        report = way.sync(version=version, verify=True)
        assert report.verified_tensors == report.tensors > 0
        assert engine.versions["policy"] == report.version == version
        said.append(check(policy, engine, folder))
        if version == 0:
            row = {"sent": report.sent_bytes, "bound": report.lower_bound_bytes, "staging": report.staging_bytes}
        policy.update(samples, negative_log_likelihood)
    assert any(a != b for a, b in itertools.pairwise(said)), "training changed no response"
    engine.shutdown()
    return row


def main(root: str, cases: str, out: str) -> None:
    prepare()
    initialize_distributed(120)
    rows = {}
    for name, case in json.loads(cases).items():
        rows[name] = run_case(Path(root, case["model"]), case)
        barrier()
    Path(out, f"rank{rank()}.json").write_text(json.dumps(rows), encoding="utf-8")
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
