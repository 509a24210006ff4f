"""Training: packed equals padded, several ranks equal one process, resumed equals uninterrupted, and it learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from megatron_tlt.config.drafter import DrafterBufferConfig, DrafterConfig, DrafterLossConfig
from megatron_tlt.drafter.buffer import DataBuffer
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.evaluation import teacher_forced_acceptance
from megatron_tlt.drafter.folder import drafter_from_target
from megatron_tlt.drafter.losses import LOSSES, reward_weight
from megatron_tlt.drafter.model import DraftModel, Kind
from megatron_tlt.drafter.packing import build_packs
from megatron_tlt.drafter.session import train_session
from megatron_tlt.drafter.state import DrafterState
from megatron_tlt.drafter.training import DrafterTrainer
from megatron_tlt.errors import ConfigError, RunError
from tests.helpers.launch import run_torchrun

from .conftest import hidden_states, load_target, random_entry, scattered

WORKER = Path(__file__).parent / "workers" / "data_parallel.py"


class PaddedContext:
    """Attention over (B, L) padded positions with an explicit mask; replaces the packed context."""

    def __init__(self, batch: int, length: int) -> None:
        self.shape = (batch, length)
        self.positions_T = torch.arange(length).repeat(batch)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    @property
    def steps(self) -> int:
        return len(self.keys)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        q, k, v = (x.unflatten(0, self.shape) for x in (q, k, v))
        self.keys.append(k.repeat_interleave(groups, dim=2))
        self.values.append(v.repeat_interleave(groups, dim=2))
        length = self.shape[1]
        mask = torch.cat([torch.ones(length, length).tril(), *[torch.eye(length)] * (self.steps - 1)], dim=1).log()
        scores = torch.einsum("bqnd,bknd->bnqk", q, torch.cat(self.keys, 1)) / q.shape[-1] ** 0.5 + mask
        return torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), torch.cat(self.values, 1)).flatten(0, 1)


def padded_loss(model: DraftModel, config: DrafterConfig, entries: list[Entry]) -> torch.Tensor:
    """The mean loss per draft from padded tensors, computed formula by formula."""
    length = max(entry.length for entry in entries)
    tokens = torch.stack([F.pad(entry.token_ids.long(), (0, length - entry.length)) for entry in entries])
    hidden = torch.stack([F.pad(entry.hidden, (0, 0, 0, length - entry.length)) for entry in entries])
    context = PaddedContext(len(entries), length)
    features = model.combine(hidden.flatten(0, 1)[:, : model.feature_size])
    total, count = torch.zeros(()), 0.0
    for step in range(config.steps):
        inputs = torch.roll(tokens, -1 - step, dims=1)
        head_input, features = model(inputs.flatten(), features, context)  # type: ignore[arg-type]
        logits = F.linear(head_input, model.head_DH).unflatten(0, tokens.shape)
        predicted = features.unflatten(0, tokens.shape)
        for row, entry in enumerate(entries):
            for at in range(entry.prompt_length - 1, entry.length - 2 - step):
                beside = at + 1 + step
                target = F.linear(entry.hidden[beside, -model.config.hidden_size :], model.shared.head)
                log_p = target.log_softmax(-1)
                if model.draft_ids_D is not None:
                    log_p = log_p[model.draft_ids_D]
                pair = (log_p[None], logits[row, at].log_softmax(-1)[None])
                loss = config.loss.distribution_weight * LOSSES[config.loss.name](*pair)[0]
                if config.regression_weight:
                    error = F.smooth_l1_loss(predicted[row, at], entry.hidden[beside])
                    loss = loss + config.regression_weight * error
                total = total + config.unroll_decay**step * reward_weight(config.loss, entry.reward) * loss
                count += config.unroll_decay**step
    return total / count


CASES = [
    ("eagle", "eagle", 1, None),
    ("eagle", "eagle", 3, None),
    ("eagle", "kl", 2, None),
    ("eagle3", "eagle", 3, None),
    ("eagle3", "kl", 2, None),
    ("eagle3", "tv", 3, None),
    ("eagle3", "eagle", 3, 9),
    ("eagle3", "kl", 2, 9),
]


@pytest.mark.parametrize(("kind", "name", "steps", "drafted"), CASES)
def test_packed_gradients_equal_padded_gradients(
    kind: Kind, name: str, steps: int, drafted: int | None, target_folder: Path, target: PreTrainedModel
) -> None:
    loss = DrafterLossConfig.model_validate({"name": name, "reward_weighting": True})
    entries = [random_entry(target, kind, length, 2 + seed, seed) for seed, length in enumerate((9, 17, 6, 30))]
    config = DrafterConfig(
        kind=kind,
        loss=loss,
        unroll_steps=steps,
        draft_vocab_size=drafted,
        optimizer="torch.optim.SGD",
        lr=1.0,
        clip_grad=0.0,
        max_tokens_per_micro_batch=40,
        logit_chunk_tokens=7,
    )
    model = scattered(drafter_from_target(target_folder, kind, seed=1, draft_vocab_size=drafted))
    if drafted is not None:
        model.choose_vocabulary(torch.arange(int(target.config.vocab_size)) % 7)
    model.from_target = False  # skip the calibration of its start
    expected = padded_loss(model, config, entries)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert len(build_packs(entries, 40, loss, model.entry_size)) == 2
    result = DrafterTrainer(model, config, seed=0).train_step(entries)
    assert result.metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        # SGD at rate 1: the step equals the gradient, rounded to the parameter's precision
        found = before[name] - parameter.detach()
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=max(2e-7, 8e-6 * scale), msg=name)


def test_it_computes_in_the_configured_dtype(target_folder: Path, target: PreTrainedModel) -> None:
    """On a CPU the default is float32; weights and gradients are float32 in any case."""
    entries = [random_entry(target, "eagle3", length, 2, length) for length in (9, 17)]
    losses = {}
    for dtype in (None, "float32", "bfloat16"):
        config = DrafterConfig(kind="eagle3", unroll_steps=2, dtype=dtype)
        trainer = DrafterTrainer(drafter_from_target(target_folder, "eagle3", seed=1), config, seed=1)
        losses[dtype] = trainer.train_step(entries).metrics["loss"]
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert losses[None] == losses["float32"] != losses["bfloat16"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


def entries_of(folder: Path, responses: torch.Tensor, kind: Kind) -> list[Entry]:
    target, entries = load_target(folder), []
    for i, tokens in enumerate(responses):
        hidden = hidden_states(target, tokens, kind).bfloat16()
        entries.append(Entry(f"0/{i}", 0, tokens.int(), 6, hidden, 1.0))
    return entries


LEARN: list[tuple[Kind, str]] = [
    ("eagle", "eagle"),
    ("eagle", "tv"),
    ("eagle3", "kl"),
    ("eagle3", "eagle"),
    ("eagle3", "tv"),
]


@pytest.mark.parametrize(("kind", "name"), LEARN)
def test_it_learns(kind: Kind, name: str, sharp_folder: Path, responses: torch.Tensor, tmp_path: Path) -> None:
    entries = entries_of(sharp_folder, responses, kind)
    training, held_out = entries[:300], entries[300:]
    loss = DrafterLossConfig.model_validate({"name": name})
    config = DrafterConfig(kind=kind, loss=loss, lr=2e-3, warmup_steps=5, unroll_steps=2)
    trainer = DrafterTrainer(drafter_from_target(sharp_folder, kind, seed=1), config, seed=0)
    buffer = DataBuffer(tmp_path, DrafterBufferConfig(), seed=0)
    for entry in training:
        buffer.add(entry)
    before = teacher_forced_acceptance(trainer.model, held_out, 3, 200)
    first = train_session(trainer, buffer, 0, 16, 1).metrics["loss"]
    session = train_session(trainer, buffer, 0, 16, 120)
    after = teacher_forced_acceptance(trainer.model, held_out, 3, 200)
    print(kind, name, first, session.metrics["loss"], before, after)
    assert (session.outcome, session.steps, trainer.version) == ("completed", 120, 121)
    assert session.metrics["loss"] < 0.8 * first
    assert after.chains == before.chains == sum(entry.num_drafted for entry in held_out)
    # EAGLE's start repeats the target's last feature, which is a good guess here: the target often repeats its token
    assert after.acceptance_length > (1.75 if kind == "eagle" else before.acceptance_length + 0.1)
    assert list(after.accepted_per_depth) == sorted(after.accepted_per_depth, reverse=True)


@pytest.mark.distributed
def test_two_ranks_with_unequal_shares_equal_one_process(target_folder: Path, tmp_path: Path) -> None:
    from .workers.data_parallel import CONFIG, batches

    run_torchrun(WORKER, 2, [str(target_folder), str(tmp_path)])
    alone = DrafterTrainer(drafter_from_target(target_folder, "eagle", seed=0), CONFIG, seed=0)
    metrics = [alone.train_step(batch).metrics for batch in batches(target_folder)]
    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    records = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    raised = [record.pop("raised") for record in records]
    assert raised[0].startswith("GroupFailed: drafter training failed on another rank")
    assert raised[1].startswith("ConfigError: drafter entry 'narrow' has hidden states of width 32")
    assert records[0] == records[1]
    for name, tensor in alone.state.parameters.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    for own, both in zip(metrics, records[0]["metrics"], strict=True):
        assert both == pytest.approx(own, rel=1e-5)
    assert [row["lr"] for row in metrics] == [0.25, 0.5, 0.5]
    assert records[0]["session"] == ["stopped", 2, 5]
    assert records[0]["failed"] == ["non_finite_loss", True]


@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "torch.optim.NAdam", "torch.optim.SGD"])
def test_resumed_is_uninterrupted_bit_for_bit(
    optimizer: str, target_folder: Path, target: PreTrainedModel, tmp_path: Path
) -> None:
    config = DrafterConfig(
        kind="eagle", optimizer=optimizer, lr=1e-2, warmup_steps=3, feature_noise=0.1, weight_decay=0.01
    )
    entries = [random_entry(target, "eagle", 12 + seed, 3, seed) for seed in range(4)]
    straight = DrafterTrainer(drafter_from_target(target_folder, "eagle", seed=1), config, seed=5)
    whole = [straight.train_step(entries).metrics for _ in range(4)]

    first = DrafterTrainer(drafter_from_target(target_folder, "eagle", seed=1), config, seed=5)
    for _ in range(2):
        first.train_step(entries)
    state = first.state
    save_file(state.tensors(), tmp_path / "state.safetensors")
    numbers = json.loads(json.dumps(state.numbers))
    second = DrafterTrainer(drafter_from_target(target_folder, "eagle", seed=2), config, seed=5)
    second.load_state(DrafterState.from_tensors(state.version, load_file(tmp_path / "state.safetensors"), numbers))
    assert [second.train_step(entries).metrics for _ in range(2)] == whole[2:]
    for name, tensor in straight.state.tensors().items():
        assert torch.equal(tensor, second.state.tensors()[name]), name
    assert second.version == 4


def test_resumed_after_its_data_expired_is_uninterrupted_bit_for_bit(
    target_folder: Path, target: PreTrainedModel, tmp_path: Path
) -> None:
    """Saved after step 2 and killed after step 4, when the data of step 2 has expired; step 3 needs it again."""
    config, bounds = DrafterConfig(kind="eagle", lr=1e-2, unroll_steps=1), DrafterBufferConfig(max_age=1)

    def begin(folder: str) -> tuple[DrafterTrainer, DataBuffer]:
        model = drafter_from_target(target_folder, "eagle", seed=1)
        return DrafterTrainer(model, config, seed=5), DataBuffer(tmp_path / folder, bounds, seed=5)

    def train(trainer: DrafterTrainer, buffer: DataBuffer, steps: range) -> tuple[DrafterState, list[str]]:
        """Train the steps; returns the checkpoint after step 2."""
        saved: list[tuple[DrafterState, list[str]]] = []
        for step in steps:
            for i in range(4):
                entry = random_entry(target, "eagle", 12 + i, 3, 4 * step + i)
                buffer.add(replace(entry, key=f"{step}/{i}", step=step))
            assert train_session(trainer, buffer, step, 4, 2).outcome == "completed"
            state = trainer.state
            copies = {name: tensor.clone() for name, tensor in state.tensors().items()}
            if step == 2:
                saved.append((DrafterState.from_tensors(state.version, copies, dict(state.numbers)), buffer.snapshot()))
        return saved[0] if saved else (trainer.state, [])

    straight, data = begin("straight")
    train(straight, data, range(6))
    state, keys = train(*begin("killed"), range(5))
    resumed, data = begin("killed")
    resumed.load_state(state)
    assert data.restore(2, keys) == 0
    train(resumed, data, range(3, 6))
    for name, tensor in straight.state.tensors().items():
        assert torch.equal(tensor, resumed.state.tensors()[name]), name


def test_the_state_holds_only_trained_tensors(target_folder: Path, target: PreTrainedModel) -> None:
    trainer = DrafterTrainer(drafter_from_target(target_folder, "eagle", seed=1), DrafterConfig(kind="eagle"), seed=0)
    trainer.train_step([random_entry(target, "eagle", 12, 3, 1)])
    names = set(trainer.model.state_dict())
    assert set(trainer.state.parameters) == names
    kept = ("exp_avg", "exp_avg_sq", "step")
    assert set(trainer.state.optimizer) == {f"{name}/{entry}" for name in names for entry in kept}
    other = DrafterTrainer(drafter_from_target(target_folder, "eagle3", seed=1), DrafterConfig(kind="eagle3"), seed=0)
    with pytest.raises(RunError, match=r"fc.weight is \(64, 128\); the drafter has \(64, 192\)"):
        other.load_state(trainer.state)


def poison(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: gradient * value


@pytest.mark.parametrize("outcome", ["non_finite_loss", "non_finite_gradient", "non_finite_update"])
def test_non_finite_values_stop_training_and_keep_the_last_good_parameters(
    outcome: str, target_folder: Path, target: PreTrainedModel, tmp_path: Path
) -> None:
    entries = [random_entry(target, "eagle", 12, 3, seed) for seed in range(2)]
    config = DrafterConfig(kind="eagle", optimizer="torch.optim.SGD", lr=0.1, clip_grad=0.0)
    if outcome == "non_finite_update":
        config = config.model_copy(update={"lr": 3e38, "loss": DrafterLossConfig(distribution_weight=1e4)})
    trainer = DrafterTrainer(drafter_from_target(target_folder, "eagle", seed=1), config, seed=0)
    trainer.model.from_target = False  # skip the calibration of its start
    buffer = DataBuffer(tmp_path, DrafterBufferConfig(), seed=0)
    if outcome == "non_finite_loss":
        entries[1].hidden[5] = float("inf")
    if outcome == "non_finite_gradient":
        trainer.model.fc.weight.register_hook(poison(float("nan")))  # type: ignore[union-attr]
    for entry in entries:
        buffer.add(entry)
    before = {name: tensor.clone() for name, tensor in trainer.state.parameters.items()}
    session = train_session(trainer, buffer, 0, 2, 5)
    assert (session.outcome, session.steps, trainer.version) == (outcome, 0, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state.parameters.items())
    with pytest.raises(RunError, match=f"stopped with {outcome}"):
        trainer.train_step(entries)


def test_session_outcomes(target_folder: Path, target: PreTrainedModel, tmp_path: Path) -> None:
    trainer = DrafterTrainer(drafter_from_target(target_folder, "eagle", seed=1), DrafterConfig(kind="eagle"), seed=0)
    buffer = DataBuffer(tmp_path, DrafterBufferConfig(), seed=0)
    assert train_session(trainer, buffer, 0, 2, 5).outcome == "no_tokens"
    buffer.add(random_entry(target, "eagle", 12, 3, 1))
    assert train_session(trainer, buffer, 0, 2, 5, should_stop=lambda: True).outcome == "stopped"
    session = train_session(trainer, buffer, 0, 2, 2)
    assert (session.outcome, session.steps, trainer.version) == ("completed", 2, 2)
    assert len(buffer) == 1  # a session does not consume data


def test_options_and_entries_that_do_not_fit_are_refused(target_folder: Path, target: PreTrainedModel) -> None:
    eagle = drafter_from_target(target_folder, "eagle", seed=1)
    with pytest.raises(ConfigError, match=r"drafter.kind is eagle3; the drafter that was given is eagle"):
        DrafterTrainer(eagle, DrafterConfig(kind="eagle3"), seed=0)
    with pytest.raises(ConfigError, match=r"drafter.optimizer: found 'torch.optim.Adan'"):
        DrafterTrainer(eagle, DrafterConfig(kind="eagle", optimizer="torch.optim.Adan"), seed=0)
    with pytest.raises(ConfigError, match=r"drafter.optimizer_arguments.beta: .* did you mean betas"):
        DrafterTrainer(eagle, DrafterConfig(kind="eagle", optimizer_arguments={"beta": 1}), seed=0)
    trainer = DrafterTrainer(eagle, DrafterConfig(kind="eagle", max_tokens_per_micro_batch=10), seed=0)
    with pytest.raises(ConfigError, match="hidden states of width 256; the drafter asks for 64"):
        trainer.train_step([random_entry(target, "eagle3", 8, 3, 1)])
    with pytest.raises(ConfigError, match="a sequence has 12 tokens"):
        trainer.train_step([random_entry(target, "eagle", 12, 3, 1)])
