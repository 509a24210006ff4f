"""Rules between the keys of the actor's optimizer, and its schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.optimizer import LrScheduleConfig, OptimizerSplitConfig, split_tensors
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import warm_up_optimizer
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
        (
            [MUON, "actor.optimizer_split={lr: 0.1, optimizer: nowhere.A}"],
            "no package 'nowhere' is installed; allowed: a class's import path",
        ),
        (
            [MUON, "actor.optimizer_split={lr: 0.1, optimizer_arguments: {weight_decay: 1}}"],
            "optimizer_split.optimizer_arguments.weight_decay: cannot be set here",
        ),
        (
            [MUON, SPLIT, "actor.ddp.overlap_param_gather=true"],
            "overlap_param_gather: found True, which has no effect where whole tensors are stepped",
        ),
        ([MUON, SPLIT, "actor.ddp.use_custom_fsdp=true"], "actor.ddp.use_custom_fsdp"),
        ([MUON, SPLIT, "actor.ddp.use_distributed_optimizer=true"], "use_distributed_optimizer: found True, which has"),
        ([MUON, SPLIT, "actor.optimizer.decoupled_lr=0.1"], "actor.optimizer.decoupled_lr: found 0.1, which has no"),
        (["actor.optimizer.muon_momentum=0.9"], "actor.optimizer.muon_momentum: found 0.9, which has no effect"),
        (
            ["actor.optimizer={optimizer: sgd, decoupled_weight_decay: true}"],
            "optimizer.decoupled_weight_decay: found True, which has no effect on 'sgd'; allowed: with optimizer: adam",
        ),
        (
            ["actor.optimizer={optimizer: torch.optim.RAdam, exp_avg_dtype: torch.bfloat16}"],
            "optimizer.exp_avg_dtype: found 'torch.bfloat16', which has no effect on 'torch.optim.RAdam'; allowed",
        ),
        (
            [MUON, SPLIT, "actor.optimizer.decoupled_weight_decay=false"],
            "optimizer.decoupled_weight_decay: found False, which has no effect on 'torch.optim.Muon'",
        ),
        (
            ["model.recipe.supervised.optimizer={optimizer: sgd, exp_avg_sq_dtype: torch.bfloat16}"],
            "supervised.optimizer.exp_avg_sq_dtype: found 'torch.bfloat16', which has no effect on 'sgd'",
        ),
        (
            [
                "actor.optimizer.optimizer=torch.optim.RAdam",
                "model.recipe.supervised.optimizer.decoupled_weight_decay=true",
            ],
            "supervised.optimizer.decoupled_weight_decay: found True, which has no effect on 'torch.optim.RAdam'",
        ),
        (["actor.optimizer.min_lr=1e-6"], "min_lr: cannot be set here; managed by actor.lr_schedule.min_lr_fraction"),
        (["model.recipe.supervised.optimizer.min_lr=1e-6"], "managed by model.recipe.supervised.min_lr_fraction"),
        (
            [MUON, "actor.optimizer_split={lr: 0.1, matrices: all, weight_decay: 0.1}"],
            "optimizer_split.weight_decay: found 0.1; matrices: all leaves norms and biases",
        ),
        (
            [
                "actor.optimizer.optimizer=tests.helpers.coupled_optimizer.CoupledRnn",
                "actor.optimizer_loss=one_minus_reward",
                "stream={part: 0.1}",
            ],
            "optimizer_loss: found one_minus_reward with stream",
        ),
        (
            ["actor.lr_schedule={kind: cosine}", "actor.lr_warmup_steps=16", "trainer.steps=8"],
            "lr_warmup_steps: found 16; a cosine rate falls in the rest of the",
        ),
        (["actor.lr_schedule={kind: cosine, min_lr_fraction: 1.0}"], "actor.lr_schedule.min_lr_fraction"),
        ([MUON, "actor.optimizer_split={}"], "actor.optimizer_split.lr"),
        (["actor.lr_schedule={min_lr_fraction: 0.1}"], "a constant rate does not fall"),
        (["actor.lr_schedule={kind: cosine, decay_fraction: 0.1}"], "decay_fraction: found kind cosine"),
        (["actor.lr_schedule={kind: sine}"], "actor.lr_schedule.kind"),
    ],
)
def test_what_would_have_no_effect_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Path(QUICKSTART), overrides)
    assert str(caught.value).count(said) == 1


def test_options_of_megatrons_adam_are_those_of_adam() -> None:
    config = load_config(Path(QUICKSTART), ["actor.optimizer.decoupled_weight_decay=false"])
    assert config.actor.optimizer["decoupled_weight_decay"] is False


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


def test_the_last_update_has_the_lowest_rate_above_0() -> None:
    assert LrScheduleConfig(kind="cosine", min_lr_fraction=0.1).end(10) == 10
    assert LrScheduleConfig(kind="cosine").end(10) == 11


def test_a_split_keeps_its_ratio_in_a_warm_up_of_another_rate() -> None:
    config = load_config(Path(QUICKSTART), [MUON, "actor.optimizer.lr=0.01", "actor.optimizer_split={lr: 0.002}"])
    assert config.model.recipe is not None and config.model.recipe.supervised.optimizer["lr"] == 0.002
    assert warm_up_optimizer(config)["optimizer_split"].lr == pytest.approx(0.0004)


def test_a_wsd_rate_falls_in_the_last_part() -> None:
    assert LrScheduleConfig(kind="wsd").decay_steps(100) == 20
    assert LrScheduleConfig(kind="wsd", decay_fraction=0.01).decay_steps(10) == 1
