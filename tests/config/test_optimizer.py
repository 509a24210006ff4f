"""Rules between the keys of the actor's optimizer, and its schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.optimizer import LrScheduleConfig, OptimizerSplitConfig, split_tensors
from megatron_tlt.errors import ConfigError
from tests.helpers.launch import REPOSITORY

QUICKSTART = REPOSITORY / "launch" / "quickstart-deterministic.yaml"
MUON = "actor.optimizer.optimizer=torch.optim.Muon"
SPLIT = "actor.optimizer_split={lr: 1.0e-3}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor.optimizer_sharding=tensor"], "optimizer_sharding: found tensor; adam is Megatron's"),
        (["actor.optimizer_loss=one_minus_reward"], "optimizer_loss: found one_minus_reward; adam takes no loss"),
        ([SPLIT], "optimizer_split: found actor.optimizer.optimizer adam, which owns slices"),
        (
            [MUON, SPLIT, "actor.optimizer_sharding=element"],
            "found actor.optimizer_sharding element, which owns",
        ),
        ([MUON, "actor.optimizer_split={lr: 0.1, optimizer: adamw}"], "optimizer_split.optimizer: found 'adamw'"),
        ([MUON, "actor.optimizer_split={lr: 0.1, optimizer: nowhere.A}"], "no package 'nowhere' is installed"),
        (
            [MUON, "actor.optimizer_split={lr: 0.1, optimizer_arguments: {weight_decay: 1}}"],
            "optimizer_split.optimizer_arguments.weight_decay: cannot be set here",
        ),
        (
            [MUON, SPLIT, "actor.ddp.overlap_param_gather=true"],
            "overlap_param_gather: found true; torch.optim.Muon",
        ),
        ([MUON, "actor.optimizer_split={}"], "actor.optimizer_split.lr"),
        (["actor.lr_schedule={min_lr_fraction: 0.1}"], "a constant rate does not fall"),
        (["actor.lr_schedule={kind: cosine, decay_fraction: 0.1}"], "decay_fraction: found kind cosine"),
        (["actor.lr_schedule={kind: sine}"], "actor.lr_schedule.kind"),
    ],
)
def test_what_would_have_no_effect_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Path(QUICKSTART), overrides)
    assert said in str(caught.value)


def test_matrices_of_the_layers_and_others() -> None:
    shapes = {
        "model.embed_tokens.weight": (9, 4),
        "model.layers.0.self_attn.q_proj.weight": (4, 4),
        "model.layers.0.self_attn.q_proj.bias": (4,),
        "model.layers.0.mlp.experts.3.down_proj.weight": (4, 6),
        "model.norm.weight": (4,),
    }
    main, others = split_tensors(shapes, OptimizerSplitConfig(lr=1e-3))
    assert [name.split(".")[-2] for name in main] == ["q_proj", "down_proj"]
    assert len(main) + len(others) == len(shapes)
    assert split_tensors(shapes, OptimizerSplitConfig(lr=1e-3, matrices="all"))[0][0] == "model.embed_tokens.weight"
    assert split_tensors(shapes, None) == (list(shapes), [])


def test_a_wsd_rate_falls_in_the_last_part() -> None:
    assert LrScheduleConfig(kind="wsd").decay_steps(100) == 20
    assert LrScheduleConfig(kind="wsd", decay_fraction=0.01).decay_steps(10) == 1
