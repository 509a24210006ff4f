"""Asks Megatron-Core itself which layouts it takes: its groups, its config and rank 0's layers, and writes each answer.

torch's ``fake`` backend stands for the other processes: the groups are Megatron's own, nothing is sent.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_tlt.actor.megatron_layers import block_spec
from megatron_tlt.config.layouts import Layout, ModelShape, problems

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

SAMPLES_PER_WORLD = 200
REFUSALS = (ValueError, RuntimeError, AssertionError)


_EMBEDDING, _LOSS = {"counts_embedding": True}, {"counts_loss": True}
_COUNTED: tuple[dict[str, bool], ...] = ({}, {}, {}, _LOSS, _EMBEDDING, _EMBEDDING | _LOSS)


def sample(generator: random.Random, world: int) -> tuple[Layout, ModelShape]:
    """A layout and a shape, most of whose parts fit.

    Left out is what Megatron takes though it cannot run here: one virtual stage, and first and last stages that are
    one stage or hold more layers than there are (a model of fewer layers is built, without a word).
    """
    pick = generator.choice
    experts, groups = pick((0, 0, 4, 6)), pick((1, 2, 3, 4))
    shape = ModelShape(
        layers=pick((4, 6, 8, 12)),
        heads=groups * pick((1, 3, 4)),
        kv_groups=groups,
        head_dim=pick((8, 8, 3)),
        ffn=None if experts else pick((10, 12, 24)),
        experts=experts,
        moe_ffn=pick((10, 12, 24)) if experts else None,
    )
    tp, pp, uneven = pick((1, 1, 2, 2, 3, 4)), pick((1, 1, 2, 2, 3, 4)), pick((False, False, False, True))
    layout = Layout(
        world,
        tp=tp,
        pp=pp,
        vpp=pick((None, None, 2, 3)) if pp > 1 else pick((None, None, None, 2)),
        cp=pick((1, 1, 1, 2)),
        ep=pick((1, 1, 2, 3)) if experts else pick((1,) * 9 + (2,)),
        etp=pick((None, None, 1, 2, 4)) if experts else None,
        sp=pick((tp > 1,) * 4 + (False, True)),
        first=pick((None, 1, 2)) if uneven else None,
        last=pick((None, 1, 2)) if uneven and pp > 1 else None,
        **({} if uneven else pick(_COUNTED)),
    )
    return layout, shape


def build(layout: Layout, shape: ModelShape) -> None:
    """What a run does before it sends anything; raises what Megatron raises."""
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        # Megatron's rules for context parallelism are those of its groups; here no attention is run.
        **sizes | {"context_parallel_size": 1},
        sequence_parallel=layout.sp,
        num_layers_in_first_pipeline_stage=layout.first,
        num_layers_in_last_pipeline_stage=layout.last,
        account_for_embedding_in_pipeline_split=layout.counts_embedding,
        account_for_loss_in_pipeline_split=layout.counts_loss,
        num_layers=shape.layers,
        hidden_size=16,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn or 8,
        num_moe_experts=shape.experts or None,
        moe_ffn_hidden_size=shape.moe_ffn,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        pipeline_dtype=torch.float32,
    )
    for stage in range(layout.vpp or 1):
        stage_or_none = None if layout.vpp is None else stage
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, "local", stage_or_none),
            vocab_size=12,
            max_sequence_length=8,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=stage_or_none,
        )
        for module in model.modules():
            if isinstance(module, MoELayer):
                refuse_moe_without_sequence_parallel(module)


def refuse_moe_without_sequence_parallel(layer: MoELayer) -> None:
    """Runs the layer's check, which stands at the start of its forward pass."""
    try:
        layer(torch.zeros(4, 1, 16))
    except ValueError:
        raise
    except Exception:  # the fake backend sends nothing, so the dispatcher may fail after the check
        return


def main(out: str) -> None:
    rows = []
    generator = random.Random(5)
    for world in (2, 4, 8, 12, 24):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        for _ in range(SAMPLES_PER_WORLD):
            layout, shape = sample(generator, world)
            refusal = ""
            try:
                build(layout, shape)
            except REFUSALS as error:
                refusal = f"{type(error).__name__}: {error}"
            parallel_state.destroy_model_parallel()
            rows.append(
                {"layout": repr(layout), "shape": repr(shape), "ours": problems(layout, shape), "theirs": refusal}
            )
        dist.destroy_process_group()
    Path(out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
