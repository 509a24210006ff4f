"""Training of the drafter on packed sequences, data-parallel over a group's ranks, until it has to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.loss_guard import ALARMS, Alarm, LossGuard
from megatron_tlt.drafter.losses import Drafted, draft_loss, log_sums
from megatron_tlt.drafter.model import DraftModel
from megatron_tlt.drafter.packing import Pack, build_packs, uniform_noise
from megatron_tlt.drafter.start import calibrate_start
from megatron_tlt.drafter.state import DrafterState, broadcast_state, capture_optimizer, restore_optimizer
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.optim.choice import OptimizerKeys, plain_optimizer
from megatron_tlt.platform.rank_group import GroupFailed, RankGroup

Failure = Literal["non_finite_loss", "non_finite_gradient", "non_finite_update", Alarm]
Outcome = Literal["trained", "stopped", "no_tokens", Failure]
FAILURES: dict[str, str] = {
    "non_finite_loss": "the loss is not finite",
    "non_finite_gradient": "the gradient is not finite",
    "non_finite_update": "the optimizer's update is not finite",
    **{str(name): why for name, why in ALARMS.items()},
}
"""Outcomes after which the drafter from before the session is kept, and their meanings."""
_KEYS = OptimizerKeys("drafter.optimizer", "drafter.optimizer_arguments", "drafter.weight_decay")
_SUMS = (
    "loss",
    "distribution_loss",
    "regression_loss",
    "tokens",
    "drafts",
    "sequences",
    "failed_ranks",
    "stopped_ranks",
)
_DEPTH_SUMS = ("loss", "accepted", "drafts")
Reduce = Callable[[Sequence[torch.Tensor]], None]
"""Sums tensors in place over all ranks of the group."""


def _alone(tensors: Sequence[torch.Tensor]) -> None:
    """A ``Reduce`` over a single rank."""


@dataclass(frozen=True)
class DrafterStepResult:
    """Outcome of a step and its metrics over all ranks (losses per draft; empty if nothing was trained).

    ``loss_depth_j`` is the distribution loss of the j-th consecutive draft. ``acceptance_depth_j`` is the probability
    that a sampling target accepts it, given that it accepts the drafts before it. ``acceptance_length`` follows from
    these: tokens per verification.
    """

    outcome: Outcome
    metrics: dict[str, float]


class DrafterTrainer:
    """A drafter, its optimizer, and its version, which grows by one per step.

    Args:
        model: in float32, on the training device; ``config.dtype`` is the dtype of computation.
        config: training settings.
        seed: of the feature noise.

    Raises:
        ConfigError: the drafter's kind differs from the config's, or the optimizer cannot be built.
    """

    def __init__(self, model: DraftModel, config: DrafterConfig, seed: int) -> None:
        if model.kind != config.kind:
            raise ConfigError(f"drafter.kind is {config.kind}; the drafter that was given is {model.kind}")
        self.model, self.config = model, config
        self.version = 0
        self._seed = seed
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._optimizer = plain_optimizer(
            config.optimizer,
            config.optimizer_arguments,
            list(self._named.values()),
            config.lr,
            config.weight_decay,
            _KEYS,
        )
        self._device = next(iter(self._named.values())).device
        dtype = config.dtype or ("bfloat16" if self._device.type == "cuda" else "float32")
        self._bfloat16 = dtype == "bfloat16"
        self._failure: Failure | None = None
        # total variation has no uniform-guess bound: it is at most 1
        self._guard = LossGuard(None if config.loss.name == "tv" else len(model.head_DH))
        depths = [f"{name}_depth_{depth + 1}" for depth in range(config.steps) for name in _DEPTH_SUMS]
        self._sum_names = (*_SUMS, *depths)

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """The drafter's live tensors: parameters, and the draft vocabulary's table."""
        return self.model.state_dict()

    @property
    def state(self) -> DrafterState:
        """The live trainable tensors and optimizer state; copy them to keep them.

        Raises:
            ConfigError: the optimizer has state other than tensors and numbers.
        """
        tensors, numbers = capture_optimizer(self._optimizer, self._named)
        return DrafterState(self.version, self._tensors, tensors, numbers)

    @property
    def held(self) -> list[torch.Tensor]:
        """Tensors held between steps: parameters, optimizer state, the target's embedding and LM head."""
        shared = self.model.shared
        heads = [shared.embedding] if shared.head is shared.embedding else [shared.embedding, shared.head]
        return [*self.state.tensors().values(), *heads]

    @property
    def needed_bytes(self) -> int:
        """Minimum memory of a step without activations, also before the first step.

        It covers the tensors of :attr:`held` with the full optimizer state, the gradients, and a copy of the parameters
        that restores them after a non-finite step.
        """
        probe = torch.nn.Parameter(torch.zeros(2, 2))
        optimizer = plain_optimizer(
            self.config.optimizer, self.config.optimizer_arguments, [probe], self.config.lr, 0.0, _KEYS
        )
        probe.grad = torch.ones_like(probe)
        optimizer.step()
        kept = sum(isinstance(x, torch.Tensor) and x.shape == probe.shape for x in optimizer.state[probe].values())
        state = sum(parameter.nbytes for parameter in self._named.values())
        target = sum(tensor.nbytes for tensor in self.held) - sum(x.nbytes for x in self.state.tensors().values())
        return state * (3 + kept) + target

    def drop_gradients(self) -> None:
        """Free the gradients' memory until the next step."""
        self._optimizer.zero_grad(set_to_none=True)

    def load_state(self, state: DrafterState) -> None:
        """Continue from a state, bit for bit.

        Raises:
            RunError: the state is of another drafter; the message names the first tensor that differs.
        """
        for name, tensor in self._tensors.items():
            found = state.parameters.get(name)
            if found is None or found.shape != tensor.shape:
                shape = "missing" if found is None else tuple(found.shape)
                raise RunError(f"drafter state: {name} is {shape}; the drafter has {tuple(tensor.shape)}")
        for name, tensor in self._tensors.items():
            tensor.copy_(state.parameters[name])
        restore_optimizer(self._optimizer, self._named, state)
        self.version = state.version
        self._failure = None
        self._guard.reset()

    def forget_losses(self) -> None:
        """Reset the loss guard before other ranks join, since ranks with more losses would end a session alone."""
        self._guard.reset()

    def synchronize(self, source: int, group: RankGroup | None) -> None:
        """Copy the state of global rank ``source`` to all ranks of the group.

        Raises:
            GroupFailed: the group broke or was abandoned; the state is unchanged.
        """
        if group is not None:
            self.load_state(broadcast_state(self.state, source, self._device, group))

    def train_step(
        self,
        entries: Iterable[Entry],
        should_stop: Callable[[], bool] = lambda: False,
        session: int = 0,
        group: RankGroup | None = None,
    ) -> DrafterStepResult:
        """Take an optimizer step on the entries of all ranks of ``group`` (None: this rank); a rank may have none.

        The gradient is of the mean over all ranks' drafts, so the distribution of entries over ranks does not matter.
        A non-finite value stops training on all ranks, with a named outcome and the parameters of the last good step.
        If ``should_stop`` returns True on any rank, between two micro-batches, the step is abandoned on all ranks.
        The first step of a drafter made from its target calibrates the initial scale on the step's entries. Losses are
        compared within one ``session``; growing or excessive losses also end training with a named outcome.

        Parameters after any exception are those of the last complete step.

        Raises:
            ConfigError: the entries do not fit the drafter.
            GroupFailed: another rank raised an exception, or the group broke or was abandoned.
            RunError: an earlier step ended with a non-finite value; load a state to continue.
        """
        if self._failure is not None:
            raise RunError(f"drafter training stopped with {self._failure}; load a state to go on")
        self._optimizer.zero_grad(set_to_none=False)
        reduce = group.all_reduce if group is not None else _alone
        error: Exception | None = None
        packs: list[tuple[Pack, list[Entry]]] = []
        try:
            packs = self.micro_batches(list(entries))
        except Exception as caught:  # any exception: the other ranks wait for this one
            error = caught
        if self.version == 0 and self.model.from_target:
            error = calibrate_start(self.model, [pack for pack, _ in packs], reduce) or error
        try:
            sums = self._accumulate(packs, should_stop)
        except Exception as caught:  # as above
            error = caught
        if error is not None:
            sums = self._sums(failed_ranks=1.0)
        try:
            return self._reduce_and_update(sums, error, session, reduce)
        except Exception:
            # an abandoned collective may still write to the gradients
            self._optimizer.zero_grad(set_to_none=True)
            raise

    def micro_batches(self, entries: Sequence[Entry]) -> list[tuple[Pack, list[Entry]]]:
        """The micro-batches of a step, each with its entries.

        Raises:
            ConfigError: the entries do not fit the drafter.
        """
        return build_packs(entries, self.config.max_tokens_per_micro_batch, self.config.loss, self.model.entry_size)

    def _reduce_and_update(
        self, sums: torch.Tensor, error: Exception | None, session: int, reduce: Reduce
    ) -> DrafterStepResult:
        """The part of a step that all ranks of the group execute in lockstep."""
        reduce([sums])  # before the gradients, which an abandoned step does not transfer
        totals = dict(zip(self._sum_names, sums.tolist(), strict=True))
        if error is not None:
            raise error
        if totals["failed_ranks"]:
            raise GroupFailed("drafter training failed on another rank of its group, whose own error says why")
        if totals["stopped_ranks"]:
            return DrafterStepResult("stopped", {})
        if not totals["tokens"]:
            return DrafterStepResult("no_tokens", {})
        if not math.isfinite(totals["loss"]):
            return self._fail("non_finite_loss")
        for parameter in self._named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._named.values() if parameter.grad is not None]
        reduce(gradients)
        torch._foreach_div_(gradients, totals["tokens"])
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            return self._fail("non_finite_gradient")
        if self.config.clip_grad and norm > self.config.clip_grad:
            torch._foreach_mul_(gradients, self.config.clip_grad / norm)
        if not self._update():
            return self._fail("non_finite_update")
        metrics = self._metrics(totals, norm)
        depths = range(1, self.config.steps + 1)
        # short responses have no drafts at the later depths
        drafts = [metrics[f"loss_depth_{depth}"] for depth in depths if totals[f"drafts_depth_{depth}"]]
        alarm = self._guard.check(session, drafts)
        return DrafterStepResult("trained", metrics) if alarm is None else self._fail(alarm, metrics)

    def _accumulate(self, packs: Sequence[tuple[Pack, list[Entry]]], should_stop: Callable[[], bool]) -> torch.Tensor:
        """Accumulate the gradients of this rank's entries; returns the logged sums."""
        if should_stop():
            return self._sums(stopped_ranks=1.0)
        sums = self._sums()
        for number, (pack, members) in enumerate(packs):
            if number and should_stop():
                return self._sums(stopped_ranks=1.0)
            loss, pack_sums = self._forward(pack.to(self._device), members)
            loss.backward()
            sums += pack_sums
        return sums

    def _sums(self, **values: float) -> torch.Tensor:
        numbers = [values.get(name, 0.0) for name in self._sum_names]
        return torch.tensor(numbers, dtype=torch.float64, device=self._device)

    def _metrics(self, totals: dict[str, float], norm: float) -> dict[str, float]:
        per_draft = {name: totals[name] / totals["drafts"] for name in ("distribution_loss", "regression_loss")}
        per_depth: dict[str, float] = {}
        length = alive = 1.0
        for depth in range(1, self.config.steps + 1):
            drafts = max(1.0, totals[f"drafts_depth_{depth}"])
            per_depth[f"loss_depth_{depth}"] = totals[f"loss_depth_{depth}"] / drafts
            per_depth[f"acceptance_depth_{depth}"] = totals[f"accepted_depth_{depth}"] / drafts
            alive *= per_depth[f"acceptance_depth_{depth}"]
            length += alive
        return {
            "loss": totals["loss"] / totals["tokens"],
            **per_draft,
            **per_depth,
            "acceptance_length": length,
            "grad_norm": norm,
            "lr": float(self._optimizer.param_groups[0]["lr"]),
            "drafts": totals["drafts"],
            "sequences": totals["sequences"],
            "version": float(self.version),
        }

    def _fail(self, outcome: Failure, metrics: dict[str, float] | None = None) -> DrafterStepResult:
        self._optimizer.zero_grad(set_to_none=True)
        self._failure = outcome
        return DrafterStepResult(outcome, metrics or {})

    def _update(self) -> bool:
        """Step the optimizer; False, with the old parameters restored, if the result is not finite."""
        parameters: list[torch.Tensor] = list(self._named.values())
        before = [parameter.detach().clone() for parameter in parameters]
        warmup = self.config.warmup_steps
        rate = self.config.lr * (min(1.0, (self.version + 1) / warmup) if warmup else 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        with torch.no_grad():
            finite = torch.stack([parameter.isfinite().all() for parameter in parameters]).all()
            if bool(finite):
                self.version += 1
                return True
            torch._foreach_copy_(parameters, before)
        return False

    def _forward(self, pack: Pack, members: Sequence[Entry]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of a pack's losses over all unrolled steps, and the logged sums (in the order of _SUMS)."""
        config = self.config
        size = self.model.feature_size
        hidden_TF = pack.hidden_SE[pack.anchors_T, :size].float()
        if config.feature_noise:
            noise = uniform_noise(members, size, config.feature_noise, self._seed, self.version)
            hidden_TF = hidden_TF + noise.to(hidden_TF)
        total = torch.zeros((), device=self._device)
        sums = self._sums()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            pack = replace(pack, log_sums_S=self._log_sums(pack))
            features, context = self.model.start(hidden_TF, pack.lengths)
            for step in range(config.steps):
                head_input, features = self.model(pack.inputs(step), features, context)
                rows, decay = pack.rows(step), config.unroll_decay**step
                loss, logged = draft_loss(
                    config.loss,
                    config.regression_weight,
                    self._drafted(pack, step, rows, head_input, features),
                    self.model.head_DH,
                    self.model.shared.head,
                    config.logit_chunk_tokens,
                    self.model.draft_ids_D,
                )
                total = total + decay * loss
                sums[0] += decay * loss.detach()
                sums[1] += logged["distribution_loss"]
                sums[2] += logged["regression_loss"]
                at = len(_SUMS) + step * len(_DEPTH_SUMS)
                sums[at] += logged["distribution_loss"]
                sums[at + 1] += logged["accepted"]
                sums[at + 2] += len(rows)
                sums[3] += decay * len(rows)
                sums[4] += len(rows)
        sums[5] = len(members)
        return total, sums

    def _log_sums(self, pack: Pack) -> torch.Tensor | None:
        """``Pack.log_sums_S`` from the target's whole LM head (most of a step's work), once for all unrolled steps.

        None if not needed.
        """
        if self.model.draft_ids_D is None:
            return None
        # later drafts are compared at positions that the first drafts already cover
        compared = pack.anchors_T[pack.rows(0)] + 1
        hidden = pack.hidden_SE[compared, -self.model.config.hidden_size :]
        found = log_sums(hidden, self.model.shared.head, self.config.logit_chunk_tokens)
        return found.new_zeros(len(pack.token_ids_S)).index_copy(0, compared, found)

    def _drafted(
        self, pack: Pack, step: int, rows: torch.Tensor, head_input: torch.Tensor, features: torch.Tensor
    ) -> Drafted:
        """A step's drafts with the target's state one token later, whose distribution is that of the drafted token."""
        beside = pack.anchors_T[rows] + 1 + step
        hidden = pack.hidden_SE[beside, -self.model.config.hidden_size :]
        log_sums_R = None if pack.log_sums_S is None else pack.log_sums_S[beside]
        return Drafted(head_input[rows], features[rows], pack.weights_T[rows], hidden, log_sums_R)
