"""Hidden states recorded in the log-prob pass are transformers', under every layout, each sample's on one rank."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers.launch import run_torchrun
from tests.helpers.samples import Sample

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "aux_layers.py"


@cache
def expected_states(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Of each sample the states at every layer and behind the final norm, without its last token."""
    from tests.actor.workers.layouts import samples

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [_states(model, sample) for sample in samples()]


@torch.no_grad()
def _states(model: torch.nn.Module, sample: Sample) -> dict[str, torch.Tensor]:
    before_norm = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    output = model(torch.tensor([sample.token_ids[:-1]]), output_hidden_states=True)
    hook.remove()
    final = model.model.norm(before_norm[0])[0]
    return {"layers": torch.cat([*output.hidden_states[:-1], before_norm[0], final[None]], dim=-1)[0], "final": final}


def only(ranks: list[dict[str, torch.Tensor]], key: str) -> torch.Tensor:
    """What exactly one rank has under a key."""
    (found,) = [rank[key] for rank in ranks if key in rank]
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_states_are_those_of_transformers_and_each_samples_are_on_one_rank(
    world: int, models: Path, tmp_path: Path
) -> None:
    from tests.actor.workers.aux_layers import LAYOUTS, SAMPLES
    from tests.actor.workers.layouts import model_of, samples

    run_torchrun(WORKER, world, [str(models), str(tmp_path)], timeout_s=300)
    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(world)]
    for name in LAYOUTS[world]:
        expected = expected_states(model_of(models, name))
        size = expected[0]["final"].shape[1]
        cases = [
            (f"{name}/{which}/{kind}/{index}", states[kind])
            for which, chosen in SAMPLES.items()
            for index, states in enumerate(expected[chosen])
            for kind in ("layers", "final")
        ]
        for key, want in cases:
            found = only(ranks, key)
            assert found.shape == (len(want) + 1, want.shape[1]), key
            # each column by itself: the residual stream is larger than what is behind the norm
            for column, (own, other) in enumerate(
                zip(found[:-1].split(size, dim=1), want.split(size, dim=1), strict=True)
            ):
                assert (own - other).abs().max() <= 1e-5 * other.abs().max(), (key, column)
            assert not found[-1].any(), key
        for index, states in enumerate(expected):
            found = only(ranks, f"{name}/all/bf16/{index}")
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found[:-1].float(), states["final"], rtol=2**-8, atol=1e-4)
        counts = [sum(key.startswith(f"{name}/all/final/") for key in rank) for rank in ranks]
        assert min(counts) >= 1 and sum(counts) == len(samples()), (name, counts)
    for rank in range(world):
        same = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert {case for case, equal in same.items() if not equal} == set()
        assert len(same) == 4 * len(LAYOUTS[world])
