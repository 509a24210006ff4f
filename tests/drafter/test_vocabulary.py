"""Drafters with a draft vocabulary: its choice, training, and where the choice is stored."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.drafter import DrafterTrainer, load_drafter, save_drafter
from megatron_tlt.drafter.checkpoint import load_without_target, write_checkpoint
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.evaluation import greedy_chains
from megatron_tlt.drafter.folder import drafter_from_target, first_drafter
from megatron_tlt.drafter.losses import LOSSES, _chunk_loss, log_sums
from megatron_tlt.drafter.model import DraftModel, SharedWeights
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.models.hf_folder import read_hf_config

from .conftest import AUX_LAYERS, VOCAB, load_target, random_entry

DRAFTED = 16
CONFIG = DrafterConfig(kind="eagle3", aux_hidden_state_layer_ids=list(AUX_LAYERS), draft_vocab_size=DRAFTED, lr=1e-3)


def drafter(folder: Path, size: int | None = DRAFTED) -> DraftModel:
    return drafter_from_target(folder, "eagle3", 1, AUX_LAYERS, draft_vocab_size=size)


@pytest.fixture(scope="module")
def data(sharp_folder: Path) -> list[Entry]:
    target = load_target(sharp_folder)
    return [random_entry(target, "eagle3", 40, 4, seed) for seed in range(12)]


@pytest.fixture
def trainer(sharp_folder: Path, data: list[Entry]) -> DrafterTrainer:
    """A trainer after one step."""
    found = DrafterTrainer(drafter(sharp_folder), CONFIG, seed=1)
    assert found.train_step(data).outcome == "trained"
    return found


def likeliest(target: PreTrainedModel, data: list[Entry]) -> torch.Tensor:
    """The target's likeliest tokens on all of the data; the trainer uses a part of it."""
    total = torch.zeros(VOCAB)
    for entry in data:
        probabilities = target(entry.token_ids[None].long()).logits[0].softmax(-1)
        total += probabilities[entry.prompt_length :].sum(0)
    return total.topk(DRAFTED).indices


def test_the_first_step_chooses_the_targets_likeliest_tokens(
    trainer: DrafterTrainer, sharp_folder: Path, data: list[Entry]
) -> None:
    ids = trainer.model.draft_ids_D
    assert ids is not None and len(set(ids.tolist())) == DRAFTED and ids.equal(ids.sort().values)
    with torch.no_grad():
        expected = likeliest(load_target(sharp_folder), data)
    assert len(set(ids.tolist()) & set(expected.tolist())) >= DRAFTED - 4
    before = ids.clone()
    trainer.train_step(data[:1])
    assert before.equal(trainer.model.draft_ids_D)


def test_the_choice_does_not_depend_on_how_sequences_are_packed(sharp_folder: Path, data: list[Entry]) -> None:
    chosen = []
    for bound in (40, 130, 8192):
        config = CONFIG.model_copy(update={"max_tokens_per_micro_batch": bound})
        trainer = DrafterTrainer(drafter(sharp_folder), config, seed=1)
        trainer.train_step(data)
        chosen.append(trainer.model.draft_ids_D)
    assert all(ids is not None and ids.equal(chosen[0]) for ids in chosen)


def test_an_untrained_drafter_is_refused(sharp_folder: Path, tmp_path: Path) -> None:
    save_drafter(drafter(sharp_folder), tmp_path)
    with pytest.raises(ConfigError, match="was never trained"):
        first_drafter(DrafterConfig(kind="eagle3", path=tmp_path), sharp_folder, seed=1)
    with pytest.raises(ConfigError, match="was never trained"):
        load_without_target(tmp_path)


def test_lm_head_rows_start_as_the_targets(sharp_folder: Path, data: list[Entry]) -> None:
    trainer = DrafterTrainer(drafter(sharp_folder), CONFIG.model_copy(update={"lr": 1e-30}), seed=1)
    trainer.train_step(data)
    ids = trainer.model.draft_ids_D
    assert ids is not None
    assert trainer.model.head_DH.equal(trainer.model.shared.head[ids].float())


