"""An engine for each family: new weights go in, come back equal, and greedy decoding is that of transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.rollout.vllm_experts import check_experts
from tests.helpers.tiny_models import greedy
from tests.rollout.conftest import ROLLOUT, SPECULATION


def check_refusals(engine: VllmEngine, state: dict[str, torch.Tensor]) -> None:
    """What would end up in wrong places, were it not refused."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    name = next(name for name in state if ".experts.1." in name)
    try:
        engine.load_weights((key, tensor[:, :-1] if key == name else tensor) for key, tensor in state.items())
        raise AssertionError("a narrow expert was loaded")
    except RunError as error:
        assert f"could not load {name}" in str(error), error
    model = engine._runner.get_model()
    layer = next(layer for layer in model.modules() if isinstance(layer, RoutedExperts))
    method = layer.quant_method
    upstream = method.unquantized_backend, method.experts_cls
    swapping = unquantized.UnquantizedMoeBackend.FLASHINFER_CUTLASS
    method.unquantized_backend, (method.experts_cls,) = swapping, unquantized.backend_to_kernel_cls(swapping)
    try:
        check_experts(model)
        raise AssertionError("swapped projections were accepted")
    except ConfigError as error:
        assert "vLLM chose FLASHINFER_CUTLASS, which rearranges" in str(error), error
        assert "allowed: triton, batched_triton" in str(error), error
    finally:
        method.unquantized_backend, method.experts_cls = upstream


def main(root: str) -> None:
    for folder in sorted(Path(root).iterdir()):
        engine = VllmEngine(folder, ROLLOUT, SPECULATION, seed=7)
        state = load_file(folder / "model.safetensors")
        read = {name: tensor for name, tensor, _ in engine.read_weights()}
        assert read.keys() == state.keys(), (folder.name, read.keys() ^ state.keys())
        assert all(torch.equal(read[name], tensor) for name, tensor in state.items()), folder.name
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        if any(".experts." in name for name in state):
            check_refusals(engine, state)
        engine.load_weights((name, tensor * 1.1) for name, tensor in state.items())
        assert all(torch.equal(tensor, state[name] * 1.1) for name, tensor, _ in engine.read_weights()), folder.name
        prompt = (5, 9, 7) * 4
        response = engine.generate([Request("a", prompt, SamplingSpec(temperature=0.0, max_tokens=24), seed=0)])[0]
        assert list(response.token_ids) == greedy(model, prompt, response.token_ids), folder.name
        engine.shutdown()
        print("same:", folder.name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
