"""The rollout engines by name or import path. Importing this module is cheap: engine classes are imported late."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_tlt.config.import_path import check_arguments, is_import_path, load_object
from megatron_tlt.config.layouts import ModelShape
from megatron_tlt.config.model import read_model
from megatron_tlt.config.schema import RolloutConfig, TltConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.interface import Capabilities, RolloutEngine

#: Engine name in ``rollout.engine`` -> import path.
ENGINES = {
    "replay": "megatron_tlt.rollout.replay.ReplayEngine",
    "vllm": "megatron_tlt.rollout.vllm_engine.VllmEngine",
}
_KEY = "rollout.engine"
_ARGUMENTS = "rollout.engine_arguments"
_GIVEN = 4  # arguments of every constructor before the engine's own


def engine_class(name: str) -> type[RolloutEngine]:
    """The class that ``rollout.engine`` names.

    Raises:
        ConfigError: the name is unknown, or the import path names no engine.
    """
    if name not in ENGINES and not is_import_path(name):
        raise ConfigError(
            f"{_KEY}: found {name!r}; allowed: {', '.join(ENGINES)}, or a class's import path such as "
            "mypackage.engines.Mine"
        )

    def is_engine(item: Any) -> bool:
        return isinstance(item, type) and RolloutEngine in item.__mro__[1:] and not inspect.isabstract(item)

    kind = "a subclass of megatron_tlt.rollout.interface.RolloutEngine with generate"
    cls: type[RolloutEngine] = load_object(ENGINES.get(name, name), _KEY, is_engine, "class", kind)
    return cls


def engine_problems(config: TltConfig) -> list[str]:
    """One line per reason why the engine cannot run the config; imports torch only for third-party engines.

    ``vllm`` supports everything, so its class is not imported.
    """
    name = config.rollout.engine
    if name == "vllm":
        return list(_mismatches(config, ALL))
    try:
        cls = engine_class(name)
        check_arguments(cls, config.rollout.engine_arguments, _GIVEN, _ARGUMENTS, name)
    except ConfigError as error:
        return str(error).splitlines()
    return list(_mismatches(config, cls.capabilities))


ALL = Capabilities(
    weights=True,
    speculation=True,
    turns=True,
    aborts=True,
    routes=True,
    sleep=True,
    tensor_parallel=True,
    vllm=True,
)
"""Capabilities of ``vllm``."""


def _mismatches(config: TltConfig, can: Capabilities) -> Iterator[str]:
    rollout, name, method = config.rollout, config.rollout.engine, config.reshard.method
    if name == "vllm" and rollout.engine_arguments:
        yield f"{_ARGUMENTS}: found {rollout.engine_arguments}; engine vllm takes rollout.vllm; allowed: none"
    if rollout.vllm and not can.vllm:
        yield f"rollout.vllm: found {', '.join(rollout.vllm)}; engine {name} does not read it; allowed: null"
    if config.speculation.enabled and not can.speculation:
        yield f"speculation.enabled: found true; engine {name} does not speculate; allowed: false"
    several = [task.name for task in config.all_tasks if task.environment is not None]
    if several and not (can.turns or can.whole_episodes):
        yield f"tasks.environment: {several[0]} has one; engine {name} answers a request once; allowed: null"
    for section in ("tail", "schedule"):
        if getattr(config, section) is not None and not can.aborts:
            yield f"{section}: found a section; engine {name} cannot end requests early; allowed: null"
    if rollout.router_replay != "none":
        yield from _replay_mismatches(config, can, several)
    if rollout.tensor_parallel_size > 1 and not can.tensor_parallel:
        size = rollout.tensor_parallel_size
        yield f"rollout.tensor_parallel_size: found {size}; engine {name} is of one rank; allowed: 1"
    if method == "none" and can.weights:
        yield f"reshard.method: found none; engine {name} generates with the actor's weights; allowed: direct"
    if method != "none" and not can.weights:
        yield f"reshard.method: found {method}; engine {name} takes no weights; allowed: none"


def _replay_mismatches(config: TltConfig, can: Capabilities, several: list[str]) -> Iterator[str]:
    found = f"rollout.router_replay: found {config.rollout.router_replay}"
    if not can.routes:
        yield f"{found}; engine {config.rollout.engine} records no experts; allowed: none"
    if config.rollout.model_runner == "v2":
        yield f"{found}; rollout.model_runner v2 records no experts; allowed: none, or v1"
    if several:
        yield f"{found}; task {several[0]} has an environment, whose turns are not recorded; allowed: none"
    if config.actor.megatron.get("moe_router_fusion"):
        yield f"{found}; actor.megatron.moe_router_fusion takes no experts; allowed: none, or no fusion"
    try:
        model, where = read_model(config)
    except ConfigError:
        return  # reported by the checks of the model
    shape = ModelShape.read(model, where)
    if shape is not None and not shape.experts:
        yield f"{found}; the model has no experts; allowed: none"


def libraries_not_needed(rollout: RolloutConfig) -> tuple[str, ...]:
    """Names of ``platform.versions.REQUIREMENTS`` that this engine does not need.

    Raises:
        ConfigError: see ``engine_class``.
    """
    return () if rollout.engine == "vllm" or engine_class(rollout.engine).capabilities.vllm else ("vllm",)


def build_engine(config: TltConfig, model_path: Path, speculation: SpeculationConfig) -> RolloutEngine:
    """Build this rank's engine; its weights come with the first reshard.

    Args:
        config: the run's.
        model_path: a folder with the policy's config and tokenizer.
        speculation: the config's section, with the drafter's initial folder.

    Raises:
        ConfigError: the engine cannot run the config on this device, or refuses its arguments.
        RunError: the engine cannot be built; its constructor documents further errors.
    """
    from megatron_tlt.platform.device import current_device

    rollout = config.rollout
    if problems := engine_problems(config):
        raise ConfigError("\n".join(problems))
    cls = engine_class(rollout.engine)
    if current_device().offloads and not cls.capabilities.sleep:
        raise ConfigError(
            f"{_KEY}: found {rollout.engine!r}, which does not sleep; on this device the actor needs its memory; "
            "allowed: an engine with the capability sleep"
        )
    if cls.capabilities.vllm:
        rollout = rollout.model_copy(update={"vllm": {"load_format": "dummy", **rollout.vllm}})
    build: Any = cls
    engine: RolloutEngine = build(model_path, rollout, speculation, config.run.seed, **rollout.engine_arguments)
    return engine
