"""Builds the optimizer and its schedule: Megatron's Adam, an element-wise class over its shards, or whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_tlt.actor.megatron_model import MegatronModel
from megatron_tlt.actor.torch_adam import load_step_counts
from megatron_tlt.actor.whole_tensors import TensorPart, WholeTensorOptimizer, trained_tensors
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.optimizer import LrScheduleConfig, split_tensors
from megatron_tlt.config.optimizer_checks import refused_with_whole_tensors
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.optim.choice import SPLIT_KEYS, OptimizerChoice, TensorOptimizerChoice, choose_actor_optimizers
from megatron_tlt.optim.element_wise import Number, plain_number
from megatron_tlt.optim.flat_state import without_decay
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import current_device, world_size

_DEFAULTS = {"optimizer": "adam", "lr": 1e-6, "clip_grad": 1.0, "weight_decay": 0.0}

Judge = Callable[[float, float], bool]
"""Decides whether a step is taken, by the norm of the gradient and the loss of the batch; alike on every rank."""


@dataclass(frozen=True)
class ChosenOptimizers:
    """The class of ``actor.optimizer`` and that of ``actor.optimizer_split``; None: Megatron's Adam, or no split."""

    main: OptimizerChoice | TensorOptimizerChoice | None
    others: TensorOptimizerChoice | None = None

    @property
    def of_whole_tensors(self) -> bool:
        return isinstance(self.main, TensorOptimizerChoice)


def chosen_optimizers(actor: ActorConfig) -> ChosenOptimizers:
    """The classes that the config names, checked by running them. Needs no model.

    Raises:
        ConfigError: a class does not exist, does not take the arguments, or cannot step what ranks own; or another key
            has no effect on it.
    """
    found = ChosenOptimizers(*choose_actor_optimizers(actor, current_device().torch_device))
    if isinstance(found.main, TensorOptimizerChoice) and (refused := list(refused_with_whole_tensors(actor))):
        raise ConfigError("\n".join(refused))
    chosen = [one for one in (found.main, found.others) if isinstance(one, TensorOptimizerChoice)]
    if actor.optimizer_loss != "policy" and not any(one.traits.needs_loss for one in chosen):
        raise ConfigError(
            f"actor.optimizer_loss: found {actor.optimizer_loss}; a step of {actor.optimizer.get('optimizer', 'adam')} "
            "takes no loss; allowed: policy"
        )
    return found


def build_optimizer(
    model: MegatronModel,
    actor: ActorConfig,
    chosen: ChosenOptimizers,
    *,
    total_steps: int,
    lr_schedule: LrScheduleConfig,
) -> tuple[Any, OptimizerParamScheduler]:
    """The optimizer over the model's gradient buffers, and its schedule; both have the next step's learning rate.

    Raises:
        ConfigError: tensors are left that the class does not take.
    """
    given = {**_DEFAULTS, **actor.optimizer, "optimizer": "adam"}
    given["min_lr"] = float(given["lr"]) * lr_schedule.min_lr_fraction
    lr, decay = float(given["lr"]), float(given["weight_decay"])
    if isinstance(chosen.main, TensorOptimizerChoice):
        optimizer: Any = _whole_tensors(model, actor, chosen, given, lr_schedule.min_lr_fraction)
    else:
        optimizer = _sharded(model, chosen.main, given)
        model.config.grad_scale_func = optimizer.scale_loss
    warmup = actor.lr_warmup_steps
    steps = max(lr_schedule.end(total_steps), warmup + 1)
    falling = lr_schedule.end(total_steps) - total_steps + lr_schedule.decay_steps(total_steps)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if warmup else lr,
        max_lr=lr,
        min_lr=float(given["min_lr"]),
        lr_warmup_steps=warmup,
        lr_decay_steps=steps,
        lr_decay_style="WSD" if lr_schedule.kind == "wsd" else lr_schedule.kind,
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=min(falling, steps - warmup),
        lr_wsd_decay_style="linear",
    )
    # The constructor sets the rate of step 0; the next step's rate is one step ahead.
    scheduler.step(1)
    return optimizer, scheduler


