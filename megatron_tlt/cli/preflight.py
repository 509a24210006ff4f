"""Checks before ranks start, shared by all commands that take a config.

Tasks and prompt files are always checked. Checks that need the model's folder (weights, tokenizer, chat template,
prompt lengths in tokens) run if the folder exists; otherwise a note says what was not checked and why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import megatron_tlt
from megatron_tlt.algorithms.loss_keys import ignored_keys, unapplied_recipe_keys
from megatron_tlt.algorithms.registry import algorithm_problems
from megatron_tlt.cli.preflight_tasks import Findings, check_tasks
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.model import require_model_folder
from megatron_tlt.config.passthrough import unchecked
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.models.recipe import RECIPE_FILE, recipe_folder
from megatron_tlt.platform.nodes import Nodes, busy_ports
from megatron_tlt.rollout.engines import engine_problems

_MODULE = "megatron_tlt.cli.preflight_model"
WHOLE = "--whole"
"""Option of that module: the folder must hold weights and a tokenizer; otherwise missing parts are not checked."""
_FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of CPUs with bfloat16 multiplication in hardware, in Linux's names (``bf16``: Arm)."""


def load_checked(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    starts: bool = True,
    trains: bool = True,
    of_interest: Callable[[TltConfig], TltConfig] = lambda config: config,
) -> TltConfig:
    """Loads a launch config and runs all checks that are possible before ranks start.

    Prints on stderr what was left out or not checked. Under torchrun one process per node checks; the others only load
    the config. If ranks start here (``starts``), the model's folder must exist and the ports must be free. What
    concerns updates alone is a note unless the command ``trains``. The part of the config that the command reads is
    ``of_interest``; it is what is checked and returned.

    Raises:
        ConfigError: one line per violation in the config, the tasks, the files and the model's folder.
        RunError: the process that checks the model's folder ended early.
    """
    if int(os.environ.get("LOCAL_RANK", "0")):
        return of_interest(load_config(path, overrides))
    found = Findings()

    def examine(config: TltConfig) -> list[str]:
        return _examine(found, of_interest(config), starts=starts, ports=starts, trains=trains)

    try:
        return of_interest(load_config(path, overrides, further=examine))
    finally:
        for note in found.notes:
            print(f"note: {note}", file=sys.stderr)


def load_and_examine(path: Path, overrides: Sequence[str]) -> tuple[TltConfig, list[str]]:
    """The config and the notes for ``tlt doctor``, which checks ports itself.

    Raises:
        ConfigError: see :func:`load_checked`.
    """
    found = Findings()
    return load_config(path, overrides, further=partial(_examine, found, starts=True, ports=False)), found.notes


def _examine(found: Findings, config: TltConfig, *, starts: bool, ports: bool, trains: bool = True) -> list[str]:
    if lines := unchecked(config):
        found += Findings(lines) if starts else Findings(notes=[line.replace("cannot be", "not") for line in lines])
    found.add(algorithm_problems(config.algorithm))
    ignored = ignored_keys(config)
    found += Findings(ignored) if trains else Findings(notes=[f"for training: {line}" for line in ignored])
    unapplied = unapplied_recipe_keys(config)
    if unapplied:
        found.notes.append(
            f"algorithm.loss: found {config.algorithm.loss!r}, which does not name {', '.join(unapplied)} in applies; "
            f"what {config.algorithm.name} sets there has no effect"
        )
    if values := {key: value for key, value in config.algorithm.recipe_values.items() if key not in unapplied}:
        said = ", ".join(f"{key}: {value}" for key, value in values.items())
        found.notes.append(f"algorithm.name: {config.algorithm.name} sets {said}")
    if problem := missing_layers(config):
        found += Findings([problem]) if starts else Findings(notes=[f"for training: {problem}"])
    found.add(engine_problems(config))
    found += _tasks_and_model(config, starts)
    flags = (
        processor_flags() if starts and not Path("/dev/nvidiactl").exists() else None
    )  # with NVIDIA's driver, GPUs compute
    if flags is not None and (note := slow_bfloat16(config, flags)):
        found.notes.append(note)
    if config.launcher.nnodes > 1 and "RANK" not in os.environ:
        if ports:
            try:
                found.add(busy_ports(Nodes.from_environment(config.launcher.nnodes)))
            except ConfigError as error:
                found.add(error)
        elif not starts:
            found.notes.append("not checked: the rendezvous ports, because no ranks start here")
    return found.violations


