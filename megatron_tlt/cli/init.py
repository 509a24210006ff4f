"""``tlt init``: writes a commented launch config for a model, devices and data, with the fastest layout that fits."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_tlt.cli import preflight
from megatron_tlt.cli.planned import fitting_spot, load_text, mean_response, memory_of, search_layouts
from megatron_tlt.config.docs import meanings
from megatron_tlt.config.shipped import shipped
from megatron_tlt.config.source import deep_merge
from megatron_tlt.config.violations import closest
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import DEFAULT_DEVICE, known_devices
from megatron_tlt.planning.job import job_of
from megatron_tlt.planning.layout_search import overrides_of
from megatron_tlt.planning.machine import CPU, Machine, find_machine
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.tasks import GENERATORS

_NODE = 8
_PROMPT, _RESPONSE, _LEAST_RESPONSE = 1024, 8192, 1024
_GLOBAL_BATCH = 32
"""Responses in a drafter step, over all ranks."""
_UNROLLED = ((9216, 3), (18432, 2))
"""Longest sequence and successive drafts that are trained; beyond, one, as further drafts keep many keys."""
_RESERVE = 0.1
"""Fraction of a device's memory that stays free of what the plan counts."""
_MEGATRON = {
    "tensor_model_parallel_size": "devices that share each matrix, within a node",
    "pipeline_model_parallel_size": "stages of layers",
    "virtual_pipeline_model_parallel_size": "chunks of layers per stage; more shorten the pipeline's bubble",
    "context_parallel_size": "devices that share each sequence",
    "expert_model_parallel_size": "devices over which experts are spread",
    "recompute_granularity": "activations computed again instead of kept (null, selective, full)",
}