def _sharded(model: MegatronModel, choice: OptimizerChoice | None, given: dict[str, Any]) -> Any:
    config, ddp_config = model.config, model.ddp_chunks[0].ddp_config
    optimizer_config = OptimizerConfig(
        **{
            "bf16": config.bf16,
            "params_dtype": config.params_dtype,
            "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
            "overlap_param_gather": ddp_config.overlap_param_gather,
            **given,
        }
    )
    load_step_counts()
    optimizer = get_megatron_optimizer(optimizer_config, model.ddp_chunks)
    if choice is not None:
        optimizer.chained_optimizers = [
            built if built.is_stub_optimizer else ElementWiseDistributedOptimizer(built, choice)
            for built in optimizer.chained_optimizers
        ]
    return optimizer


def _whole_tensors(
    model: MegatronModel, actor: ActorConfig, chosen: ChosenOptimizers, given: dict[str, Any], min_lr_fraction: float
) -> WholeTensorOptimizer:
    shapes, split = trained_tensors(model, actor.lora).shapes, actor.optimizer_split
    main, others = split_tensors(shapes, split)
    assert isinstance(chosen.main, TensorOptimizerChoice)
    if chosen.main.traits.matrices_only and (odd := [name for name in main if len(shapes[name]) != 2]):
        raise ConfigError(
            f"actor.optimizer_split: not given; {chosen.main.path} steps matrices alone, and {odd[0]} "
            f"{shapes[odd[0]]} is none; allowed: the class of the other tensors, such as {{lr: 3.0e-4}}"
        )
    rates = {"lr": float(given["lr"]), "min_lr": float(given["min_lr"])}
    parts = [TensorPart(chosen.main, {n: shapes[n] for n in main}, **rates, weight_decay=float(given["weight_decay"]))]
    if split is not None and chosen.others is not None:
        parts.append(
            TensorPart(
                chosen.others,
                {name: shapes[name] for name in others},
                lr=split.lr,
                min_lr=split.lr * min_lr_fraction,
                weight_decay=split.weight_decay,
            )
        )
        vectors = [name for name in others if len(shapes[name]) != 2]
        if chosen.others.traits.matrices_only and vectors:
            raise ConfigError(
                f"{SPLIT_KEYS.name}: found {chosen.others.path}, which steps matrices alone, and {vectors[0]} is none; "
                "allowed: a class that takes all tensors"
            )
        if not others:
            raise ConfigError(
                "actor.optimizer_split: leaves no tensor to its class, as the adapters of actor.lora are all matrices "
                "of layers; allowed: null"
            )
    layout = str(Layout.read(actor.megatron, world_size()))
    return WholeTensorOptimizer(model, actor.lora, parts, float(given["clip_grad"]), layout)


def take_step(
    optimizer: Any,
    loss: Callable[[], torch.Tensor],
    mean_loss: Callable[[], torch.Tensor],
    judge: Judge | None = None,
    own_norm: Callable[[], float] | None = None,
) -> tuple[float, bool]:
    """One step of either optimizer; a collective over the world.

    Args:
        optimizer: Megatron's, or one of whole tensors.
        loss: computes the number that the optimizer's step takes, a collective too; called if it takes one.
        mean_loss: computes the loss of the batch for ``judge``, a collective too.
        judge: see ``Judge``; None takes the step if the gradient is finite.
        own_norm: computes the norm in place of Megatron's optimizer.

    Returns:
        The norm of the gradient before clipping, and whether the step was taken. If not, weights and optimizer are as
        before, bit for bit.

    Raises:
        RunError: without ``judge``, if the gradient is not finite; nothing was changed.
    """
    whole = optimizer if isinstance(optimizer, WholeTensorOptimizer) else None
    norm = whole.prepare_gradients() if whole is not None else _prepared_norm(optimizer, own_norm)
    if judge is None and not math.isfinite(norm):
        raise RunError(f"gradient norm {norm}; it must be finite; the last checkpoint is unaffected")
    if judge is not None and not judge(norm, float(mean_loss())):
        return norm, False
    if whole is not None:
        whole.step_with_gradients(norm, loss() if whole.needs_loss else None)
    else:
        _step_prepared(optimizer, norm)
    return norm, True


@torch.no_grad()
def _prepared_norm(optimizer: Any, own_norm: Callable[[], float] | None) -> float:
    """The first half of the ``step`` of Megatron's ``ChainedOptimizer``, which changes no parameter and no state.

    With ``loss_scale`` Megatron stops at infinite gradients before it computes a norm: NaN.
    """
    return math.nan if optimizer.prepare_grads() else float((own_norm or optimizer.get_grad_norm)())


