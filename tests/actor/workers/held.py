"""Builds models under several layouts in the same processes and writes what each rank really holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_tlt.actor.megatron_model import build_model
from megatron_tlt.actor.megatron_weights import held_spans
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, rank, world_size

# isort: split
from megatron.core import parallel_state

_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VP": "virtual_pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "FIRST": "num_layers_in_first_pipeline_stage",
    "LAST": "num_layers_in_last_pipeline_stage",
}


def layout(**sizes: int) -> dict[str, Any]:
    return {_SIZES[key]: size for key, size in sizes.items()} | ({"sequence_parallel": True} if "TP" in sizes else {})


EMBEDDING, LOSS = ({f"account_for_{kind}_in_pipeline_split": True} for kind in ("embedding", "loss"))
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("tied", layout()),
        ("tied", layout(PP=2)),
        ("tied", layout(TP=2)),
        ("untied", layout(PP=2, VP=2)),
        ("untied", layout(CP=2)),
        ("seven", layout(PP=2) | LOSS),
        ("seven", layout(PP=2, VP=2) | EMBEDDING),
        ("moe", layout(EP=2)),
        ("moe", layout(TP=2)),
        ("moe", layout(TP=2, EP=2, ETP=1)),
    ],
    4: [
        ("tied", layout(TP=2, PP=2)),
        ("tied", layout(PP=4, VP=2)),
        ("untied", layout(TP=4)),
        ("untied", layout(PP=4, FIRST=1, LAST=3)),
        ("untied", layout(PP=4, FIRST=5)),
        ("untied", layout(PP=2, VP=2, FIRST=2, CP=2)),
        ("untied", layout(PP=2, VP=2, LAST=2)),
        ("six", layout(PP=4, VP=2) | EMBEDDING | LOSS),
        ("six", layout(PP=4) | EMBEDDING | LOSS),
        ("moe", layout(TP=2, EP=2)),
        ("moe", layout(PP=2, EP=2)),
        ("moe", layout(EP=2, ETP=2)),
        ("moe", layout(TP=4, EP=2, ETP=1)),
        ("mixtral", layout(TP=2, PP=2, ETP=1)),
    ],
    8: [
        ("tied", layout(TP=2, PP=2, CP=2)),
        ("untied", layout(TP=2, PP=2, VP=2)),
        ("moe", layout(TP=2, PP=2, EP=2, ETP=1)),
        ("moe", layout(TP=4, PP=2, EP=2, ETP=2)),
    ],
}


def main(models: str, out: str) -> None:
    initialize_distributed(120)
    rows = []
    for model, megatron in CASES[world_size()]:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        built = build_model(
            Path(models, model), ActorConfig(transformer_impl="local", megatron=megatron), 0, trainable=False
        )
        spans = (span for span, _ in held_spans(built.weights, built.chunks))
        rows.append(sorted((span.tensor, span.start, span.length) for span in spans))
    Path(out, f"world{world_size()}.rank{rank()}.json").write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
