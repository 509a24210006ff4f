"""With ``elastic.strict`` weights have the same bits under every pipeline and power-of-two data-parallel size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench.elastic_layouts import LOGICAL_SHARDS, SIZES, layout, name_of
from megatron_tlt.bench.tiny_models import write_tiny_model
from tests.helpers.launch import run_torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
WORKER = Path(__file__).parent / "workers" / "strict.py"
Layouts = dict[int, dict[str, dict[str, Any]]]
Rows = dict[str, dict[str, Any]]
TENSOR_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def sizes(*wanted: str, strict: bool = True, **options: Any) -> dict[str, dict[str, Any]]:
    """Layouts of ``bench.elastic_layouts`` by their names."""
    names = {name_of(stages, replicas): stages for stages, replicas in SIZES}
    shards, prefix = (LOGICAL_SHARDS, "") if strict else (None, "plain ")
    return {f"{prefix}{name}": layout(shards, names[name], **options) for name in wanted}


ALL: Layouts = {
    1: sizes("pp1 dp1") | sizes("pp1 dp1", strict=False),
    2: sizes("pp1 dp2", "pp2 dp1"),
    3: sizes("pp3 dp1") | sizes("pp3 dp1", strict=False),
    4: sizes("pp1 dp4", "pp2 dp2", "pp4 dp1") | sizes("pp1 dp4", strict=False),
}
TENSOR: Layouts = {
    2: sizes("pp1 dp1", **TENSOR_PARALLEL) | sizes("pp1 dp1", strict=False, **TENSOR_PARALLEL),
    4: sizes("pp1 dp2", "pp2 dp1", **TENSOR_PARALLEL),
}
HALF: Layouts = {
    1: sizes("pp1 dp1", bf16=True) | sizes("pp1 dp1", strict=False, bf16=True),
    4: sizes("pp1 dp4", "pp2 dp2", bf16=True),
}


def trained(layouts: Layouts, folder: Path, model: str = "qwen2-untied", **options: Any) -> Rows:
    """The rows of ``bench.workers.strict`` for all layouts, each on as many processes as its key says."""
    write_tiny_model(model, folder / "model", num_hidden_layers=5, tie_word_embeddings=False)
    rows: Rows = {}
    for processes, of_processes in layouts.items():
        given = {"model": str(folder / "model"), "layouts": of_processes, **options}
        out = folder / f"rows-{processes}.json"
        run_torchrun(WORKER, processes, [json.dumps(given), str(folder), str(out)], timeout_s=300)
        rows |= json.loads(out.read_text())
    return rows


def check_equal_bits(rows: Rows, updates: int) -> None:
    strict = {name: row for name, row in rows.items() if not name.startswith("plain")}
    first = strict["pp1 dp1"]
    assert len(first["hashes"]) > 50 and len(first["updates"]) == updates
    assert all(update["grad_norm"] > 0.05 for update in first["updates"]), "clipping is active"
    for name, row in strict.items():
        assert row["hashes"] == first["hashes"], name
        assert row["log_probs"] == first["log_probs"], name
        assert row["updates"] == first["updates"], name


@pytest.mark.slow
def test_every_size_leads_to_the_same_bits(tmp_path: Path) -> None:
    rows = trained(ALL, tmp_path, batches=5, mini_batches=2)
    check_equal_bits(rows, updates=10)
    # the test can fail: Megatron's own sums and norm depend on both sizes
    plain = {name: row for name, row in rows.items() if name.startswith("plain")}
    assert len({json.dumps(row["hashes"]) for row in plain.values()}) == len(plain) == 3
    norms = [plain[f"plain {name}"]["updates"][0]["grad_norm"] for name in ("pp1 dp1", "pp3 dp1")]
    assert norms[0] != norms[1] and norms[0] == pytest.approx(norms[1], rel=1e-6)
    # and what is summed is the same
    own, theirs = rows["pp1 dp1"]["updates"][0], plain["plain pp1 dp1"]["updates"][0]
    assert own == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_tensor_parallel_ranks_sum_the_gradients_of_norms_in_the_same_order(tmp_path: Path) -> None:
    # Qwen3 has norms of queries and keys, whose gradients these ranks add up
    rows = trained(TENSOR, tmp_path, "qwen3-tied", batches=2)
    check_equal_bits(rows, updates=2)
    own, theirs = rows["pp1 dp1"]["updates"][0], rows["plain pp1 dp1"]["updates"][0]
    assert own == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_in_bf16_and_padded_too(tmp_path: Path) -> None:
    rows = trained(HALF, tmp_path, batches=3, packing=False)
    check_equal_bits(rows, updates=3)