@dataclass(frozen=True)
class _Choice:
    """A user's answers; ``per_node`` 0 for this machine's processor."""

    model: str
    nodes: int
    per_node: int
    machine: Machine
    data: str
    out: Path

    @property
    def title(self) -> str:
        where = f"{self.nodes} node(s) of {self.per_node} x {self.machine.name}" if self.per_node else "a processor"
        return f"{Path(os.path.abspath(self.model)).name} on {where}"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("init", help="write a launch config for a model, GPUs and data that fits")
    parser.description = "Asks for what is not given, if it runs in a terminal."
    parser.add_argument("--model", metavar="M", help="a Hugging Face folder, or a name of `tlt models`")
    parser.add_argument(
        "--gpus", metavar="N", help="GPUs, such as 4 or 2x8 (two nodes); 0 for this machine's processor"
    )
    parser.add_argument("--device", metavar="NAME", help=f"kind of GPU: {', '.join(known_devices())}")
    parser.add_argument("--data", metavar="D", help="a .jsonl or .parquet file, or names of `tlt tasks`: NAME,NAME,...")
    parser.add_argument(
        "--response-tokens", metavar="N", type=int, help="longest response (default: the longest that fits)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="file to write (default: named by model and devices)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    choice = _choose(arguments)
    values, seconds = _fitting(choice, arguments.response_tokens)
    config = load_text(choice.out, yaml.safe_dump(values), partial(preflight.load_checked, starts=False))
    job, tokens = job_of(config, not choice.machine.is_cpu), config.rollout.max_response_tokens
    memory = memory_of(config, job, choice.machine)
    assert memory.fits  # the search's layout, read back
    fits = f"margin {memory.margin / 1e9:.1f} GB per device, about {seconds:.0f} s a step without speculation"
    head = f"# {choice.title}, responses of up to {tokens} tokens. Written by `tlt init`.\n# Computed: {fits}.\n"
    atomic_write_text(choice.out, head + "".join(_commented(values)))
    print(f"written: {choice.out} ({choice.title}, responses of up to {tokens} tokens)")
    print(f"fits: {fits} (computed)")
    other = f" --devices {choice.machine.name}" if choice.per_node and choice.machine.name != DEFAULT_DEVICE else ""
    if (folder := config.model.path) is not None and not folder.is_dir():
        print(f"before training: put the model's Hugging Face folder at {folder} (hf download), or change model.path")
    print(f"next: tlt plan {choice.out}{other}\n      tlt train {choice.out}")
    return 0


def _choose(arguments: argparse.Namespace) -> _Choice:
    model = _asked(arguments.model, "model", "Model: a Hugging Face folder or a name of `tlt models`", "qwen2.5-0.5b")
    _model(model, Path())
    given = _asked(arguments.gpus, "gpus", "GPUs, such as 4 or 2x8; 0 for this machine's processor", "8")
    size = re.fullmatch(r"(?:(\d+)x)?(\d+)", given)
    if size is None or (size[1] and not int(size[1]) * int(size[2])):
        raise ConfigError(f"--gpus: found {given!r}; allowed: a number such as 4, or nodes x GPUs such as 2x8")
    nodes, per_node = int(size[1] or 1), int(size[2])
    if not size[1] and per_node > _NODE and per_node % _NODE == 0:
        nodes, per_node = per_node // _NODE, _NODE
    kind = CPU
    if per_node:
        device = arguments.device or (None if sys.stdin.isatty() else DEFAULT_DEVICE)
        kind = _asked(device, "device", f"Kind of GPU: {', '.join(known_devices())}", DEFAULT_DEVICE)
        if kind not in known_devices():
            raise ConfigError(f"--device: found {kind!r}; {closest(kind, known_devices())}")
    data = _asked(arguments.data, "data", "Data: a .jsonl or .parquet file, or names of `tlt tasks`", "chain_sum")
    name = re.sub(r"[^a-z0-9._-]", "-", Path(os.path.abspath(model)).name.lower())
    out = arguments.out or Path(f"my-{name}-{nodes}n{per_node}g.yaml" if per_node else f"my-{name}-cpu.yaml")
    if out.exists() or not out.parent.is_dir():
        raise ConfigError(f"--out: {out} exists or is in no folder; allowed: a new file")
    return _Choice(model, nodes, per_node, find_machine(kind), data, out)


def _asked(given: str | None, option: str, question: str, default: str) -> str:
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise ConfigError(f"--{option}: not given; allowed: {question[0].lower()}{question[1:]}")
    try:
        return input(f"{question} [{default}]: ").strip() or default
    except EOFError:
        raise ConfigError(f"--{option}: not given") from None


def _fitting(choice: _Choice, response_tokens: int | None) -> tuple[dict[str, Any], float]:
    """The config's values with the fastest layout, and the seconds of a step.

    Responses have ``response_tokens``, or the most that fit if it is None.

    Raises:
        ConfigError: nothing fits.
    """
    longest = _longest_sequence(choice)
    prompt = min(_PROMPT if choice.per_node else _PROMPT // 4, longest // 4)
    tokens = response_tokens or min(_RESPONSE if choice.per_node else _LEAST_RESPONSE // 2, longest - prompt)
    least = _LEAST_RESPONSE if choice.per_node else _LEAST_RESPONSE // 4
    while True:
        values = _values(choice, prompt, tokens)
        config = load_text(choice.out, yaml.safe_dump(values))
        if result := search_layouts(config, choice.machine, mean_response(None, config), _RESERVE).best:
            best = result[0]
            spot = fitting_spot(config, best.job.engines)
            return deep_merge(deep_merge(values, _without_defaults(overrides_of(best.job))), spot), best.total
        if response_tokens is not None or tokens // 2 < least:
            raise ConfigError(
                f"nothing fits: {choice.title} with responses of {tokens} tokens; allowed: more or larger GPUs "
                "(--gpus, --device), a smaller model, shorter responses (--response-tokens)"
            )
        tokens //= 2


def _longest_sequence(choice: _Choice) -> int:
    folder = Path(choice.model)
    file = folder / "config.json" if folder.is_dir() else shipped("architectures")[choice.model]
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model: {file} has no max_position_embeddings; allowed: a Hugging Face folder") from error


def _values(choice: _Choice, prompt: int, tokens: int) -> dict[str, Any]:
    """A config without a layout, as a parent with this choice's own keys."""
    values: dict[str, Any] = {
        "defaults": ["shared/gpu-80gb.yaml" if choice.per_node else "quickstart-cpu.yaml"],
        "run": {"name": choice.out.stem},
        "model": _model(choice.model, choice.out.parent) | ({} if choice.per_node else {"recipe": None}),
        "tasks": list(_tasks(choice)),
        "actor": {"max_tokens_per_micro_batch": prompt + tokens},
        "rollout": {"max_prompt_tokens": prompt, "max_response_tokens": tokens},
    }
    if not choice.per_node:
        return values | {"trainer": {"steps": 30, "prompts_per_step": 8}}
    world = choice.nodes * choice.per_node
    unroll = next((steps for most, steps in _UNROLLED if prompt + tokens <= most), 1)
    values["actor"] = {"transformer_impl": "transformer_engine", "max_tokens_per_micro_batch": prompt + tokens}
    return values | {
        "launcher": {"nnodes": choice.nodes, "nproc_per_node": choice.per_node},
        "drafter": {
            "entries_per_step": max(1, _GLOBAL_BATCH // world),
            "max_tokens_per_micro_batch": prompt + tokens,
            "unroll_steps": unroll,
        },
        "spot": {"min_replicas": min(2, world - 1)} if world > 1 else None,
        "trainer": {"steps": 200, "prompts_per_step": max(16, min(128, 8 * world))},
    }


def _model(given: str, folder: Path) -> dict[str, Any]:
    known = shipped("architectures")
    if Path(given).is_dir():
        return {"path": given if os.path.isabs(given) else os.path.relpath(given, folder)}
    if given not in known:
        raise ConfigError(f"--model: found {given!r}, no folder; of the known names, {closest(given, known)}")
    return {"path": f"models/{given}", "architecture": f"architectures/{given}.json"}


def _tasks(choice: _Choice) -> Iterator[dict[str, Any]]:
    file, folder = Path(choice.data), Path(choice.model)
    templates = ("chat_template.jinja", "tokenizer_config.json")
    chat = not folder.is_dir() or any(
        (folder / name).is_file() and "chat_template" in name + (folder / name).read_text(encoding="utf-8")
        for name in templates
    )
    if file.suffix in (".jsonl", ".parquet"):
        if not file.is_file():
            raise ConfigError(f"--data: no file {file}")
        path = str(file) if file.is_absolute() else os.path.relpath(file, choice.out.parent)
        yield {"kind": "file", "name": file.stem, "path": path, "chat": chat, "answer_format": "boxed"}
        return
    for name in choice.data.split(","):
        if name in GENERATORS:
            yield {"kind": "generated", "name": name}
        else:
            yield {"kind": "reasoning_gym", "name": name, "chat": chat, "answer_format": "answer_tag"}


def _without_defaults(found: dict[str, Any]) -> dict[str, Any]:
    """A layout's keys without those that say nothing: null, false, and parallelism over one device."""
    megatron = {
        key: value
        for key, value in found["actor"]["megatron"].items()
        if value is True or value not in (None, False, 1) or key == "tensor_model_parallel_size"
    }
    return found | {"actor": found["actor"] | {"megatron": megatron}}


def _commented(values: dict[str, Any]) -> Iterator[str]:
    """The values as lines of YAML, each key where it first stands below a comment with its meaning."""
    known = meanings() | {f"actor.megatron.{key}": text for key, text in _MEGATRON.items()}
    yield "# What it inherits; a key here or on the command line takes precedence. `tlt config FILE` prints all keys.\n"
    path: list[str] = []
    explained = {"defaults"}
    for line in yaml.safe_dump(values, sort_keys=False, width=110).splitlines():
        indent, key = re.match(r"( *(?:- )?)([\w]+)?:?", line).groups()  # type: ignore[union-attr]
        path = [*path[: len(indent) // 2], key or ""]
        name = ".".join(part for part in path if part)
        if not indent and path[0] != "defaults":
            yield "\n"
        if name not in explained and "- " not in indent:
            explained.add(name)
            yield from (f"{indent}# {part}\n" for part in textwrap.wrap(known.get(name, ""), 100))
        yield f"{line}\n"
