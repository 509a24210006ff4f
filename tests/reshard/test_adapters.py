"""An engine that adds adapters to its weights itself."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from megatron_tlt.errors import RunError
from megatron_tlt.models.lora_weights import adapter_cut_dims, adapter_shapes, is_adapted, merged
from megatron_tlt.reshard.adapters import AdapterSync, MergingTarget
from megatron_tlt.reshard.interface import HeldWeights, Part, SyncReport, WeightSync
from megatron_tlt.rollout.types import ShardSlice

SHAPES = {
    "model.layers.0.self_attn.q_proj.weight": (6, 4),
    "model.layers.0.self_attn.o_proj.weight": (4, 6),
    "model.layers.0.self_attn.q_proj.bias": (6,),
    "model.norm.weight": (4,),
}
Q, OUT = list(SHAPES)[:2]


class Memory:
    """An engine's part in plain memory: the second of two tensor-parallel ranks."""

    def __init__(self, whole: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.weights: list[tuple[str, torch.Tensor, ShardSlice | None]] = [
            (Q, whole[Q][3:].to(dtype, copy=True), ShardSlice(0, 3, 3)),
            (OUT, whole[OUT][:, 3:].to(dtype, copy=True), ShardSlice(1, 3, 3)),
            (list(SHAPES)[3], whole[list(SHAPES)[3]].to(dtype, copy=True), None),
        ]

    def begin_update(self, part: Part) -> None:
        self.calls.append((f"begin {part}", None))

    def finish_update(self, part: Part, version: int) -> None:
        self.calls.append((f"finish {part}", version))

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        raise AssertionError("whole tensors are not loaded here")

    def read_weights(self) -> HeldWeights:
        return self.weights

    read_drafter_weights = read_weights


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_update_writes_base_and_adapters_anew(dtype: torch.dtype) -> None:
    whole = whole_tensors()
    engine, shapes = Memory(whole, dtype), adapter_shapes(SHAPES, ("attention",), 2)
    target = MergingTarget(engine, shapes, 0.5)
    assert not target.has_base
    target.keep_base()
    assert target.has_base and target.read_weights() is target.read_weights()
    for version in (1, 2):
        target.begin_update("policy")
        for name, buffer, _ in target.read_weights():
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(version + len(name))))
        received = {name: buffer.clone() for name, buffer, _ in target.read_weights()}
        for _, view, _ in engine.weights:
            view.fill_(torch.nan)  # a sleep dropped them
        target.finish_update("policy", version)
        for name, view, part in engine.weights:
            expected = whole[name].to(dtype)
            if name in (Q, OUT):
                down, up = (received[name.replace(".weight", kind)] for kind in (".lora_A.weight", ".lora_B.weight"))
                expected = (expected.float() + 0.5 * up @ down).to(dtype)
            if part is not None:
                expected = expected.narrow(part.dim, part.start, part.length)
            torch.testing.assert_close(view, expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert engine.calls == [("begin policy", None), ("finish policy", 1), ("begin policy", None), ("finish policy", 2)]
    with pytest.raises(RunError, match="adapters belong to the policy"):
        target.read_drafter_weights()
    with pytest.raises(RunError, match="buffers of read_weights"):
        target.load_weights([])


def test_the_base_moves_once_and_is_verified() -> None:
    class Recorded(WeightSync):
        def __init__(self) -> None:
            self.calls: list[tuple[int, bool]] = []

        def sync(self, *, version: int, verify: bool) -> SyncReport:
            self.calls.append((version, verify))
            return SyncReport(len(self.calls), 0, 0.0, version)

    base, adapters = Recorded(), Recorded()
    sync = AdapterSync(base, adapters, MergingTarget(Memory(whole_tensors(), torch.float32), {}, 1.0))
    reports = [sync.sync(version=version, verify=version == 6) for version in (4, 5, 6)]
    assert base.calls == [(4, True)] and adapters.calls == [(4, False), (5, False), (6, True)]
    assert [report.tensors for report in reports] == [1, 2, 3]


def test_names_and_shapes_of_adapters() -> None:
    assert adapter_shapes(SHAPES, ("q_proj",), 2) == {
        "model.layers.0.self_attn.q_proj.lora_A.weight": (2, 4),
        "model.layers.0.self_attn.q_proj.lora_B.weight": (6, 2),
    }
    adapters = adapter_shapes(SHAPES, ("attention",), 2)
    cut = adapter_cut_dims({Q: 0, OUT: 1}, adapters)
    assert [cut[name] for name in adapters] == [0, 0, 1, 0]
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert is_adapted(expert, ("experts",)) and not is_adapted(expert, ("mlp", "up_proj"))
    assert not is_adapted("model.layers.0.mlp.up_proj.weight", ("experts",))
    assert not is_adapted("model.embed_tokens.weight", ("attention", "mlp", "experts"))


def test_merging_rounds_once() -> None:
    base, down, up = torch.tensor([[1.0]]).bfloat16(), torch.tensor([[2.0**-9]]), torch.tensor([[1.0]])
    assert merged(base, down, up, 1.0).item() == 1.0 and merged(base, down, up, 1.0).dtype == torch.bfloat16
    assert merged(base, down, up, 4.0).item() == 1.0 + 2.0**-7