def test_it_learns_and_never_drafts_another_token(trainer: DrafterTrainer, data: list[Entry]) -> None:
    first = trainer.train_step(data).metrics
    for _ in range(30):
        last = trainer.train_step(data).metrics
    assert last["loss_depth_1"] < first["loss_depth_1"]
    assert last["acceptance_length"] > first["acceptance_length"]
    entry, ids = data[0], trainer.model.draft_ids_D
    assert ids is not None
    hidden = entry.hidden[:-1, : trainer.model.feature_size]
    chains = greedy_chains(trainer.model, entry.token_ids[1:].long(), hidden, [entry.length - 1], 3)
    assert set(chains.flatten().tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_loss_covers_the_draft_vocabulary(name: str, trainer: DrafterTrainer, data: list[Entry]) -> None:
    model, entry = trainer.model, data[0]
    ids = model.draft_ids_D
    assert ids is not None
    hidden = entry.hidden[:, model.feature_size :].float()
    head_input = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    head, rows = model.shared.head, model.shared.head[ids]
    sums = log_sums(hidden, head, 3)
    losses, accepted = _chunk_loss(LOSSES[name], head_input, model.head_DH, hidden, rows, sums)
    losses.sum().backward()
    assert head_input.grad is not None and head_input.grad.isfinite().all()
    with torch.no_grad():
        p = torch.nn.functional.linear(hidden, model.shared.head.float()).softmax(-1)
        logits = torch.full((len(hidden), VOCAB), float("-inf")).index_copy(1, ids, head_input @ model.head_DH.T)
        q, p_D = logits.softmax(-1), p[:, ids]
        log_q_D = q.log()[:, ids]
        expected = {
            "eagle": -(p_D * log_q_D).sum(-1),
            "kl": (p_D * (p_D.log() - log_q_D)).sum(-1),
            "tv": 0.5 * (p - q).abs().sum(-1),
        }[name]
        assert losses == pytest.approx(expected, abs=1e-4)
        assert accepted == pytest.approx(p.gather(-1, q.argmax(-1, keepdim=True))[:, 0], abs=1e-5)


def test_a_state_and_a_checkpoint_hold_the_choice(trainer: DrafterTrainer, sharp_folder: Path, tmp_path: Path) -> None:
    ids = trainer.model.draft_ids_D
    other = DrafterTrainer(drafter(sharp_folder), CONFIG, seed=1)
    other.load_state(trainer.state)
    assert ids is not None and ids.equal(other.model.draft_ids_D)
    write_checkpoint(tmp_path, trainer.model, trainer.state, {})
    assert ids.equal(load_without_target(tmp_path).draft_ids_D)
    whole = DrafterTrainer(drafter(sharp_folder, None), CONFIG.model_copy(update={"draft_vocab_size": None}), seed=1)
    with pytest.raises(RunError, match=r"drafter state: d2t is missing"):
        other.load_state(whole.state)


def test_a_folder_holds_the_choice(trainer: DrafterTrainer, sharp_folder: Path, tmp_path: Path) -> None:
    ids = trainer.model.draft_ids_D
    save_drafter(trainer.model, tmp_path, torch.bfloat16)
    target, shared = read_hf_config(sharp_folder), SharedWeights.from_folder(sharp_folder)
    assert ids is not None and ids.equal(load_drafter(tmp_path, target, "eagle3", shared).draft_ids_D)
    config = DrafterConfig(kind="eagle3", path=tmp_path, draft_vocab_size=8)
    with pytest.raises(ConfigError, match=r"draft_vocab_size is 8; .* was made with 16"):
        first_drafter(config, sharp_folder, seed=1)
    weights = load_file(tmp_path / "model.safetensors")
    weights["d2t"] = copy.deepcopy(weights["d2t"]) + VOCAB
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tensor 'd2t' names tokens .* allowed: 0 to 63"):
        load_drafter(tmp_path, target, "eagle3", shared)


def test_an_eagle_head_cannot_have_one() -> None:
    with pytest.raises(ValueError, match=r"draft_vocab_size is \d+; an EAGLE head has all tokens, allowed: null"):
        DrafterConfig(kind="eagle", draft_vocab_size=DRAFTED)
