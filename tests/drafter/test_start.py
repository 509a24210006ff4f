"""The initial loss of a drafter made from its target: never above uniform guessing, even with outliers."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from megatron_tlt.bench.tiny_models import TINY_MODELS
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.drafter import DrafterTrainer
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.folder import drafter_from_target
from megatron_tlt.drafter.loss_guard import LossGuard
from megatron_tlt.drafter.model import Kind

from .conftest import AUX_LAYERS, VOCAB, load_target, random_entry, write_target

KINDS: tuple[Kind, ...] = ("eagle", "eagle3")
UNIFORM = math.log(VOCAB)
STEPS = 8


def with_outliers(folder: Path, to: Path) -> Path:
    """Add outliers as in real models: a few dimensions of the residual stream are hundreds of times larger."""
    model = load_target(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[[3, 17]] *= 300.0
                parameter *= 20.0
        norm = model.model.norm.weight
        norm[[3, 17]] *= 0.05
        model.lm_head.weight *= 4.0 if model.config.tie_word_embeddings else 20.0
    stream = model(torch.arange(VOCAB)[None], output_hidden_states=True).hidden_states[-2]
    assert float(stream.abs().max() / stream.abs().median()) > 50.0
    model.save_pretrained(to)
    return to


def losses(metrics: dict[str, float]) -> list[float]:
    return [value for name, value in metrics.items() if name.startswith("loss_depth_")]


def entries_of(target: PreTrainedModel, kind: Kind) -> list[Entry]:
    return [random_entry(target, kind, 24, 4, seed) for seed in range(12)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_the_initial_loss_is_at_most_uniform_and_falls(name: str, kind: Kind, tmp_path: Path) -> None:
    folder = with_outliers(write_target(name, tmp_path / "plain"), tmp_path / "outliers")
    data = entries_of(load_target(folder), kind)
    config = DrafterConfig(
        kind=kind, aux_hidden_state_layer_ids=list(AUX_LAYERS) if kind == "eagle3" else None, lr=1e-3
    )
    model = drafter_from_target(folder, kind, seed=1, aux_layers=config.aux_hidden_state_layer_ids)
    trainer = DrafterTrainer(model, config, seed=1)
    steps = [trainer.train_step(data) for _ in range(STEPS)]
    assert [step.outcome for step in steps] == ["trained"] * STEPS
    first, last = losses(steps[0].metrics), losses(steps[-1].metrics)
    assert len(first) == config.steps and max(first) <= UNIFORM + 1e-3
    # a tied random target is almost uniform, so there is nothing to learn
    assert last[0] < first[0] if "tied" not in name else last[0] < UNIFORM + 1e-2
    assert 1.0 <= steps[0].metrics["acceptance_length"] <= 1.0 + config.steps


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_is_the_same_after_a_stopped_step(kind: Kind, target_folder: Path, target: PreTrainedModel) -> None:
    """A first step that was stopped does not affect the next one."""
    config = DrafterConfig(kind=kind, aux_hidden_state_layer_ids=list(AUX_LAYERS) if kind == "eagle3" else None)
    data, results = entries_of(target, kind), []
    for stopped in (False, True):
        trainer = DrafterTrainer(
            drafter_from_target(target_folder, kind, 1, config.aux_hidden_state_layer_ids), config, seed=1
        )
        if stopped:
            assert trainer.train_step(data[:3], should_stop=lambda: True).outcome == "stopped"
        trainer.train_step(data)
        results.append(copy.deepcopy(trainer.model.state_dict()))
    assert all(results[0][name].equal(results[1][name]) for name in results[0])


def test_a_head_of_another_target_raises_an_alarm(sharp_folder: Path) -> None:
    model = drafter_from_target(sharp_folder, "eagle", seed=1)
    model.from_target = False  # as if loaded from a folder
    with torch.no_grad():
        model.fc.weight.mul_(-10.0)
    trainer = DrafterTrainer(model, DrafterConfig(kind="eagle", lr=1e-6), seed=1)
    data = entries_of(load_target(sharp_folder), "eagle")
    assert trainer.train_step(data).outcome == "loss_above_uniform"


def test_a_diverging_later_draft_raises_an_alarm(sharp_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = drafter_from_target(sharp_folder, "eagle", seed=1)
    trainer = DrafterTrainer(model, DrafterConfig(kind="eagle", lr=1e-6), seed=1)
    data = entries_of(load_target(sharp_folder), "eagle")
    assert trainer.train_step(data).outcome == "trained"
    upstream = trainer._metrics
    exploded = {"loss_depth_3": 3.0 * UNIFORM}
    monkeypatch.setattr(trainer, "_metrics", lambda totals, norm: upstream(totals, norm) | exploded)
    assert trainer.train_step(data).outcome == "loss_above_uniform"


def test_joined_ranks_restart_their_loss_history(sharp_folder: Path) -> None:
    """A rank that has seen more losses than the others would end the session alone."""
    model = drafter_from_target(sharp_folder, "eagle", seed=1)
    model.from_target = False
    with torch.no_grad():
        model.fc.weight.mul_(2.0)  # a loss of 1.4 ln V
    trainer = DrafterTrainer(model, DrafterConfig(kind="eagle", lr=1e-30, unroll_steps=1), seed=1)
    data = entries_of(load_target(sharp_folder), "eagle")
    for _ in range(2):
        trainer.forget_losses()
        assert [trainer.train_step(data).outcome for _ in range(19)] == ["trained"] * 19
    assert trainer.train_step(data).outcome == "loss_above_uniform"


def test_a_loss_that_grows_within_a_session_raises_an_alarm() -> None:
    guard = LossGuard(VOCAB, window=4)
    assert [guard.check(0, [loss]) for loss in (2.0, 1.5, 1.2, 1.0)] == [None] * 4
    assert [guard.check(0, [loss]) for loss in (3.0, 3.2, 3.4)] == [None, None, "loss_grows"]
    # the target of the next session may have a higher entropy
    assert [guard.check(1, [loss]) for loss in (2.8, 2.8, 2.8, 2.8, 2.9)] == [None] * 5


def test_noise_raises_no_alarm() -> None:
    guard = LossGuard(VOCAB)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(500, generator=generator) * 0.3
    assert not any(guard.check(0, [1.0 + 2.0 * 0.98**i + float(noise[i])]) for i in range(500))
    assert [guard.check(1, [loss]) for loss in (UNIFORM + 1.0, UNIFORM + 1.0, 1.0, UNIFORM + 1.0)] == [None] * 4
    assert guard.check(2, [1.0, 2 * UNIFORM + 1.0]) == "loss_above_uniform"


def test_a_loss_above_uniform_raises_an_alarm_unless_it_falls() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(60, generator=generator) * 0.3).tolist()
    guard = LossGuard(VOCAB)
    # batches vary more than one step of training changes the loss: several without a new minimum raise no alarm
    assert not any(guard.check(0, [UNIFORM + 3.0 - 0.04 * i + noise[i]]) for i in range(60))
    guard.reset()
    # while one draft improves another may get worse
    assert not any(guard.check(0, [UNIFORM + 2.5 - 0.1 * i, UNIFORM + 0.02 * i]) for i in range(30))
    guard.reset()
    stays = [guard.check(1, [UNIFORM + 1.0 + 0.01 * i]) for i in range(20)]
    assert stays == [*[None] * 19, "loss_above_uniform"]