@torch.no_grad()
def _step_prepared(optimizer: Any, norm: float) -> None:
    """The second half: clips and steps."""
    for one in optimizer.chained_optimizers:
        parameters = [] if one.is_stub_optimizer else one.get_parameters()
        if parameters and one.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=one.config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()


class ElementWiseDistributedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer around any element-wise class.

    Megatron 0.16.1 takes Adam only, "due to checkpointing requirements": it saves two tensors by name and a step
    count. This class reuses the shards, ranges and groups of an optimizer that Megatron built, and saves the state of
    the chosen class: tensors in the same reshardable form, numbers once for all parameters.
    """

    def __init__(self, built: DistributedOptimizer, choice: OptimizerChoice) -> None:
        self.__dict__.update(vars(built))
        self._layout = choice.layout
        self._loaded_numbers: dict[str, Number] | None = None
        self.init_state_fn = None
        adam = built.optimizer
        groups = [{k: v for k, v in group.items() if k not in adam.defaults} for group in adam.param_groups]
        for group in groups:
            for shard in group["params"]:
                if not shard.is_leaf:
                    # torch's optimizers refuse a slice of a parameter unless it retains its gradient.
                    shard.retain_grad()
        self.optimizer = choice.build(groups, self.config.lr)

    def _numbers(self) -> dict[str, Number] | None:
        """The numbers that the class keeps for all parameters; None before the first step. A collective over the world.

        Raises:
            RunError: the numbers differ between parameters.
        """
        mine = [
            {name: plain_number(state[name]) for name in self._layout.numbers}
            for state in self.optimizer.state.values()
            if state
        ]
        distinct = [numbers for i, numbers in enumerate(mine) if numbers not in mine[:i]]
        everyone = [n for rank in all_gather_data(distinct, list[dict[str, Number]]) for n in rank]
        for numbers in everyone:
            if numbers != everyone[0]:
                raise RunError(
                    f"optimizer state differs between parameters: {everyone[0]}, {numbers}; a checkpoint holds one"
                )
        return everyone[0] if everyone else None

    def state_dict(self) -> dict[str, Any]:
        """The state without tensors of parameter shape, the same on every rank. A collective over the world."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups, "numbers": self._numbers()}}
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the result of ``sharded_state_dict``; without ``param_state``, only groups and scaler."""

        def key(group: dict[str, Any]) -> tuple[Any, ...]:
            return tuple(group[name] for name in param_group_identifier_keys)

        saved = {key(group): group for group in state_dict["optimizer"]["param_groups"]}
        for group in self.optimizer.param_groups:
            group.update(without_decay(saved[key(group)]))
        if self.grad_scaler and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if "param_state" in state_dict:
            self._loaded_numbers = state_dict["optimizer"]["numbers"]
            self.load_parameter_state_from_fully_reshardable(state_dict["param_state"])

    def _main_shard(self, model_param: torch.Tensor) -> torch.Tensor:
        group, order = self.model_param_group_index_map[model_param]
        return self.optimizer.param_groups[group]["params"][order]

    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        shard = self._main_shard(model_param)
        shard.data.copy_(tensors["param"])
        self.optimizer.state.pop(shard, None)
        if self._loaded_numbers is None:
            return  # saved before the first step, so there is no state
        state: dict[str, Any] = {
            name: tensors[name].to(shard.device, dtype, copy=True) for name, dtype in self._layout.tensors.items()
        }
        state |= {name: self._layout.number(name, value) for name, value in self._loaded_numbers.items()}
        if state:
            self.optimizer.state[shard] = state

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        shard = self._main_shard(model_param)
        kept = self.optimizer.state.get(shard, {})
        # A parameter that was never stepped has no state yet; the checkpoint contains zeros.
        return {"param": shard} | {
            name: kept[name] if name in kept else torch.zeros_like(shard) for name in self._layout.tensors
        }

    def get_parameter_state_dp_zero(
        self, use_gloo_comm: bool = False, empty_data: bool = True, return_on_all_ranks: bool = True
    ) -> dict[Any, Any]:
        """Full main parameters and state tensors of every buffer, zeros in float32, as the target of a load.

        All arguments are ignored; every rank gets the tensors.
        """
        names = ("param", *self._layout.tensors)
        return {
            index: {dtype: {name: torch.zeros(self.buffers[index].numel) for name in names} for dtype in ranges}
            for index, ranges in enumerate(self.gbuf_ranges)
        }
