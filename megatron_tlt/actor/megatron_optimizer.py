"""Builds the optimizer and its schedule: Megatron's Adam, or any element-wise class over the same shards."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_tlt.actor.megatron_model import MegatronModel
from megatron_tlt.actor.torch_adam import load_step_counts
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import RunError
from megatron_tlt.optim.choice import OptimizerChoice, choose_optimizer
from megatron_tlt.optim.element_wise import Number, plain_number
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import current_device

_DEFAULTS = {"optimizer": "adam", "lr": 1e-6, "clip_grad": 1.0, "weight_decay": 0.0}


def chosen_optimizer(actor: ActorConfig) -> OptimizerChoice | None:
    """The class that ``actor.optimizer.optimizer`` names; None for Megatron's Adam. Needs no model.

    Raises:
        ConfigError: the class does not exist, does not take the arguments, or is not element-wise.
    """
    given = {**_DEFAULTS, **actor.optimizer}
    path, arguments = given["optimizer"], actor.optimizer_arguments
    if path == "adam":
        return None
    if path == "sgd":
        path = "torch.optim.SGD"
        arguments = {"momentum": given.get("sgd_momentum", OptimizerConfig.sgd_momentum)}
    return choose_optimizer(path, arguments, float(given["weight_decay"]), current_device().torch_device)


def build_optimizer(
    model: MegatronModel,
    actor: ActorConfig,
    choice: OptimizerChoice | None,
    *,
    total_steps: int,
    lr_decay_style: str,
    min_lr_fraction: float,
) -> tuple[Any, OptimizerParamScheduler]:
    """The optimizer over the model's gradient buffers, and its schedule; both have the next step's learning rate."""
    config = model.config
    given = {**_DEFAULTS, **actor.optimizer, "optimizer": "adam"}
    given.setdefault("min_lr", float(given["lr"]) * min_lr_fraction)
    lr, decay = float(given["lr"]), float(given["weight_decay"])
    optimizer_config = OptimizerConfig(
        **{
            "bf16": config.bf16,
            "params_dtype": config.params_dtype,
            "use_distributed_optimizer": model.ddp_chunks[0].ddp_config.use_distributed_optimizer,
            "overlap_param_gather": model.ddp_chunks[0].ddp_config.overlap_param_gather,
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
    config.grad_scale_func = optimizer.scale_loss
    warmup = actor.lr_warmup_steps
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if warmup else lr,
        max_lr=lr,
        min_lr=float(given["min_lr"]),
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_steps, warmup + 1),
        lr_decay_style=lr_decay_style,
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    # The constructor sets the rate of step 0; the next step's rate is one step ahead.
    scheduler.step(1)
    return optimizer, scheduler


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
        self.optimizer = choice.build(groups, self.config.lr, self.config.weight_decay)

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
            group.update(saved[key(group)])
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