def _tasks_and_model(config: TltConfig, starts: bool) -> Findings:
    found = Findings()
    if config.model.recipe is not None:
        folder, there = recipe_folder(config), (recipe_folder(config) / RECIPE_FILE).is_file()
        why = "the model of model.recipe is not built yet; the ranks check it after building it"
    else:
        folder = config.model.path or Path()
        there = config.model.path is not None and folder.is_dir()
        why = f"model.path: no folder {folder}" if config.model.path is not None else "there is no model.path"
        if starts and not there and config.model.architecture is not None:  # without it, the config's check says so
            try:
                require_model_folder(config)
            except ConfigError as error:
                found.add(error)
    if there and not starts and find_spec("transformers") is None:
        there, why = False, "transformers is not installed"
    if there:
        found += _with_model(config, folder, starts)
    else:
        found += _tasks_alone(config, starts)
        what = "prompts' lengths in tokens" if config.model.recipe else "weights, tokenizer, prompts' lengths in tokens"
        found.notes.append(f"not checked: {what}, because {why}")
    return found


def _tasks_alone(config: TltConfig, starts: bool) -> Findings:
    """Checks the tasks without a tokenizer. A plan needs none of their libraries: it only notes a missing one."""
    try:
        return check_tasks(config)
    except ModuleNotFoundError as error:
        if starts:
            raise
        return Findings(notes=[f"not checked: the tasks, because {error.name} is not installed"])


def _with_model(config: TltConfig, folder: Path, starts: bool) -> Findings:
    """Checks in a separate process: transformers would import torch into this one, which takes seconds.

    Raises:
        RunError: that process ended early; its own message is on stderr.
    """
    root = str(Path(megatron_tlt.__file__).resolve().parent.parent)
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-m", _MODULE, str(folder), *([WHOLE] if starts else [])],
        input=config.model_dump_json(),
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,  # Ctrl-C reaches only this process, which then ends the child
    )
    if done.returncode:
        raise RunError(f"{folder}: the check of the model's folder ended early, with status {done.returncode}")
    return Findings(**json.loads(done.stdout.splitlines()[-1]))


def missing_layers(config: TltConfig) -> str | None:
    """What is wrong if the actor's layers are of a library that is not installed: every rank would end with it."""
    if config.actor.transformer_impl != "transformer_engine" or find_spec("transformer_engine") is not None:
        return None
    return (
        "actor.transformer_impl: found 'transformer_engine', which is not installed; allowed here: 'local', or the "
        "set-up with TLT_TRANSFORMER_ENGINE=yes"
    )


def processor_flags() -> frozenset[str] | None:
    """Flags of the first processor; None if the system does not report them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    return None if found is None else frozenset(found.partition(":")[2].split())


def slow_bfloat16(config: TltConfig, flags: Collection[str]) -> str | None:
    """A note if the config uses bfloat16 on CPUs that, by these flags, emulate it."""
    keys = []
    if config.actor.megatron.get("bf16"):
        keys.append("actor.megatron.bf16")
    if config.rollout.vllm.get("dtype") == "bfloat16":
        keys.append("rollout.vllm.dtype")
    if not keys or _FAST_BFLOAT16.intersection(flags):
        return None
    return (
        f"{' and '.join(keys)} select bfloat16, but this machine's processors have no instructions for it (AMX, "
        "AVX-512 BF16): about ten times slower than float32 (actor.megatron.bf16=false rollout.vllm.dtype=float32)"
    )
